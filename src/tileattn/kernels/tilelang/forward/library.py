"""The compiled forward kernels: keys, libraries, jobs. Imports neither TileLang nor its compiler."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....call.facts import AttentionCall
from ....call.fp8 import FP8
from ....variant.program import program
from ..build.background import behind
from ..build.job import KernelJob, Name
from ..build.library import find_or_compile, load
from ..packed.library import PlanJob
from .amd.config import AmdConfig
from .defaults import Config, default


@functools.cache
def forward_function(call: AttentionCall, config: Config | None = None) -> Callable[..., Any]:
    """The compiled forward kernel of a call, from the cache on disk or compiled now (some seconds).

    Args:
        call: the static facts; ``needs_grad`` does not matter.
        config: tile sizes; None takes the default.
    """
    path = ensure_compiled(call, config or default(call))
    return load(path)["forward"]


def ensure_compiled(call: AttentionCall, config: Config) -> Path:
    """The shared library of a call's forward kernel, compiled if the cache does not hold it.

    For fp8 and packed sequences, the kernel that runs before it is compiled as well.
    """
    before: list[KernelJob] = [Job(call, None)] if call.dtype == FP8 else []
    before += [PlanJob(call.arch)] if call.packed else []
    with behind(lambda: before):
        library = find_or_compile(Job(call, config))
        for each in before:  # small, and so compiled behind it
            find_or_compile(each)
    return library


@functools.cache
def transpose_function(call: AttentionCall) -> Callable[..., Any]:
    """The compiled kernel that lays out fp8 values for the forward kernel: ``transpose(v, transposed)``."""
    return load(ensure_transpose_compiled(call))["transpose"]


def ensure_transpose_compiled(call: AttentionCall) -> Path:
    """The shared library of :func:`transpose_function`."""
    return find_or_compile(Job(call, None))


def transpose_key(call: AttentionCall) -> str:
    """The cache key of the compiled transposition; of the call it depends on head_dim_v and the architecture alone."""
    return Job(call, None).key


def cache_key(call: AttentionCall, config: Config) -> str:
    """The cache key of a kernel: all that decides what it is compiled to."""
    return Job(call, config).key


def _facts(call: AttentionCall, config: Config) -> str:
    facts = (
        f"{call.dtype} {call.head_dim} {call.head_dim_v} sink={call.sink} lse={call.return_lse} "
        f"aligned={call.aligned} dropout={call.dropout} {call.arch}"
    )
    if call.packed:
        facts += " packed"
    text = config.kernel_text if isinstance(config, AmdConfig) else str(config)
    return f"forward | {facts} | {text} | {program(call.variant)}"


@dataclass(frozen=True)
class Job(KernelJob):
    """One kernel: the forward kernel of a call, or (config None) the transposition that fp8 calls run before it."""

    call: AttentionCall
    config: Config | None

    @property
    def arch(self) -> str:
        return self.call.arch

    @property
    def name(self) -> Name:
        if self.config is None:  # of the call it depends on head_dim_v and the architecture alone
            return Name(f"transpose_fp8 | {self.call.head_dim_v} {self.arch}", "forward.transpose_fp8")
        return Name(_facts(self.call, self.config), "forward.kernel")

    def function(self) -> Any:
        if self.config is None:
            from .transpose_fp8 import transpose_kernel

            return transpose_kernel(self.call)
        from .kernel import kernel_of

        return kernel_of(self.call, self.config)

    def compile(self) -> None:
        if self.config is None:
            ensure_transpose_compiled(self.call)
        else:
            ensure_compiled(self.call, self.config)

    def __str__(self) -> str:
        if self.config is None:
            return f"transpose_fp8 d{self.call.head_dim_v} {self.call.arch}"
        return f"{self.call} {self.config}"
