"""The tiles of queries of a head, as the consumers of the kernel for keys walk over them; see keys.py."""

from __future__ import annotations

import tilelang.language as T

from ...tile.lists import length_of_line, mixed_of_line
from ...tile.mixed_bits import place_of_line
from .config import CONSUMERS
from .loads import line_of_head, tiles_of_head
from .plan import BATCH, DS_WRITTEN, KEY


@T.macro
def find_rows(plan, w, h):
    """Sets w.rows: the head's tiles of queries, begin and end, and the rows that see all keys and so need no mask."""
    first, end = tiles_of_head(plan, w, h)
    full_lo, full_hi = w.visible.full_rows(w.task[BATCH], h, w.task[KEY], w.task[KEY] + plan.block_N - 1)
    if plan.call.packed:
        T.sync_threads(DS_WRITTEN, CONSUMERS)  # all have read the last head's numbers
    w.rows[0] = w.uniform(first)
    w.rows[1] = w.uniform(T.max(end, first))
    w.rows[2] = w.uniform(full_lo)
    w.rows[3] = w.uniform(full_hi)
    if plan.call.packed:
        # Each thread would find its own write, but others may still write there, if only the same.
        T.sync_threads(DS_WRITTEN, CONSUMERS)
        T.fence_proxy_async()  # else TileLang puts one into the loop, because the numbers are in shared memory


@T.macro
def find_line(plan, arg, w, h):
    """Sets w.rows: the line of the head's tiles of queries, how many there are, and how many of them need the mask.

    With bits also the place of those of the first tile.
    """
    if plan.call.packed:
        T.sync_threads(DS_WRITTEN, CONSUMERS)  # as in find_rows: all have read the last head's numbers
    w.rows[0] = w.uniform(line_of_head(plan, arg, w, h))
    w.rows[1] = w.uniform(length_of_line(arg, w.rows[0]))
    w.rows[2] = w.uniform(mixed_of_line(arg, w.rows[0]))
    if plan.bits:
        w.rows[3] = w.uniform(place_of_line(arg, w.rows[0]))
    if plan.call.packed:
        T.sync_threads(DS_WRITTEN, CONSUMERS)
        T.fence_proxy_async()
