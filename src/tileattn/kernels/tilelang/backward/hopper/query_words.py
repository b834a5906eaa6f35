"""Masks under which one range of queries sees a key: a bit for each score (the transpose of tile/key_words.py).

A window takes two comparisons and more for each score of a masked tile, documents a load and a comparison. Here a
thread has the range of each of the two keys that it holds, and computes a word from it with a bit for each of its
columns of queries.

A mask tells which queries can see a key (`q_range`), and which see it for certain (`full_q_range`). Where both are the
same for a single key, they are the key's range. The bounds of windows are the same for every key, and take a few
instructions (query_range.py): they are computed in each masked tile. Those of documents are loaded and compared once
for a block's keys, and kept in shared memory: the registers are full. A warp that has a key with two answers, such as
one of a document whose ids are not adjacent, evaluates the mask.
"""

from __future__ import annotations

from typing import Any

import tilelang.language as T

from ...tile.hopper import WARP
from ...tile.key_words import hide_by_word, set_word
from ...tile.mixed_bits import has_bits, hide_by_bits, load_bits
from ...tile.variables import variable
from .. import tile
from .plan import BATCH, KEY

APART = -1  # in place of the first row of a key that no single range sees


def range_of_key(visible: Any, b: Any, h: Any, k: Any, within: Any = None) -> tuple[Any, Any, Any]:
    """Of key k: rows [lo, hi) of queries that can see it, and whether all of them do.

    lo is 0 or more, hi at most seqlen_q. No query sees a key beyond the last one, for which nothing is read: `within`
    is the key, or the last one, where the caller holds that in a variable.
    """
    within = T.min(k, visible.seqlen_k - 1) if within is None else within
    lo, hi = visible.rows(b, h, within, within)
    certain_lo, certain_hi = visible.full_rows(b, h, within, within)
    hi = T.if_then_else(k < visible.seqlen_k, hi, 0)
    return lo, hi, ((lo == certain_lo) & (hi == certain_hi)) | (hi <= lo)


@T.macro
def find_ranges(w, h):
    """The ranges of a block's keys: each warp finds those of the 16 keys that it holds, and reads no others."""
    lane, warp = w.thread % WARP, w.thread // WARP
    T.sync_warp()  # all have read the last head's
    if lane < 16:
        # Without these variables each place that loads an id would compute its key again: the backward kernel under
        # documents took 34 seconds to lower, with them 8.
        k = variable(w.task[KEY] + warp * 16 + lane)
        within = variable(T.min(k, w.visible.seqlen_k - 1))
        lo, hi, whole = range_of_key(w.visible, w.task[BATCH], h, k, within)
        w.query_ranges[warp * 16 + lane, 0] = T.if_then_else(whole, lo, APART)
        w.query_ranges[warp * 16 + lane, 1] = hi
    T.sync_warp()
    T.fence_proxy_async()  # else TileLang puts one into the loop over tiles


@T.macro
def hide_by_words(plan, w, scores):
    """s = -inf where no query of the key's range is."""
    at = scores.held("row")
    if plan.keeps_ranges:
        hide_by_kept_ranges(w, at)
    else:
        for i, t in T.Parallel(at.rows, 4):
            lo, hi, _ = range_of_key(w.visible, at.b, at.h, at.k_lo + i)
            set_word(w.query_words[0], i, t, lo, hi, at.row)
        hide_by_word(w.acc_s, w.query_words[0], 0)


@T.macro
def take_bits(plan, arg, w, masked, step):
    """Loads the words of a listed tile, by its number in the line, if it has bits: early, under the wait for S."""
    if plan.bits:
        if masked & has_bits_at(plan, arg, w, step):
            load_bits(w.query_words, arg, w.rows[3] + step, 0)


def has_bits_at(plan: Any, arg: Any, w: Any, step: Any) -> Any:
    """Whether a masked tile of the line has bits; None where no tile has."""
    return has_bits(arg, w.rows[3] + step) if plan.bits else None


@T.macro
def hide_by_bits_or_mask(w, scores):
    if scores.has_bits:
        hide_by_bits(w.acc_s, w.query_words)
    else:
        tile.hide(w.acc_s, scores)


@T.macro
def hide_by_kept_ranges(w, at):
    first = w.thread // WARP * 16 + w.thread % WARP // 4  # the thread's keys: this one, and eight behind it
    if T.any_sync((w.query_ranges[first, 0] | w.query_ranges[first + 8, 0]) < 0) != 0:
        tile.hide(w.acc_s, at)
    else:
        for i, t in T.Parallel(at.rows, 4):
            set_word(w.query_words[0], i, t, w.query_ranges[i, 0], w.query_ranges[i, 1], at.row)
        hide_by_word(w.acc_s, w.query_words[0], 0)
