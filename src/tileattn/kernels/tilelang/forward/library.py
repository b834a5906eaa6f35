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
from ..build.library import find_or_compile, key_of, load
from ..packed.library import ensure_plan_compiled
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

    For fp8 and packed sequences that of the kernel in front of it as well.
    """

    def kernel() -> Any:
        from .kernel import kernel_of

        return kernel_of(call, config)

    if call.dtype == FP8:
        ensure_transpose_compiled(call)
    if call.packed:
        ensure_plan_compiled(call.arch)
    return find_or_compile(cache_key(call, config), kernel, call.arch)


@functools.cache
def transpose_function(call: AttentionCall) -> Callable[..., Any]:
    """The compiled kernel that lays out fp8 values for the forward kernel: ``transpose(v, transposed)``."""
    return load(ensure_transpose_compiled(call))["transpose"]


def ensure_transpose_compiled(call: AttentionCall) -> Path:
    """The shared library of :func:`transpose_function`."""

    def kernel() -> Any:
        from .transpose_fp8 import transpose_kernel

        return transpose_kernel(call)

    return find_or_compile(transpose_key(call), kernel, call.arch)


def transpose_key(call: AttentionCall) -> str:
    """All that decides what the compiled transposition is: of the call, head_dim_v and the architecture alone."""
    return key_of(f"transpose_fp8 | {call.head_dim_v} {call.arch}", "forward.transpose_fp8")


def cache_key(call: AttentionCall, config: Config) -> str:
    """All that decides what the compiled kernel is."""
    facts = (
        f"{call.dtype} {call.head_dim} {call.head_dim_v} sink={call.sink} lse={call.return_lse} "
        f"aligned={call.aligned} dropout={call.dropout} {call.arch}"
    )
    if call.packed:
        facts += " packed"
    text = config.kernel_text if isinstance(config, AmdConfig) else str(config)
    return key_of(f"forward | {facts} | {text} | {program(call.variant)}", "forward.kernel")


@dataclass(frozen=True)
class Job:
    """One kernel: the forward kernel of a call, or (config None) the transposition that fp8 calls run before it."""

    call: AttentionCall
    config: Config | None

    @property
    def key(self) -> str:
        """Of the library in the kernel cache."""
        return transpose_key(self.call) if self.config is None else cache_key(self.call, self.config)

    def compile(self) -> None:
        """Into the cache."""
        if self.config is None:
            ensure_transpose_compiled(self.call)
        else:
            ensure_compiled(self.call, self.config)

    def __str__(self) -> str:
        if self.config is None:
            return f"transpose_fp8 d{self.call.head_dim_v} {self.call.arch}"
        return f"{self.call} {self.config}"
