"""The compiled kernel of lists of tiles: its key, library and job. Imports neither TileLang nor its compiler."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ....variant.program import program
from ..build.library import find_or_compile, key_of, load
from .analysis import analysis, mask_text


@functools.cache
def lists_function(variant: str, arch: str, packed: bool = False) -> Callable[..., Any]:
    """The compiled kernel of a variant's mask, which has an analysis, from the cache on disk or compiled now.

    packed: for packed calls.
    """
    return load(ensure_lists_compiled(variant, arch, packed))["lists"]


def ensure_lists_compiled(variant: str, arch: str, packed: bool = False) -> Path:
    """The shared library of :func:`lists_function`."""

    def kernel() -> Any:
        from .kernel import lists_kernel

        found = analysis(variant)
        assert found is not None
        return lists_kernel(found, dtypes_of(variant), packed)

    return find_or_compile(lists_key(variant, arch, packed), kernel, arch)


def lists_key(variant: str, arch: str, packed: bool = False) -> str:
    """The cache key of the kernel; of a call it depends on the mask, the architecture and whether it is packed."""
    kind = "packed_tile_lists" if packed else "tile_lists"
    return key_of(f"{kind} | {arch} | {mask_text(variant)}", "lists.kernel")


def dtypes_of(variant: str) -> dict[int, str]:
    """How the kernel takes the variant's tensors, by their numbers."""
    dtypes = [each.dtype for each in program(variant).tensors]
    names = ["uint8" if dtype == torch.bool else str(dtype).removeprefix("torch.") for dtype in dtypes]
    return dict(enumerate(names))


@dataclass(frozen=True)
class ListsJob:
    """The kernel that makes the lists of a variant's mask, to compile ahead."""

    variant: str
    arch: str
    packed: bool = False

    @property
    def key(self) -> str:
        """The key of the library in the kernel cache."""
        return lists_key(self.variant, self.arch, self.packed)

    def compile(self) -> None:
        """Compiles the kernel into the cache."""
        ensure_lists_compiled(self.variant, self.arch, self.packed)

    def __str__(self) -> str:
        return f"lists of tiles {self.variant}{' packed' * self.packed} {self.arch}"
