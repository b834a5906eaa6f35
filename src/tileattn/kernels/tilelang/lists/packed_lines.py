"""The lines of a packed call in the kernel that makes lists of tiles (kernel.py); packed_lists.py says what they are.

A block's line is that of an entry of the work list, whose record has the lengths of its sequence. *Own* tiles are those
that lines are of, the others those that lines list. Bounds of wide loads (analysis.py) that own tiles read are kept for
each line. Those of other tiles are kept for each sequence where they depend on it: positions of queries do, since
alignment is.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import tilelang.language as T

from ..packed.work_list import COUNT, FIRST, K_LEN, Q_LEN, SEQUENCE


@T.macro
def find_line(arg, number):
    """What line `number` of each plane is of.

    Its sequence, its own tile's number and lengths, zeros unless there are queries and keys (`used`); and where its run
    begins, how many lines that has, and its place there: a line behind the last entry is a run of its own.
    """
    exists = number < arg.work[0, COUNT]
    first, sequence, q_len, k_len = (
        T.alloc_var("int32", init=T.if_then_else(exists, arg.work[1 + number, field], 0))
        for field in (FIRST, SEQUENCE, Q_LEN, K_LEN)
    )
    used = T.alloc_var("int32", init=T.if_then_else((q_len > 0) & (k_len > 0), 1, 0))
    own_length = T.if_then_else(arg.by_keys == 1, k_len, q_len)
    own_rows = T.if_then_else(arg.by_keys == 1, arg.block_N, arg.block_M)
    count = T.alloc_var("int32", init=T.if_then_else(exists, T.truncdiv(own_length + (own_rows - 1), own_rows), 1))
    begin = T.alloc_var("int32", init=T.if_then_else(exists, first, number))
    place = T.alloc_var("int32", init=number - begin)
    return used, sequence * used, place * used, q_len * used, k_len * used, begin, count, place


def line_of(arg: Any, number: Any) -> SimpleNamespace:
    """The same with names, each in a variable."""
    names = ("used", "sequence", "tile", "seqlen_q", "seqlen_k", "begin", "count", "place")
    values = [T.alloc_var("int32", init=value)[0] for value in find_line(arg, number)]
    return SimpleNamespace(**dict(zip(names, values)))


@T.macro
def kind_of_tile(arg, of, row, column, emitted, hidden, mixed):
    """The kind of a tile, with its ends masked; hidden where the sequence has none.

    Args:
        of: the line.
        emitted: the kind by the mask.
    """
    kind = T.alloc_var("int32", init=emitted)
    beyond = (column + 1) * arg.block_N > of.seqlen_k
    if beyond | ((arg.masks_queries == 1) & ((row + 1) * arg.block_M > of.seqlen_q)):
        kind = T.min(kind, mixed)
    if (of.used == 0) | (row * arg.block_M >= of.seqlen_q) | (column * arg.block_N >= of.seqlen_k):
        kind = hidden
    return kind


def ends_of_row(arg: Any, of: Any, row: Any) -> tuple[Any, Any]:
    """The first and last position of a tile of queries, those of a row that the sequence has."""
    offset, last_row = of.seqlen_k - of.seqlen_q, T.max(of.seqlen_q, 1) - 1
    first, last = row * arg.block_M, row * arg.block_M + (arg.block_M - 1)
    return T.min(first, last_row) + offset, T.min(last, last_row) + offset


def ends_of_column(arg: Any, of: Any, column: Any) -> tuple[Any, Any]:
    """The same of keys. Lines of queries have the same tiles of keys, whatever the lengths."""
    first, last = column * arg.block_N, column * arg.block_N + (arg.block_N - 1)
    return first, T.if_then_else(arg.by_keys == 1, T.min(last, T.max(of.seqlen_k, 1) - 1), last)


def inputs_of(arg: Any, of: Any, plane: Any) -> dict[Any, Any]:
    """The inputs of nodes that are the same in a line."""
    inputs = {("seqlen_k",): of.seqlen_k}
    if arg.analysis.by_batch:
        inputs["b",] = of.sequence
    if arg.analysis.by_head:
        inputs["h",] = plane
    return inputs


def is_own(arg: Any, side: str) -> Any:
    """Whether lines are of tiles of this side."""
    return arg.by_keys == (0 if side == "row" else 1)


def place_of_bounds(arg: Any, of: Any, load: Any, side: str, plane: Any, line: Any, tile: Any) -> tuple[Any, Any]:
    """Where the bounds of a wide load of a line's tile are: plane and number."""
    by_sequence = of.sequence * arg.heads + plane if load.by_plane or side == "row" else 0
    own = is_own(arg, side)
    return T.if_then_else(own, plane if load.by_plane else 0, by_sequence), T.if_then_else(own, line, tile)


@T.macro
def find_bounded(arg, side, plane, tile):
    """Of the bounds at a plane and a number: the sequence, the tile, lengths, and the head's plane.

    Cumulative lengths that are wrong give some lengths within the call's.
    """
    last_entry = arg.work.shape[0] - 2
    _, sequence, own_tile, q_len, k_len, _, _, _ = find_line(arg, T.min(tile, last_entry))
    own = is_own(arg, side)
    number = T.alloc_var("int32", init=T.min(T.truncdiv(plane, arg.heads), arg.cu_seqlens_q.shape[0] - 2))
    q_all = T.min(T.max(arg.cu_seqlens_q[number + 1] - arg.cu_seqlens_q[number], 0), arg.seqlen_q)
    k_all = T.min(T.max(arg.cu_seqlens_k[number + 1] - arg.cu_seqlens_k[number], 0), arg.seqlen_k)
    return (
        T.if_then_else(own, sequence, number),
        T.if_then_else(own, own_tile, tile),
        T.if_then_else(own, q_len, q_all),
        T.if_then_else(own, k_len, k_all),
        T.if_then_else(own, plane, T.truncmod(plane, arg.heads)),
    )


def bounded_at(arg: Any, side: str, plane: Any, tile: Any) -> SimpleNamespace:
    """The same with names, each in a variable."""
    names = ("sequence", "tile", "seqlen_q", "seqlen_k", "plane")
    values = [T.alloc_var("int32", init=value)[0] for value in find_bounded(arg, side, plane, tile)]
    return SimpleNamespace(**dict(zip(names, values)))


@T.macro
def shorter_lines(arg, of, sorts, plane, number, block, thread, threads):
    """How many lines of the run come before the block's, of those that this thread looks at: shorter ones, and of equal
    ones those of earlier tiles. sorts: whether lines are sorted now."""
    count = T.alloc_var("int32", init=0)
    if sorts:
        own = T.alloc_var("int32", init=arg.costs[block])
        for step in T.serial(T.truncdiv(of.count + (threads - 1), threads)):
            other = of.begin + step * threads + thread
            if other < of.begin + of.count:
                cost = T.alloc_var("int32", init=arg.costs[plane * arg.lines + other])
                if (cost < own) | ((cost == own) & (other < number)):
                    count += 1
    return count


@T.macro
def write_counts(arg, of, lists, block, plane, place, mixed, whole):
    """Writes a line's counts, and its tile in its place of the run; or its cost unless `lists`."""
    if lists:
        arg.counts[block, 0] = mixed
        arg.counts[block, 1] = mixed + whole
        if arg.sorts == 1:
            arg.rows[plane * arg.lines + of.begin + place] = of.place
    else:
        arg.costs[block] = 2 * mixed + whole
