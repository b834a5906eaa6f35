"""The kernel that makes lists of packed calls, run on the CPU by emulate(): the bits of PyTorch's operations."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("tilelang")

from tests.kernels.tilelang.lists.test_kernel_emulated import assert_equal
from tests.kernels.tilelang.test_packed_lists import COUNT, CUTS, IDS, LENGTHS, MASKS, Call
from tileattn import FunctionMask, Mask
from tileattn.kernels.tile_lists import Cut, TileLists
from tileattn.kernels.tilelang.lists.analysis import analysis
from tileattn.kernels.tilelang.lists.kernel import lists_kernel
from tileattn.kernels.tilelang.lists.launch import packed_by_kernel, packed_fits
from tileattn.kernels.tilelang.lists.library import dtypes_of
from tileattn.kernels.tilelang.packed_lists import make_packed_lists
from tileattn.math import load
from tileattn.testing.emulator.kernel import COMPILER, Kernel
from tileattn.variant.key import encode

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")

WIDE = torch.arange(800)[None].repeat(COUNT, 1) // torch.arange(50, 50 + COUNT)[:, None] * 60
ALL: dict[str, Mask] = {
    **MASKS,
    # Wide loads by query, of each sequence and of all, and one by key.
    "wide": FunctionMask(
        lambda b, h, q, k: (k < load(WIDE, b, q + 5)) & (q - k < load(WIDE[0], q)) & (load(IDS[0], k) != h)
    ),
}
USUAL = ("wide", "cross")
# Lines of several tiles for each thread, and runs of more lines than a block has threads.
LONG = {
    "fine": Cut(4, 2, longest_first=True),
    "fine-keys": Cut(2, 16, by_keys=True, masks_queries=True),
}


@functools.cache
def kernel_of(variant: str) -> Callable[..., Any]:
    found = analysis(variant)
    assert found is not None
    return Kernel(lists_kernel(found, dtypes_of(variant), packed=True))


def by_both_ways(mask: Mask, call: Call, cut: Cut) -> tuple[TileLists, TileLists]:
    variant, operands = encode(mask, ())
    found = analysis(variant)
    assert found is not None
    assert packed_fits(found, operands, call.sizes, cut)
    work = call.work(cut)
    return (
        packed_by_kernel(kernel_of(variant), found, operands, call.packed, call.sizes, cut, work),
        make_packed_lists(variant, operands, call.sizes, cut, work),
    )


def _walks() -> Iterator[Any]:
    for name in ALL:
        for lengths in LENGTHS:
            usual = (name, lengths) == USUAL
            yield pytest.param(name, lengths, id=f"{name}-{lengths}", marks=[] if usual else [pytest.mark.slow])


@pytest.mark.parametrize(("name", "lengths"), list(_walks()))
def test_the_same_bits_as_by_pytorch(name: str, lengths: str) -> None:
    for cut in [*CUTS.values(), *(LONG.values() if lengths == "cross" else ())]:
        assert_equal(*by_both_ways(ALL[name], Call(lengths), cut))
