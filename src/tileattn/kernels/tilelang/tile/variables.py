"""Holds integers in variables, so that the compiler does not recompute them at each use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tilelang.language as T
from tvm import tirx

from ....call.facts import AttentionCall


def has_no_producer(call: AttentionCall) -> bool:
    """Whether all warps run the same code; else TileLang gives the copies by TMA to a warpgroup of their own."""
    no_tma = call.arch.startswith("gfx") or call.arch in ("sm_80", "sm_86", "sm_87", "sm_89")
    return not call.aligned or call.packed or no_tma


def variable(value: Any) -> Any:
    """Holds an integer in a variable.

    The compiler inlines other values at each use. Addresses that contain divisions then cost most of the compile time,
    in its prover, and registers of the kernel.
    """
    return T.alloc_var("int32", init=value)


def holder(call: AttentionCall) -> Callable[[Any], Any]:
    """A function that holds the bounds of a loop, which all threads share, in a variable.

    TileLang 0.1.15 counts the threads of a branch with an SMT solver, which knows the bounds of all loops before it.
    Under bounds that are made of masks' ranges it gave up early, and counted 228 of 256: "Cannot lower a required
    shared-memory sync".

    A producer warpgroup may not write to variables (``compile._one_producer_warp``). There the value goes through a
    shuffle, which no pass looks through; besides, ptxas then knows it to be the same in all threads of a warp.
    """
    return variable if has_no_producer(call) else _shared


def _shared(value: Any) -> Any:
    return value if isinstance(value, (int, tirx.IntImm)) else T.shfl_sync(value, 0)


def address_holder(call: AttentionCall) -> Callable[[Any], Any]:
    """A function that holds a part of an address, if that is worth a variable: see :func:`variable`."""
    return variable if has_no_producer(call) else (lambda value: value)
