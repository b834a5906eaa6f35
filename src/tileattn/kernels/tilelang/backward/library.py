"""The compiled backward kernels: keys, libraries, jobs. Imports neither TileLang nor its compiler."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from ....call.facts import BackwardCall
from ....variant.program import program
from ..build.background import behind, taken
from ..build.job import KernelJob, Name
from ..build.library import find_or_compile, load
from .config import read_together
from .defaults import MainConfig, adds_dq, default, finished, listed_as, prepared, queries_default
from .hopper.config import HopperBackwardConfig
from .operand_gradients import paths

Kernel = Callable[..., None]


class Kernels(NamedTuple):
    """The kernels of one call; `main` adds up dq, or `queries` computes it."""

    prepare: Kernel
    main: Kernel
    finish: Kernel | None
    queries: Kernel | None


@functools.cache
def backward_kernels(call: BackwardCall, config: MainConfig | None = None) -> Kernels:
    """The compiled kernels of a call, from the cache on disk or compiled now (some seconds each).

    Args:
        call: the static facts.
        config: of the main kernel (:mod:`.space`); None takes the default.
    """
    jobs = longest_first(BackwardJob(call, name, config) for name in kernel_names(call))
    with behind(lambda: jobs):
        functions = {job.kernel: load(ensure_compiled(call, job.kernel, config))[job.kernel] for job in taken(jobs)}
    return Kernels(functions["prepare"], functions["main"], functions.get("finish"), functions.get("queries"))


@functools.cache
def main_kernel(call: BackwardCall, config: MainConfig) -> Kernel:
    """The main kernel of a call alone, as :func:`backward_kernels` finds it."""
    return load(ensure_compiled(call, "main", config))["main"]


def kernel_names(call: BackwardCall) -> tuple[str, ...]:
    """The names of a call's kernels."""
    return ("prepare", "main", "finish" if adds_dq(call) else "queries")


@functools.cache
def add_shares(call: BackwardCall) -> Kernel:
    """The compiled kernel that adds up the parts of dk and dv (shares/add.py)."""
    return load(find_or_compile(SharesJob(call.forward.dtype, call.forward.arch)))["add"]


def ensure_compiled(call: BackwardCall, name: str, config: MainConfig | None = None) -> Path:
    """The shared library of one of a call's kernels, compiled if the cache does not hold it."""
    return find_or_compile(BackwardJob(call, name, config))


def cache_key(call: BackwardCall, name: str, config: MainConfig | None = None) -> str:
    """The cache key of one of a call's kernels: all that decides what it is compiled to.

    Only the main kernel and that for dq alone depend on the variant; the others serve any.
    """
    return BackwardJob(call, name, config).key


def _facts(call: BackwardCall, name: str, main: MainConfig) -> str:
    forward = read_together(call)
    shape = f"{forward.dtype} {forward.arch} {forward.head_dim}"
    if forward.packed:
        parts = {"prepare": prepared(call), "finish": finished(call, main)}
        shape = f"packed {parts.get(name, '')} {shape}"
    if name == "finish":
        return f"{shape} {main.order(forward) if isinstance(main, HopperBackwardConfig) else 'row by row'}"
    if name == "prepare":
        sums = f"dq={adds_dq(call)}"
        return f"{shape} {forward.head_dim_v} dlse={call.dlse} aligned={call.aligned} {sums}"
    config = listed_as(main, queries_default(call)) if name == "queries" else main
    facts = f"{shape} {forward.head_dim_v} aligned={forward.aligned} dropout={forward.dropout} | {config}"
    if name == "main":
        facts += f" | dq={adds_dq(call)} {[(str(path.load), path.way) for path in paths(call)]}"
    return f"{facts} | {program(forward.variant).backward_text}"


@dataclass(frozen=True)
class BackwardJob(KernelJob):
    """One kernel of a call's backward pass.

    Attributes:
        kernel: one of :func:`kernel_names`.
        config: of the main kernel; None is the default.
    """

    call: BackwardCall
    kernel: str
    config: MainConfig | None = None

    @property
    def arch(self) -> str:
        return self.call.forward.arch

    @property
    def name(self) -> Name:
        facts = _facts(self.call, self.kernel, self.config or default(self.call))
        return Name(f"backward | {self.kernel} | {facts}", "backward.kernels")

    def function(self) -> Any:
        from .kernels import kernel_of

        return kernel_of(self.call, self.kernel, self.config or default(self.call))

    def __str__(self) -> str:
        return f"{self.kernel} of {self.call}"


@dataclass(frozen=True)
class SharesJob(KernelJob):
    """The kernel that adds up the parts of dk and dv of calls whose groups of heads are split."""

    dtype: torch.dtype
    arch: str

    @property
    def name(self) -> Name:
        return Name(f"backward | shares | {self.dtype} {self.arch}", "backward.shares.add")

    def function(self) -> Any:
        from .shares.add import add_kernel

        return add_kernel(self.dtype)

    def __str__(self) -> str:
        return f"sums of dk and dv ({self.dtype} {self.arch})"


AnyBackwardJob = BackwardJob | SharesJob


JobOfBackward = TypeVar("JobOfBackward", bound=AnyBackwardJob)
LONGEST_FIRST = ("main", "queries", "finish", "prepare")  # as they take to compile


def longest_first(jobs: Iterable[JobOfBackward]) -> tuple[JobOfBackward, ...]:
    """Kernels in the order of the time that they take to compile."""

    def place(job: JobOfBackward) -> int:
        return LONGEST_FIRST.index(job.kernel) if isinstance(job, BackwardJob) else len(LONGEST_FIRST)

    return tuple(sorted(jobs, key=place))


def kernel_jobs(call: BackwardCall, config: MainConfig | None = None) -> tuple[AnyBackwardJob, ...]:
    """All kernels of a call.

    config: of the main kernel; None is the default.
    """
    adds = config is not None and config.split
    adding = (SharesJob(call.forward.dtype, call.forward.arch),) if adds else ()
    return (*(BackwardJob(call, name, config) for name in kernel_names(call)), *adding)
