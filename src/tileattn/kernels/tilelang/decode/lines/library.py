"""The compiled kernels that make lines, and their cache keys; imports neither TileLang nor its compiler."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...build.job import KernelJob, Name
from ...build.library import find_or_compile, load
from ...lists.analysis import mask_text
from ...lists.library import dtypes_of
from .visits import analysis_of, widths


@functools.cache
def lines_function(arch: str, packed: bool, variant: str, queries: int) -> Callable[..., Any]:
    """The compiled kernel that makes the lines of a variant's mask (kernel.py), of so many queries at most."""
    return load(ensure_lines_compiled(arch, packed, variant, queries))["lines"]


def ensure_lines_compiled(arch: str, packed: bool, variant: str, queries: int) -> Path:
    """The shared library of :func:`lines_function`."""
    return find_or_compile(LinesJob(arch, packed, variant, queries))


def lines_key(arch: str, packed: bool, variant: str, queries: int) -> str:
    """The cache key of the kernel that makes lines; of a variant it depends on the mask alone."""
    return LinesJob(arch, packed, variant, queries).key


@dataclass(frozen=True)
class LinesJob(KernelJob):
    """The kernel that lists the tiles which calls visit, of at most so many queries in a tile of rows."""

    arch: str
    packed: bool
    variant: str
    queries: int

    @property
    def name(self) -> Name:
        facts = f"packed={self.packed} widths={widths(self.queries)} {self.arch}"
        return Name(f"decode_lines | {facts} | {mask_text(self.variant)}", "decode.lines.kernel")

    def function(self) -> Any:
        from .kernel import lines_kernel

        found = analysis_of(self.variant, self.queries)
        assert found is not None
        return lines_kernel(found, dtypes_of(self.variant), self.packed)

    def __str__(self) -> str:
        return f"decode: lines of {self.variant}{' packed' * self.packed} queries={self.queries} {self.arch}"
