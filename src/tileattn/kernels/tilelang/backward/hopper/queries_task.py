"""The task of a block of the kernel for dq alone: its queries, and the tiles of keys that they see; see queries.py."""

from __future__ import annotations

import tilelang.language as T

from ...tile.lists import length_of_line, line_of, mixed_of_line, tile_of_line

# Indices of the block's task: batch element, head, first row of its tile; first tile of keys, and how many. With lists
# FIRST is the block's line.
BATCH, HEAD, ROW, FIRST, COUNT = range(5)


def line_of_block(plan, arg, at, w):
    """The line of the block's tile of queries. A block without one has a record that was never written: any line."""
    number = T.truncdiv(w.task[ROW], plan.block_M)
    if not plan.call.packed:
        return line_of(arg, w.task[BATCH], w.task[HEAD], number)
    return T.if_then_else(at.exists, line_of(arg, w.task[BATCH], w.task[HEAD], at.first + number), 0)


def key_of_step(plan, arg, w, step):
    """The first key of the step-th listed tile."""
    return tile_of_line(arg, w.task[FIRST], step) * plan.block_N


def mixed_tiles(arg, w):
    """How many tiles need the mask: the one tile of a line without any does, too."""
    line = w.task[FIRST]
    return T.if_then_else(length_of_line(arg, line) > 0, mixed_of_line(arg, line), 1)


@T.macro
def find_task(plan, arg, at, mine, w):
    """Sets w.task: the block's tile of queries, and the tiles of keys that it loops over."""
    w.task[BATCH] = at.uniform(at.number(mine.pair))
    w.task[HEAD] = at.uniform(T.truncmod(mine.pair, arg.heads))
    w.task[ROW] = at.uniform((mine.tiles - 1 - T.truncdiv(mine.place, mine.side)) * plan.block_M)
    if plan.listed:
        w.task[FIRST] = at.uniform(line_of_block(plan, arg, at, w))
        w.task[COUNT] = at.uniform(T.max(length_of_line(arg, w.task[FIRST]), 1))
    else:
        q_lo = w.task[ROW] + arg.seqlen_k - arg.seqlen_q
        q_hi = T.min(q_lo + plan.block_M, arg.seqlen_k) - 1
        kv_lo, kv_hi = w.visible.kv_range(w.task[BATCH], w.task[HEAD], q_lo, q_hi)
        w.task[FIRST] = at.uniform(T.truncdiv(kv_lo, plan.block_N))
        # At least one tile, masked as a whole if no key is visible.
        w.task[COUNT] = at.uniform(T.max(T.ceildiv(kv_hi, plan.block_N) - w.task[FIRST], 1))
