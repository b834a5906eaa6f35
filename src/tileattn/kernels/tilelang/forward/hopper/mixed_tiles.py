"""The mask of a listed call on a mixed tile: every position is a register of the thread plus a constant.

A thread holds 64 scores of a tile, in 2 rows and 32 columns. nvcc computes an expression of the position once for all
scores in which it is the same, if it can see that. It does not reorder sums, so of `q - k`, written out by the tile's,
the warp's and the thread's terms, all 64 seem different. Here they are a register plus 34 constants, one for each
diagonal. A remainder of `q - k` is taken 34 times then; terms of `q` or of `k` alone once for each row or column.

Of `Dilated` at head dim 128 a mixed tile takes 771 instructions a thread more than a whole one, and 1440 before; of
`Strided` 641 and 1532 (docs/design/intervals.md).
"""

from __future__ import annotations

import tilelang.language as T

from ...tile.distance import DistanceEmitter, allowed_at
from ...tile.key_words import hide_by_ranges, hide_outside
from ...tile.mask import apply_mask
from ...tile.mixed_bits import has_bits, hide_by_bits, load_bits
from .tasks import BITS


@T.macro
def apply_mask_by_distance(acc_s, visible, thread, b, h, q_lo, k_lo):
    """s[i, j] = -inf where the mask forbids it."""
    block_M, block_N = acc_s.shape
    emit = DistanceEmitter(visible.emit.values, clamps=True)
    # A thread's first row and column in the layout of the products' sums. Where they lie elsewhere, this is as right.
    row, column = thread // 32 * 16 + thread % 32 // 4, thread % 4 * 2
    q = T.alloc_var("int32", init=q_lo + row)
    k = T.alloc_var("int32", init=k_lo + column)
    distance = T.alloc_var("int32", init=q - k)
    for i, j in T.Parallel(block_M, block_N):
        acc_s[i, j] = T.if_then_else(
            allowed_at(visible, emit, b, h, q + (i - row), k + (j - column), distance + ((i - row) - (j - column))),
            acc_s[i, j],
            -T.infinity("float32"),
        )


@T.macro
def take_bits(plan, arg, w, number):
    """Loads the words of a task's mixed tile, by its number, if it has bits: early, under the wait for the product."""
    if plan.bits:
        if has_bits(arg, w.task[BITS] + number):
            load_bits(w.key_words, arg, w.task[BITS] + number, w.rank * plan.block_M)


@T.macro
def hide_scores(plan, arg, w, number, visible, b, h, q_lo, k_lo):
    """The same, as the kernel does it. number: of the tile in its task, with bits."""
    if plan.bits:
        if has_bits(arg, w.task[BITS] + number):
            hide_by_bits(w.acc_s, w.key_words)
        else:
            apply_mask_by_distance(w.acc_s, visible, w.thread, b, h, q_lo, k_lo)
    elif plan.keys is not None:
        hide_outside(w.acc_s, w.key_words, visible, plan.keys, b, h, q_lo, k_lo)
    elif plan.by_ranges:
        hide_by_ranges(w.acc_s, w.key_words, w.ranges, w.thread, visible, b, h, q_lo, k_lo)
    elif plan.listed:
        apply_mask_by_distance(w.acc_s, visible, w.thread, b, h, q_lo, k_lo)
    else:
        apply_mask(w.acc_s, visible, b, h, q_lo, k_lo)
