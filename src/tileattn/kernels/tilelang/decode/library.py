"""The compiled kernels of the decode phase and their cache keys; imports neither TileLang nor its compiler."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ....call.decoding import DecodeCall
from ....variant.program import program
from ..build.library import find_or_compile, key_of, load
from .config import Config
from .ranges import mask_differs_by_head, text_of_range


@functools.cache
def decode_function(call: DecodeCall, config: Config) -> Callable[..., Any]:
    """The compiled attention kernel of a call, from the cache on disk or compiled now (some seconds)."""
    return load(ensure_decode_compiled(call, config))["decode"]


@functools.cache
def plan_function(arch: str, packed: bool, variant: str, listed: bool = False) -> Callable[..., Any]:
    """The compiled planning kernel (plan_kernel.py) of calls with a mask; listed: of those that go by lines."""
    return load(ensure_plan_compiled(arch, packed, variant, listed))["plan"]


@functools.cache
def packed_keys_function(arch: str) -> Callable[..., Any]:
    """The compiled kernel that finds each sequence's keys (packed_keys.py)."""
    return load(ensure_packed_keys_compiled(arch))["packed_keys"]


def ensure_compiled(call: DecodeCall, config: Config) -> Path:
    """The shared library of a call's attention kernel. The kernels that run before it are compiled as well."""
    ensure_plan_compiled(call.arch, call.packed, call.variant, call.listed)
    if call.packed_keys:
        ensure_packed_keys_compiled(call.arch)
    return ensure_decode_compiled(call, config)


def ensure_decode_compiled(call: DecodeCall, config: Config) -> Path:
    """The shared library of :func:`decode_function`."""

    def kernel() -> Any:
        from .kernel import decode_kernel

        return decode_kernel(call, config)

    return find_or_compile(decode_key(call, config), kernel, call.arch)


def ensure_plan_compiled(arch: str, packed: bool, variant: str, listed: bool = False) -> Path:
    """The shared library of :func:`plan_function`."""

    def kernel() -> Any:
        from .plan_kernel import plan_kernel

        return plan_kernel(arch, packed, program(variant), listed)

    return find_or_compile(plan_key(arch, packed, variant, listed), kernel, arch)


def ensure_packed_keys_compiled(arch: str) -> Path:
    """The shared library of :func:`packed_keys_function`."""

    def kernel() -> Any:
        from .packed_keys import packed_keys_kernel

        return packed_keys_kernel(arch)

    return find_or_compile(packed_keys_key(arch), kernel, arch)


def decode_key(call: DecodeCall, config: Config) -> str:
    """The cache key of an attention kernel: all that decides what it is compiled to."""
    facts = (
        f"{call.dtype} {call.head_dim} {call.head_dim_v} sink={call.sink} lse={call.return_lse} "
        f"aligned={call.aligned} packed={call.packed} packed_keys={call.packed_keys} "
        f"page_rows={call.page_rows} {call.arch}{' listed' * call.listed}"
    )
    return key_of(f"decode | {facts} | {config} | {program(call.variant)}", "decode.kernel")


def plan_key(arch: str, packed: bool, variant: str, listed: bool = False) -> str:
    """The cache key of a planning kernel; of a variant it depends on the range of keys, and on whose lines are."""
    traced = program(variant)
    by = f"{' listed' * listed}{' by head' * (listed and mask_differs_by_head(traced))}"
    return key_of(f"decode_plan | packed={packed} {arch}{by} | {text_of_range(traced)}", "decode.plan_kernel")


def packed_keys_key(arch: str) -> str:
    """The cache key of the kernel that finds each sequence's keys; of a call it depends on the architecture alone."""
    return key_of(f"packed_keys | {arch}", "decode.packed_keys")
