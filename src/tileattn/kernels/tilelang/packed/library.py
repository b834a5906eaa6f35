"""The compiled planning kernel of packed sequences; imports neither TileLang nor its compiler."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..build.job import KernelJob, Name
from ..build.library import find_or_compile, load


@functools.cache
def plan_function(arch: str) -> Callable[..., Any]:
    """The compiled planning kernel of packed sequences (plan_kernel.py), from the cache on disk or compiled now."""
    return load(ensure_plan_compiled(arch))["plan"]


def ensure_plan_compiled(arch: str) -> Path:
    """The shared library of :func:`plan_function`."""
    return find_or_compile(PlanJob(arch))


def plan_key(arch: str) -> str:
    """The cache key of the compiled planning kernel; of a call it depends on the architecture alone."""
    return PlanJob(arch).key


@dataclass(frozen=True)
class PlanJob(KernelJob):
    """The planning kernel of packed sequences."""

    arch: str

    @property
    def name(self) -> Name:
        return Name(f"sequence_plan | {self.arch}", "packed.plan_kernel")

    def function(self) -> Any:
        from .plan_kernel import plan_kernel

        return plan_kernel(self.arch)

    def __str__(self) -> str:
        return f"plan of packed sequences {self.arch}"
