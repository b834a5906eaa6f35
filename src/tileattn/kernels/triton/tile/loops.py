"""The loops over tiles of a kernel: before, within and behind the range of fully visible tiles.

A loop without iterations is left out here, not by the compiler. LLVM would remove the loop but keep the wait for its
asynchronous products, and ptxas 12.8 crashes on that.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from ....variant.expression import Expr
from ....variant.masks import FIRST_POSITION
from ....variant.program import Program


class Loops(NamedTuple):
    """Whether each is there; see :func:`tileattn.kernels.triton.tile.tiles.phases`."""

    before: bool
    within: bool
    behind: bool


# With lists of tiles: over the mixed ones, and over the whole ones.
BY_LISTS = Loops(True, True, False)


def loops(traced: Program, of_keys: bool) -> Loops:
    """Those of a kernel that walks over keys or, where its programs are those `of_keys`, over queries."""
    any_range, full_range, first = (
        (traced.q_range, traced.full_q_range, FIRST_POSITION) if of_keys else (traced.kv_range, traced.full_range, 0)
    )
    behind = not _is_empty(any_range)
    within = behind and not _is_empty(full_range)
    from_first = all(_limits(lo)[1] <= first for lo, _ in (any_range, full_range))
    return Loops(within and traced.allows is not None and not from_first, within, behind)


def _is_empty(bounds: tuple[Any, Any]) -> bool:
    """Whether a range is known to have nothing in it, whatever its operands are."""
    lo, hi = bounds
    return _limits(hi)[1] <= _limits(lo)[0]


def _limits(value: Any) -> tuple[float, float]:
    """Numbers between which an expression lies."""
    if not isinstance(value, Expr):
        return value, value
    if value.op in ("min", "max"):
        pick = min if value.op == "min" else max
        lows, highs = zip(*map(_limits, value.args), strict=True)
        return pick(lows), pick(highs)
    if value.op == "where":
        lows, highs = zip(*map(_limits, value.args[1:]), strict=True)
        return min(lows), max(highs)
    return -math.inf, math.inf
