"""The planning kernel of packed sequences: cumulative lengths, on the device, become a work list (work_list.py).

The host knows an upper bound of the list's length, and never waits for the lengths. A kernel that follows takes its
tiles from the list: tiles of queries, or of keys. One launch writes all lists that a pass needs.

In each list one warp for each run: every sequence's, and that of the rows which belong to nobody. It looks at all
sequences, adds up the tiles of those that come before its own, and writes its records. Sequences with more rows on the
other side come first, because their tiles take longest: what is left for the end of a launch is short.

Cumulative lengths that are wrong must not lead anybody out of the tensors. If anything is wrong, nobody owns any row:
the list has one run, of all rows, without other rows, which gives zeros; and a status says what is wrong.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import tilelang.language as T
from tilelang.language.eager.builder import Builder

from .dependent_launch import let_next_start
from .work_list import ALIGNMENT, COUNT, LISTS, NOWHERE, PADDING, WIDTH

WARP = 32
SOUND = 2**31 - 1  # in place of the number of a sequence of which something wrong is true


def plan_kernel(arch: str) -> Any:
    """The TileLang function ``plan(cu_seqlens_q, cu_seqlens_k, work, status, total_q, total_k, max_seqlen_q,
    max_seqlen_k, *tiles, *of_keys, *begins, lists)``

    ``cu_seqlens_q``, ``cu_seqlens_k``: int32 (sequences + 1,), of one sequence at least; then the rows that their
    tensors have, and the longest that a sequence may be. ``work``: int32 (rows, WIDTH), of ``lists`` lists, up to
    `LISTS`, each with its header in row ``begin``: of tiles of ``tile`` rows of queries, or of keys (``of_keys`` 1, not
    0). ``status``: the device's, int32 (4,); see :mod:`tileattn.call.packed_status`.
    """
    builder = Builder()
    with builder.prim_func("plan"):
        bounds = T.dynamic("bounds")
        q, k = (builder.prim_func_arg(name, T.Tensor([bounds], "int32")) for name in ("cu_seqlens_q", "cu_seqlens_k"))
        work = builder.prim_func_arg("work", T.Tensor([T.dynamic("rows"), WIDTH], "int32"))
        status = builder.prim_func_arg("status", T.Tensor([4], "int32"))
        names = ["total_q", "total_k", "max_seqlen_q", "max_seqlen_k"]
        names += [f"{name}{number}" for name in ("tile", "of_keys", "begin") for number in range(LISTS)]
        sizes = {name: builder.prim_func_arg(name, T.int32()) for name in (*names, "lists")}
        _kernel(SimpleNamespace(arch=arch, bounds=bounds, q=q, k=k, work=work, status=status, **sizes))
    return builder.get()


@T.macro
def _kernel(arg):
    with T.Kernel(arg.bounds, arg.lists, threads=WARP) as (run, number):
        let_next_start(arg.arch)
        lane = T.get_thread_binding()
        sequences = arg.bounds - 1
        tile, of_keys, begin = (
            T.alloc_var("int32", init=_chosen(number, [getattr(arg, f"{name}{n}") for n in range(LISTS)]))
            for name in ("tile", "of_keys", "begin")
        )
        cost = T.alloc_var("int32", init=-1)  # so nobody's rows come last
        if run < sequences:
            cost = _of_role(of_keys, _length(arg.k, run), _length(arg.q, run))
        before = T.alloc_var("int32", init=0)
        # The first sequence whose bounds are wrong, or which is too long: in q, and in k.
        wrong_q, wrong_k, long_q, long_k = (T.alloc_var("int32", init=SOUND) for _ in range(4))
        for step in T.serial(T.ceildiv(sequences, WARP)):
            j = step * WARP + lane
            if j < sequences:
                q_len, k_len = _length(arg.q, j), _length(arg.k, j)
                cost_j = T.alloc_var("int32", init=_of_role(of_keys, k_len, q_len))
                if (cost_j > cost) | ((cost_j == cost) & (j < run)):
                    before += _tiles(_of_role(of_keys, q_len, k_len), tile)
                wrong_q = T.min(wrong_q, _where(_is_wrong(arg.q, j, sequences, arg.total_q), j))
                wrong_k = T.min(wrong_k, _where(_is_wrong(arg.k, j, sequences, arg.total_k), j))
                long_q = T.min(long_q, _where(q_len > arg.max_seqlen_q, j))
                long_k = T.min(long_k, _where(k_len > arg.max_seqlen_k, j))
        wrong_q = T.warp_reduce_min(wrong_q)
        wrong_k = T.warp_reduce_min(wrong_k)
        long_q = T.warp_reduce_min(long_q)
        long_k = T.warp_reduce_min(long_k)
        first = T.alloc_var("int32", init=T.warp_reduce_sum(before))

        start = T.alloc_var("int32", init=_of_role(of_keys, arg.q[run], arg.k[run]))
        end = T.alloc_var("int32", init=_of_role(of_keys, arg.total_q, arg.total_k))
        if run < sequences:
            end = _of_role(of_keys, arg.q[run + 1], arg.k[run + 1])
        if T.min(T.min(wrong_q, wrong_k), T.min(long_q, long_k)) != SOUND:
            first = 0
            start = T.if_then_else(run < sequences, end, 0)
        tiles = T.alloc_var("int32", init=_tiles(end - start, tile))
        # Eight neighbouring lanes write a record.
        field = lane % WIDTH
        record = _record(arg, of_keys, run, sequences, first, start, end, cost)
        value = T.alloc_var("int32", init=_chosen(field, record))
        for step in T.serial(T.ceildiv(tiles, WARP // WIDTH)):
            place = step * (WARP // WIDTH) + lane // WIDTH
            if place < tiles:
                arg.work[begin + 1 + first + place, field] = value
        if (run == sequences) & (lane < WIDTH):
            arg.work[begin, lane] = T.if_then_else(lane == COUNT, first + tiles, 0)
            found = T.alloc_var("int32", init=_chosen(lane, [wrong_q, wrong_k, long_q, long_k, SOUND]))
            if found != SOUND:
                arg.status[lane] = found + 1


def _length(bounds, j):
    return bounds[j + 1] - bounds[j]


def _of_role(of_keys, queries, keys):
    """What of queries and keys belongs to the side that is cut into tiles; with both exchanged, to the other side."""
    return T.if_then_else(of_keys == 1, keys, queries)


def _is_wrong(bounds, j, sequences, total):
    start, end = bounds[j], bounds[j + 1]
    return ((j == 0) & (start != 0)) | (end < start) | ((j == sequences - 1) & (end > total))


def _where(condition, j):
    return T.if_then_else(condition, j, SOUND)


def _tiles(rows, tile):
    return T.truncdiv(rows + (tile - 1), tile)


def _record(arg, of_keys, run, sequences, first, start, end, cost):
    """The fields of work_list.py, in order."""
    # Nobody's rows look like the last sequence's, so that what a mask reads for them is there.
    sequence = T.min(run, sequences - 1)
    other = T.if_then_else(run < sequences, _of_role(of_keys, arg.k[run], arg.q[run]), NOWHERE)
    q_start, q_len = _of_role(of_keys, start, other), _of_role(of_keys, end - start, T.max(cost, 0))
    k_start, k_len = _of_role(of_keys, other, start), _of_role(of_keys, T.max(cost, 0), end - start)
    padded = [T.truncdiv(T.max(begin, 0), ALIGNMENT) * ALIGNMENT + run * PADDING for begin in (q_start, k_start)]
    return [sequence, first, q_start, q_len, k_start, k_len, *padded]


def _chosen(index, values):
    """values[index], in registers."""
    choice = values[-1]
    for number, value in reversed(list(enumerate(values[:-1]))):
        choice = T.if_then_else(index == number, value, choice)
    return choice
