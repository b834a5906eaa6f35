"""The compiled kernels that make lines, and their cache keys; imports neither TileLang nor its compiler."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...build.library import find_or_compile, key_of, load
from ...lists.analysis import mask_text
from ...lists.library import dtypes_of
from .visits import analysis_of, widths


@functools.cache
def lines_function(arch: str, packed: bool, variant: str, queries: int) -> Callable[..., Any]:
    """The compiled kernel that makes the lines of a variant's mask (kernel.py), of so many queries at most."""
    return load(ensure_lines_compiled(arch, packed, variant, queries))["lines"]


def ensure_lines_compiled(arch: str, packed: bool, variant: str, queries: int) -> Path:
    """The shared library of :func:`lines_function`."""

    def kernel() -> Any:
        from .kernel import lines_kernel

        found = analysis_of(variant, queries)
        assert found is not None
        return lines_kernel(found, dtypes_of(variant), packed)

    return find_or_compile(lines_key(arch, packed, variant, queries), kernel, arch)


def lines_key(arch: str, packed: bool, variant: str, queries: int) -> str:
    """The cache key of the kernel that makes lines; of a variant it depends on the mask alone."""
    facts = f"packed={packed} widths={widths(queries)} {arch}"
    return key_of(f"decode_lines | {facts} | {mask_text(variant)}", "decode.lines.kernel")
