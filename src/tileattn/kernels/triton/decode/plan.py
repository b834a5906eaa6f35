"""The static facts of the decode kernel, as one constant that its code reads."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from ....call.decoding import DecodeCall
from ....variant.expression import has_symbol
from ....variant.program import Program, program
from ..plan import TritonPlan, precision_of
from ..shared_memory import padded
from ..tile.expressions import functions
from ..tile.loops import BY_LISTS, Loops, loops
from ..tile_sizes import Config
from .ranges import all_keys, no_keys


@dataclass(frozen=True, eq=False, repr=False)
class TritonDecodePlan(TritonPlan):
    """Static facts of the decode kernel; besides those of the forward kernel (`listed` is 1 with lines, lists.py):

    Attributes:
        page_rows: as in :class:`tileattn.call.decoding.DecodeCall`.
        fixed: the keys of a FixedSplit, or 0. Then there is one loop over tiles, with the mask.
    """

    page_rows: int = 0
    fixed: int = 0


@functools.lru_cache(maxsize=1024)
def make_decode_plan(call: DecodeCall, config: Config) -> TritonDecodePlan:
    """The plan of a call's kernel."""
    traced, of = program(call.variant), functions(call.variant, exact=call.dtype == torch.float32)
    any_range, full_range, turns = of.kv_range, of.full_range, loops(traced, of_keys=False)
    if _differs_by_head(traced):
        any_range, full_range, turns = all_keys, no_keys, Loops(before=False, within=False, behind=True)
    elif call.fixed:
        turns = Loops(before=False, within=False, behind=turns.behind)
    if call.listed and not call.fixed:
        turns = BY_LISTS
    return TritonDecodePlan(
        head_dim=call.head_dim,
        head_dim_v=call.head_dim_v,
        padded=padded(call.head_dim),
        padded_v=padded(call.head_dim_v),
        block_M=config.block_M,
        block_N=config.block_N,
        tma=0,
        precision=precision_of(call),
        warp_specialize=False,
        **turns._asdict(),
        allows=of.allows,
        score=of.score,
        slope=None,
        any_range=any_range,
        full_range=full_range,
        listed=int(call.listed),
        page_rows=call.page_rows,
        fixed=call.fixed,
    )


def _differs_by_head(traced: Program) -> bool:
    """Whether the ranges of keys depend on the head: the rows of a tile differ in it."""
    return any(has_symbol(end, "h") for end in (*traced.kv_range, *traced.full_range))
