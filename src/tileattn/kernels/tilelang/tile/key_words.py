"""Masks under which a query sees one range of keys: a bit for each score, not comparisons for each.

A causal window takes three comparisons and a selection for each score, a causal mask one comparison, documents a load
and a comparison. Here a thread computes the range of each row that it holds, and from it a word that has a bit for each
of its columns. A score then takes its selection, and a part of the instruction that copies seven bits into predicates.

Of some masks the expression tells the range (key_range.py, :func:`hide_outside`). Of the others a row's range is known
where the keys that it sees for certain and the keys that it can see are the same; documents have such rows if equal ids
are adjacent. Warps whose rows are all so take bits, others the mask's expression (:func:`hide_by_ranges`).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import tilelang.language as T

from .key_range import KeyRange
from .mask import apply_mask
from .softmax import own_columns_layout

COLUMNS = 128  # of a tile, to a word: a thread holds 32 of them in a row, 2t and 2t + 1 of each eight


def row_range(keys: KeyRange, visible: Any, b: Any, h: Any, q: Any) -> tuple[Any, Any]:
    """The range of query position q: (first key, key behind the last), within 0 .. seqlen_k."""
    last = visible.seqlen_k

    def bounds(terms: list[tuple[Any, int]]) -> list[Any]:
        # Clamped first: one more would overflow at the largest int32.
        values = [(visible.emit_clamped(expr, b=b, h=h, q=q), added) for expr, added in terms]
        return [T.max(T.min(value, last - added), -added) + added for value, added in values]

    lo, hi = T.int32(0), last
    for bound in bounds(keys.lower):
        lo = T.max(lo, bound)
    for bound in bounds(keys.upper):
        hi = T.min(hi, bound)
    return lo, hi


def ranges_of_row(visible: Any, b: Any, h: Any, q: Any) -> tuple[Any, Any, Any]:
    """Of query position q: (first key, key behind the last) that it can see, and whether it sees all of them."""

    def clamped(bounds: tuple[Any, Any]) -> tuple[Any, Any]:
        lo, hi = (visible.emit_clamped(bound, b=b, h=h, q_lo=q, q_hi=q, seqlen_k=visible.seqlen_k) for bound in bounds)
        return T.max(lo, 0), T.min(hi, visible.seqlen_k)

    lo, hi = clamped(visible.program.kv_range)
    certain_lo, certain_hi = clamped(visible.program.full_range)
    return lo, hi, ((lo == certain_lo) & (hi == certain_hi)) | (hi <= lo)


def alloc_words(block_M: int, block_N: int) -> list[Any]:
    """Fragments (block_M, 4) for the words of a tile, one for each 128 columns, to be laid out by the caller."""
    return [T.alloc_fragment([block_M, 4], "uint32") for _ in range(-(-block_N // COLUMNS))]


def layouts(words: list[Any]) -> dict[Any, Any]:
    """Of the words: element [i, t] in the thread that holds columns 2t and 2t + 1 of each eight in row i."""
    return {word: own_columns_layout(word.shape[0]) for word in words}


def columns_below(limit: Any) -> Any:
    """Bits of a thread's columns 0, 1, 8, 9, 16, ... that are less than `limit`, in int64."""
    inside = T.max(T.min(limit, COLUMNS), 0)
    count = (inside >> 3) * 2 + T.min(inside & 7, 2)
    return (T.int64(1) << T.cast(count, "int64")) - T.int64(1)


@T.macro
def hide_outside(acc_s, words, visible, keys, b, h, q_lo, k_lo):
    """s[i, j] = -inf where key k_lo + j is outside of the range of query q_lo + i."""
    for n, word in enumerate(words):
        for i, t in T.Parallel(acc_s.shape[0], 4):
            lo, hi = row_range(keys, visible, b, h, q_lo + i)
            set_word(word, i, t, lo, hi, k_lo + n * COLUMNS)
        hide_by_word(acc_s, word, n)


def alloc_ranges(block_M: int, threads: int) -> SimpleNamespace:
    """Fragments for the ranges of a tile's rows, int32, to be laid out by the caller.

    ``lows``, ``highs`` and ``apart`` (block_M, 4) are laid out as the words; ``any_apart`` (threads,) has one element
    for each thread. The last two say which rows do not see one range.
    """
    rows = {name: T.alloc_fragment([block_M, 4], "int32") for name in ("lows", "highs", "apart")}
    return SimpleNamespace(**rows, any_apart=T.alloc_fragment([threads], "int32"))


@T.macro
def find_ranges(ranges, visible, b, h, q_lo):
    """The ranges of a tile's rows, once for all tiles of keys: the loads then wait beside those of Q and K."""
    for i, t in T.Parallel(ranges.lows.shape[0], 4):
        lo, hi, whole = ranges_of_row(visible, b, h, q_lo + i)
        ranges.lows[i, t] = lo
        ranges.highs[i, t] = hi
        ranges.apart[i, t] = T.if_then_else(whole, 0, 1)
    for t in T.Parallel(ranges.any_apart.shape[0]):
        ranges.any_apart[t] = ranges.apart[t // 32 * 16 + t % 32 // 4, t % 4]
    for t in T.Parallel(ranges.any_apart.shape[0]):
        ranges.any_apart[t] = ranges.any_apart[t] | ranges.apart[t // 32 * 16 + t % 32 // 4 + 8, t % 4]


@T.macro
def hide_by_ranges(acc_s, words, ranges, thread, visible, b, h, q_lo, k_lo):
    """:func:`hide_outside` where ranges are not known from the expression; warps with another row evaluate it."""
    if T.any_sync(ranges.any_apart[thread] != 0) != 0:
        apply_mask(acc_s, visible, b, h, q_lo, k_lo)
    else:
        for n, word in enumerate(words):
            for i, t in T.Parallel(acc_s.shape[0], 4):
                set_word(word, i, t, ranges.lows[i, t], ranges.highs[i, t], k_lo + n * COLUMNS)
            hide_by_word(acc_s, word, n)


@T.macro
def set_word(word, i, t, lo, hi, k_lo):
    """Bits of the thread's columns of row i, from key k_lo on, that lie in lo .. hi."""
    first = k_lo + 2 * t
    word[i, t] = T.cast(columns_below(hi - first) & ~columns_below(lo - first), "uint32")


@T.macro
def hide_by_word(acc_s, word, n):
    """Hides the scores of word n whose bit is 0."""
    block_M, block_N = acc_s.shape
    # ptxas takes the bits out seven at a time only where it does not see how the words were computed.
    T.warpgroup_fence_operand(word, num_regs=2)
    columns = min(COLUMNS, block_N - n * COLUMNS)
    for i, t in T.Parallel(block_M, 4):
        for j in T.unroll(columns // 4):
            acc_s[i, n * COLUMNS + j // 2 * 8 + t * 2 + j % 2] = T.if_then_else(
                ((word[i, t] >> T.cast(j, "uint32")) & T.uint32(1)) != T.uint32(0),
                acc_s[i, n * COLUMNS + j // 2 * 8 + t * 2 + j % 2],
                -T.infinity("float32"),
            )
