"""Many kernels at once, in processes of their own."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tileattn.compat.transformers.patterns import DenseMask
from tileattn.kernels.tilelang.build.batch import compile_all
from tileattn.variant.key import encode
from tileattn.variant.program import program


@dataclass(frozen=True)
class NamesMask:
    """Stands for a kernel whose variant is an adapter's mask: reads the variant's key instead of compiling."""

    variant: str

    @property
    def key(self) -> str:
        return "0" * 64

    def compile(self) -> None:
        assert program(self.variant).allows is not None


def test_a_process_knows_the_masks_of_adapters():
    mask = DenseMask(torch.ones(1, 1, 4, 4, dtype=torch.bool))
    (done,) = compile_all([NamesMask(encode(mask, ())[0])], 1)
    assert done.error is None
