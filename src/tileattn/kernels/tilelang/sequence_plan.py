"""The planning kernel of packed sequences: cumulative lengths, on the device, become a work list (records.py).

The host knows an upper bound of the list's length, and never waits for the lengths. A kernel that follows takes its
tiles from the list: tiles of queries, or of keys.

One warp for each run: every sequence's, and that of the rows which belong to nobody. It looks at all sequences, adds up
the tiles of those that come before its own, and writes its records. Sequences with more rows on the other side come
first, because their tiles take longest: what is left for the end of a launch is short.

Cumulative lengths that are wrong must not lead anybody out of the tensors. If anything is wrong, nobody owns any row:
the list has one run, of all rows, without other rows, which gives zeros; and the header says what is wrong.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import tilelang.language as T
from tilelang.language.eager.builder import Builder

from .records import (
    ALIGNMENT,
    BEYOND_TOTAL,
    KEYS,
    NOT_FROM_ZERO,
    NOT_MONOTONE,
    NOWHERE,
    PADDING,
    TOO_LONG,
    WIDTH,
)

WARP = 32
# What is wrong, as one number, of which the smallest counts: the sequence, then the kind in the lowest bits.
KIND_BITS, SOUND = 4, 2**31 - 1


def plan_kernel() -> Any:
    """The TileLang function ``plan(tiled, other, work, tiled_total, other_total, tiled_longest, other_longest, tile,
    keys_tiled)``

    ``tiled``, ``other``: the cumulative lengths of the side that is cut into tiles of ``tile`` rows, and of the other
    one, int32 (sequences + 1,), of one sequence at least; then the rows that their tensors have, and the longest that a
    sequence may be. ``keys_tiled``: 1 where the keys are cut, 0 for the queries. ``work``: int32 (1 + capacity, WIDTH).
    """
    builder = Builder()
    with builder.prim_func("plan"):
        bounds = T.dynamic("bounds")
        tensors = {name: builder.prim_func_arg(name, T.Tensor([bounds], "int32")) for name in ("tiled", "other")}
        work = builder.prim_func_arg("work", T.Tensor([T.dynamic("rows"), WIDTH], "int32"))
        names = ("tiled_total", "other_total", "tiled_longest", "other_longest", "tile", "keys_tiled")
        sizes = {name: builder.prim_func_arg(name, T.int32()) for name in names}
        _kernel(SimpleNamespace(bounds=bounds, work=work, **tensors, **sizes))
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
        wrong = T.alloc_var("int32", init=SOUND)
        for step in T.serial(T.ceildiv(sequences, WARP)):
            j = step * WARP + lane
            if j < sequences:
                cost_j = arg.other[j + 1] - arg.other[j]
                if (cost_j > cost) | ((cost_j == cost) & (j < run)):
                    before += _tiles(arg.tiled[j + 1] - arg.tiled[j], arg.tile)
                wrong = T.min(wrong, _fault(arg, j, sequences))
        wrong = T.warp_reduce_min(wrong)
        first = T.alloc_var("int32", init=T.warp_reduce_sum(before))

        start = T.alloc_var("int32", init=arg.tiled[run])
        end = T.alloc_var("int32", init=arg.tiled_total)
        if run < sequences:
            end = arg.tiled[run + 1]
        if wrong != SOUND:
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
            sound = wrong == SOUND
            j = T.alloc_var("int32", init=T.if_then_else(sound, 0, T.shift_right(wrong, KIND_BITS)))
            kind = T.alloc_var("int32", init=T.if_then_else(sound, 0, T.bitwise_and(wrong, 2**KIND_BITS - 1)))
            of_tiled = (kind > KEYS) == (arg.keys_tiled != 0)
            bounds = [T.if_then_else(of_tiled, arg.tiled[j + i], arg.other[j + i]) for i in (0, 1)]
            arg.work[0, lane] = _chosen(lane, [first + tiles, 0, 0, 0, kind, j, *bounds])


def _tiles(rows, tile):
    return T.truncdiv(rows + (tile - 1), tile)


def _fault(arg, j, sequences):
    """What is wrong with the j-th sequence, or SOUND."""
    of_keys = (arg.keys_tiled, 1 - arg.keys_tiled)
    total, longest = (arg.tiled_total, arg.other_total), (arg.tiled_longest, arg.other_longest)
    faults = []
    for side, bounds in enumerate((arg.tiled, arg.other)):
        start, end = bounds[j], bounds[j + 1]
        kind = T.if_then_else(end - start > longest[side], TOO_LONG, 0)
        kind = T.if_then_else((j == sequences - 1) & (end > total[side]), BEYOND_TOTAL, kind)
        kind = T.if_then_else(end < start, NOT_MONOTONE, kind)
        kind = T.if_then_else((j == 0) & (start != 0), NOT_FROM_ZERO, kind)
        number = T.shift_left(j, KIND_BITS) + of_keys[side] * KEYS + kind
        faults.append(T.if_then_else(kind > 0, number, SOUND))
    return T.min(*faults)


def _record(arg, run, sequences, first, start, end, cost):
    """The fields of records.py, in order."""
    # Nobody's rows look like the last sequence's, so that what a mask reads for them is there.
    sequence = T.min(run, sequences - 1)
    rows = start, end - start
    others = T.if_then_else(run < sequences, arg.other[run], NOWHERE), T.max(cost, 0)
    of_q, of_k = ([T.if_then_else(arg.keys_tiled == side, *pair) for pair in zip(rows, others)] for side in (0, 1))
    padded = [T.truncdiv(T.max(begin, 0), ALIGNMENT) * ALIGNMENT + run * PADDING for begin, _ in (of_q, of_k)]
    return [sequence, first, *of_q, *of_k, *padded]


def _chosen(index, values):
    """values[index], in registers."""
    choice = values[-1]
    for number, value in reversed(list(enumerate(values[:-1]))):
        choice = T.if_then_else(index == number, value, choice)
    return choice
