"""Warps, barriers and shared memory as the Hopper schedules of both passes use them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import tilelang.language as T
from tilelang.layout import (
    make_full_bank_swizzled_layout,
    make_half_bank_swizzled_layout,
    make_quarter_bank_swizzled_layout,
)

WARP, WARPGROUP = 32, 128


class Barriers:
    """A range of an array's barriers."""

    def __init__(self, array: T.Buffer, first: int) -> None:
        self._array, self._first = array, first

    def __getitem__(self, index: Any) -> Any:
        return self._array[self._first + index]


def slices(alloc: Callable[[list[int]], T.Buffer], arrivals: dict[str, list[int]]) -> dict[str, Barriers]:
    """Barriers by name, all in one array; `arrivals` has how many threads arrive on each."""
    array = alloc([count for counts in arrivals.values() for count in counts])
    firsts = accumulate([0, *map(len, arrivals.values())])
    return {name: Barriers(array, first) for name, first in zip(arrivals, firsts, strict=False)}


def tile_layout(buffer: Any, row_bytes: int) -> Any:
    """Swizzled, so that the eight rows of 16 bytes that a warp reads at a time lie in different banks.

    The layout has the widest panels of columns that divide the rows: TMA copies one row of a panel at a time.
    """
    if row_bytes % 128 == 0:
        return make_full_bank_swizzled_layout(buffer)
    return make_half_bank_swizzled_layout(buffer) if row_bytes % 64 == 0 else make_quarter_bank_swizzled_layout(buffer)
