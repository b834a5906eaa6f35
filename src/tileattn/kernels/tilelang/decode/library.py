"""The compiled kernels of the decode phase and their cache keys; imports neither TileLang nor its compiler."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....call.decoding import DecodeCall
from ....variant.program import program
from ..build.job import KernelJob, Name
from ..build.library import find_or_compile, load
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
    return find_or_compile(DecodeJob(call, config))


def ensure_plan_compiled(arch: str, packed: bool, variant: str, listed: bool = False) -> Path:
    """The shared library of :func:`plan_function`."""
    return find_or_compile(PlanJob(arch, packed, variant, listed))


def ensure_packed_keys_compiled(arch: str) -> Path:
    """The shared library of :func:`packed_keys_function`."""
    return find_or_compile(PackedKeysJob(arch))


def decode_key(call: DecodeCall, config: Config) -> str:
    """The cache key of an attention kernel: all that decides what it is compiled to."""
    return DecodeJob(call, config).key


def plan_key(arch: str, packed: bool, variant: str, listed: bool = False) -> str:
    """The cache key of a planning kernel; of a variant it depends on the range of keys, and on whose lines are."""
    return PlanJob(arch, packed, variant, listed).key


def packed_keys_key(arch: str) -> str:
    """The cache key of the kernel that finds each sequence's keys; of a call it depends on the architecture alone."""
    return PackedKeysJob(arch).key


# --- Jobs ---


@dataclass(frozen=True)
class DecodeJob(KernelJob):
    """The attention kernel of a call."""

    call: DecodeCall
    config: Config

    @property
    def arch(self) -> str:
        return self.call.arch

    @property
    def name(self) -> Name:
        call = self.call
        facts = (
            f"{call.dtype} {call.head_dim} {call.head_dim_v} sink={call.sink} lse={call.return_lse} "
            f"aligned={call.aligned} packed={call.packed} packed_keys={call.packed_keys} "
            f"page_rows={call.page_rows} {call.arch}{' listed' * call.listed}"
        )
        return Name(f"decode | {facts} | {self.config} | {program(call.variant)}", "decode.kernel")

    def function(self) -> Any:
        from .kernel import decode_kernel

        return decode_kernel(self.call, self.config)

    def __str__(self) -> str:
        return f"{self.call} {self.config}"


@dataclass(frozen=True)
class PlanJob(KernelJob):
    """The planning kernel of calls with a mask; listed: of those that go by lines."""

    arch: str
    packed: bool
    variant: str
    listed: bool = False

    @property
    def name(self) -> Name:
        traced = program(self.variant)
        by = f"{' listed' * self.listed}{' by head' * (self.listed and mask_differs_by_head(traced))}"
        facts = f"packed={self.packed} {self.arch}{by}"
        return Name(f"decode_plan | {facts} | {text_of_range(traced)}", "decode.plan_kernel")

    def function(self) -> Any:
        from .plan_kernel import plan_kernel

        return plan_kernel(self.arch, self.packed, program(self.variant), self.listed)

    def __str__(self) -> str:
        return f"plan of decode calls {self.variant}{' packed' * self.packed}{' by lines' * self.listed} {self.arch}"


@dataclass(frozen=True)
class PackedKeysJob(KernelJob):
    """The kernel that finds each sequence's packed keys."""

    arch: str

    @property
    def name(self) -> Name:
        return Name(f"packed_keys | {self.arch}", "decode.packed_keys")

    def function(self) -> Any:
        from .packed_keys import packed_keys_kernel

        return packed_keys_kernel(self.arch)

    def __str__(self) -> str:
        return f"decode: packed keys {self.arch}"
