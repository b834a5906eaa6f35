"""The compiled planning kernel of packed sequences; imports neither TileLang nor its compiler."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..build.library import find_or_compile, key_of, load


@functools.cache
def plan_function(arch: str) -> Callable[..., Any]:
    """The compiled planning kernel of packed sequences (plan_kernel.py), from the cache on disk or compiled now."""
    return load(ensure_plan_compiled(arch))["plan"]


def ensure_plan_compiled(arch: str) -> Path:
    """The shared library of :func:`plan_function`."""

    def kernel() -> Any:
        from .plan_kernel import plan_kernel

        return plan_kernel(arch)

    return find_or_compile(plan_key(arch), kernel, arch)


def plan_key(arch: str) -> str:
    """All that decides what the compiled planning kernel is: of a call, the architecture alone."""
    return key_of(f"sequence_plan | {arch}", "packed.plan_kernel")
