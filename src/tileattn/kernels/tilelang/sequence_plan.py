"""The planning kernel of packed sequences: cumulative lengths, on the device, become a work list (records.py).

The host knows an upper bound of the list's length, and never waits for the lengths. A kernel that follows takes its
tiles from the list: tiles of queries, or of keys.

One warp for each run: every sequence's, and that of the rows which belong to nobody. It looks at all sequences, adds up
the tiles of those that come before its own, and writes its records. Sequences with more rows on the other side come
first, because their tiles take longest: what is left for the end of a launch is short.

Cumulative lengths that are wrong must not lead anybody out of the tensors. If anything is wrong, nobody owns any row:
the list has one run, of all rows, without other rows, which gives zeros; and a status says what is wrong.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import tilelang.language as T
from tilelang.language.eager.builder import Builder

from .records import ALIGNMENT, COUNT, NOWHERE, PADDING, WIDTH

WARP = 32
SOUND = 2**31 - 1  # in place of the number of a sequence of which something wrong is true


def plan_kernel() -> Any:
    """The TileLang function ``plan(tiled, other, work, status, tiled_total, other_total, tiled_longest, other_longest,
    tile, keys_tiled)``

    ``tiled``, ``other``: the cumulative lengths of the side that is cut into tiles of ``tile`` rows, and of the other
    one, int32 (sequences + 1,), of one sequence at least; then the rows that their tensors have, and the longest that a
    sequence may be. ``keys_tiled``: 1 where the keys are cut, 0 for the queries. ``work``: int32 (1 + capacity, WIDTH).
    ``status``: the device's, int32 (4,); see :mod:`tileattn.packed_status`.
    """
    builder = Builder()
    with builder.prim_func("plan"):
        bounds = T.dynamic("bounds")
        tensors = {name: builder.prim_func_arg(name, T.Tensor([bounds], "int32")) for name in ("tiled", "other")}
        work = builder.prim_func_arg("work", T.Tensor([T.dynamic("rows"), WIDTH], "int32"))
        status = builder.prim_func_arg("status", T.Tensor([4], "int32"))
        names = ("tiled_total", "other_total", "tiled_longest", "other_longest", "tile", "keys_tiled")
        sizes = {name: builder.prim_func_arg(name, T.int32()) for name in names}
        _kernel(SimpleNamespace(bounds=bounds, work=work, status=status, **tensors, **sizes))
    return builder.get()


@T.macro
def _kernel(arg):
    with T.Kernel(arg.bounds, threads=WARP) as run:
        lane = T.get_thread_binding()
        sequences = arg.bounds - 1
        cost = T.alloc_var("int32", init=-1)  # so nobody's rows come last
        if run < sequences:
            cost = arg.other[run + 1] - arg.other[run]
        before = T.alloc_var("int32", init=0)
        # The first sequence whose bounds are wrong, or which is too long: on the side of the tiles, and on the other.
        wrong, other_wrong = (T.alloc_var("int32", init=SOUND) for _ in range(2))
        long, other_long = (T.alloc_var("int32", init=SOUND) for _ in range(2))
        for step in T.serial(T.ceildiv(sequences, WARP)):
            j = step * WARP + lane
            if j < sequences:
                cost_j = arg.other[j + 1] - arg.other[j]
                if (cost_j > cost) | ((cost_j == cost) & (j < run)):
                    before += _tiles(arg.tiled[j + 1] - arg.tiled[j], arg.tile)
                wrong = T.min(wrong, _where(_is_wrong(arg.tiled, j, sequences, arg.tiled_total), j))
                other_wrong = T.min(other_wrong, _where(_is_wrong(arg.other, j, sequences, arg.other_total), j))
                long = T.min(long, _where(_is_long(arg.tiled, j, arg.tiled_longest), j))
                other_long = T.min(other_long, _where(_is_long(arg.other, j, arg.other_longest), j))
        wrong = T.warp_reduce_min(wrong)
        other_wrong = T.warp_reduce_min(other_wrong)
        long = T.warp_reduce_min(long)
        other_long = T.warp_reduce_min(other_long)
        first = T.alloc_var("int32", init=T.warp_reduce_sum(before))

        start = T.alloc_var("int32", init=arg.tiled[run])
        end = T.alloc_var("int32", init=arg.tiled_total)
        if run < sequences:
            end = arg.tiled[run + 1]
        if T.min(T.min(wrong, other_wrong), T.min(long, other_long)) != SOUND:
            first = 0
            start = T.if_then_else(run < sequences, end, 0)
        tiles = T.alloc_var("int32", init=_tiles(end - start, arg.tile))
        # Eight neighbouring lanes write a record.
        field = lane % WIDTH
        value = T.alloc_var("int32", init=_chosen(field, _record(arg, run, sequences, first, start, end, cost)))
        for step in T.serial(T.ceildiv(tiles, WARP // WIDTH)):
            number = step * (WARP // WIDTH) + lane // WIDTH
            if number < tiles:
                arg.work[1 + first + number, field] = value
        if (run == sequences) & (lane < WIDTH):
            status = [*_by_side(arg, wrong, other_wrong), *_by_side(arg, long, other_long)]
            arg.work[0, lane] = T.if_then_else(lane == COUNT, first + tiles, 0)
            found = T.alloc_var("int32", init=_chosen(lane, [*status, SOUND]))
            if found != SOUND:
                arg.status[lane] = found + 1


def _is_wrong(bounds, j, sequences, total):
    start, end = bounds[j], bounds[j + 1]
    return ((j == 0) & (start != 0)) | (end < start) | ((j == sequences - 1) & (end > total))


def _is_long(bounds, j, longest):
    return bounds[j + 1] - bounds[j] > longest


def _where(condition, j):
    return T.if_then_else(condition, j, SOUND)


def _by_side(arg, tiled, other):
    """What belongs to the tiles' side and to the other one, as what belongs to queries and to keys."""
    return [T.if_then_else(arg.keys_tiled == side, tiled, other) for side in (0, 1)]


def _tiles(rows, tile):
    return T.truncdiv(rows + (tile - 1), tile)


def _record(arg, run, sequences, first, start, end, cost):
    """The fields of records.py, in order."""
    # Nobody's rows look like the last sequence's, so that what a mask reads for them is there.
    sequence = T.min(run, sequences - 1)
    q_start, k_start = _by_side(arg, start, T.if_then_else(run < sequences, arg.other[run], NOWHERE))
    q_len, k_len = _by_side(arg, end - start, T.max(cost, 0))
    padded = [T.truncdiv(T.max(begin, 0), ALIGNMENT) * ALIGNMENT + run * PADDING for begin in (q_start, k_start)]
    return [sequence, first, q_start, q_len, k_start, k_len, *padded]


def _chosen(index, values):
    """values[index], in registers."""
    choice = values[-1]
    for number, value in reversed(list(enumerate(values[:-1]))):
        choice = T.if_then_else(index == number, value, choice)
    return choice
