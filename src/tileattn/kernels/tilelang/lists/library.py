"""The compiled kernels of lists of tiles and of their bits: keys, libraries, jobs. Imports no compiler."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ....variant.expression import TensorSymbol, nodes
from ....variant.program import Program, program
from ..build.job import KernelJob, Name
from ..build.library import find_or_compile, load
from .analysis import analysis, mask_text


@functools.cache
def lists_function(variant: str, arch: str, packed: bool = False) -> Callable[..., Any]:
    """The compiled kernel of a variant's mask, which has an analysis, from the cache on disk or compiled now.

    packed: for packed calls.
    """
    return load(ensure_lists_compiled(variant, arch, packed))["lists"]


def ensure_lists_compiled(variant: str, arch: str, packed: bool = False) -> Path:
    """The shared library of :func:`lists_function`."""
    return find_or_compile(ListsJob(variant, arch, packed))


def lists_key(variant: str, arch: str, packed: bool = False) -> str:
    """The cache key of the kernel; of a call it depends on the mask, the architecture and whether it is packed."""
    return ListsJob(variant, arch, packed).key


def dtypes_of(variant: str) -> dict[int, str]:
    """How the kernel takes the variant's tensors, by their numbers."""
    dtypes = [each.dtype for each in program(variant).tensors]
    names = ["uint8" if dtype == torch.bool else str(dtype).removeprefix("torch.") for dtype in dtypes]
    return dict(enumerate(names))


@dataclass(frozen=True)
class ListsJob(KernelJob):
    """The kernel that makes the lists of a variant's mask, which has an analysis."""

    variant: str
    arch: str
    packed: bool = False

    @property
    def name(self) -> Name:
        kind = "packed_tile_lists" if self.packed else "tile_lists"
        return Name(f"{kind} | {self.arch} | {mask_text(self.variant)}", "lists.kernel")

    def function(self) -> Any:
        from .kernel import lists_kernel

        found = analysis(self.variant)
        assert found is not None
        return lists_kernel(found, dtypes_of(self.variant), self.packed)

    def __str__(self) -> str:
        return f"lists of tiles {self.variant}{' packed' * self.packed} {self.arch}"


@functools.cache
def bits_function(variant: str, arch: str) -> Callable[..., Any]:
    """The compiled kernel of the bits of a variant's mask, from the cache on disk or compiled now."""
    return load(ensure_bits_compiled(variant, arch))["mask_bits"]


def ensure_bits_compiled(variant: str, arch: str) -> Path:
    """The shared library of :func:`bits_function`."""
    return find_or_compile(BitsJob(variant, arch))


def bits_key(variant: str, arch: str) -> str:
    """The cache key of the kernel of bits; of a call it depends on the mask's expression and the architecture."""
    return BitsJob(variant, arch).key


def read_by_mask(traced: Program) -> frozenset[str]:
    """The names of the operands that a mask's expression has: ``t0``, ``i0``, ``f0`` and so on."""
    args = [node.args[0] for node in nodes(traced.allows) if node.op in ("load", "size", "symbol")]
    return frozenset(each.name if isinstance(each, TensorSymbol) else str(each) for each in args)


@dataclass(frozen=True)
class BitsJob(KernelJob):
    """The kernel that makes the bits of a variant's mask."""

    variant: str
    arch: str

    @property
    def name(self) -> Name:
        traced = program(self.variant)
        read = read_by_mask(traced)
        tensors = " ".join(
            f"{each.name}:{each.dtype}:{each.ones}{':aligned' * each.aligned}"
            for each in traced.tensors
            if each.name in read
        )
        return Name(f"mask_bits | {self.arch} | {traced.allows} | {tensors}", "lists.bits_kernel")

    def function(self) -> Any:
        from .bits_kernel import bits_kernel

        return bits_kernel(program(self.variant), read_by_mask(program(self.variant)))

    def __str__(self) -> str:
        return f"bits of mixed tiles {self.variant} {self.arch}"
