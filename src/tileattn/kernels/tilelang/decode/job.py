"""Which kernels a decode call has."""

from __future__ import annotations

from dataclasses import replace

from ....call.decoding import DecodeCall
from ... import tile_lists
from .config import Config
from .library import DecodeJob, PackedKeysJob, PlanJob
from .lines.library import LinesJob
from .lines.visits import analysis_of

AnyDecodeJob = DecodeJob | PlanJob | LinesJob | PackedKeysJob


def plan_job(call: DecodeCall) -> PlanJob:
    """The planning kernel of a call."""
    return PlanJob(call.arch, call.packed, call.variant, call.listed)


def lines_jobs(call: DecodeCall, *queries: int) -> tuple[LinesJob, ...]:
    """The kernels that make the lines of a call, for these numbers of queries; none where operations do."""
    if not call.listed:
        return ()
    known = [each for each in queries if analysis_of(call.variant, each)]
    return tuple(LinesJob(call.arch, call.packed, call.variant, each) for each in known)


def with_lines(call: DecodeCall) -> tuple[DecodeCall, ...]:
    """The call, and, where its mask may hide tiles between others, that of larger sizes, which goes by lines."""
    may = call.variant and tile_lists.is_listed(call.variant)
    return (call, replace(call, listed=True)) if may else (call,)


def jobs_of(call: DecodeCall, config: Config, queries: int | None) -> tuple[AnyDecodeJob, ...]:
    """The kernels of a call, that of attention first.

    Args:
        config: of the attention kernel.
        queries: for how many the kernel is that makes the call's lines (lines/visits.py); None without lines.
    """
    packed_keys = [PackedKeysJob(call.arch)] * call.packed_keys
    lines = () if queries is None else lines_jobs(call, queries)
    return DecodeJob(call, config), plan_job(call), *packed_keys, *lines
