"""The kernel that writes the lines of a decode call (visits.py): a block for each line, whose threads have a tile each.

A thread evaluates the rules of the interval analysis on its tile in registers (lists/analysis.py), for each head of a
kv head's group by itself where the mask depends on the head. A block goes over its line once, as far as the sequence
has keys: warps count the tiles that are visited by shuffles, and tell each other, so that each thread knows its place.
There is no atomic operation; equal calls give equal bits.

Lengths may be wrong, which the planning kernel reports. Here they are clamped.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import tilelang.language as T
from tilelang.language.eager.builder import Builder

from ...build.compile import OWN_BARRIERS, OWN_BOUNDS
from ...lists.analysis import Analysis
from ...lists.emit import WARP, Emitter
from .entries import LISTED, line_at

WARPS = 8
THREADS = WARPS * WARP
HIDDEN, MIXED, WHOLE = range(3)
NUMBERS = ("lines", "q_len", "group", "kv_heads", "capacity", "block_M", "block_N", *LISTED)


def lines_kernel(analysis: Analysis, dtypes: dict[int, str], packed: bool) -> Any:
    """The function ``lines(plan, seqlens_k, [cu_seqlens_q], *tensors, *sizes, *ints, *numbers)``.

    plan: int32, all of its numbers, as one dimension. tensors, sizes and ints: those that the analysis names, as in
    lists/kernel.py. numbers: int32, of NUMBERS; ``q_len`` is the longest of packed sequences.

    Args:
        analysis: without wide loads.
        dtypes: of the tensors, by their numbers.
    """
    assert not analysis.row_loads
    assert not analysis.column_loads
    builder = Builder()
    with builder.prim_func("lines"):
        arg = SimpleNamespace(analysis=analysis, batch=T.dynamic("batch"), bounds=None)
        arg.plan = builder.prim_func_arg("plan", T.Tensor([T.dynamic("plan_size")], "int32"))
        arg.seqlens_k = builder.prim_func_arg("seqlens_k", T.Tensor([arg.batch], "int32"))
        if packed:
            arg.bounds = builder.prim_func_arg("cu_seqlens_q", T.Tensor([arg.batch + 1], "int32"))
        arg.tensors = {
            number: builder.prim_func_arg(f"t{number}", T.Tensor([T.dynamic(f"t{number}_size")], dtypes[number]))
            for number in analysis.tensors
        }
        arg.sizes = {of: builder.prim_func_arg(f"t{of[0]}_size{of[1]}", T.int32()) for of in analysis.sizes}
        arg.ints = {number: builder.prim_func_arg(f"i{number}", T.int32()) for number in analysis.ints}
        for name in NUMBERS:
            setattr(arg, name, builder.prim_func_arg(name, T.int32()))
        _kernel(arg)
    return builder.get().with_attr(OWN_BARRIERS, True).with_attr(OWN_BOUNDS, True)


@T.macro
def _kernel(arg):
    with T.Kernel(arg.lines, threads=THREADS) as block:
        thread = T.get_thread_binding()
        # [2, WARPS]: of two steps, so that one barrier a step is enough
        totals = T.alloc_shared([2, WARPS], "int32")
        item = T.alloc_var("int32", init=T.truncdiv(block, arg.kv_heads) if arg.analysis.by_head else block)
        rows = _rows(arg, item)
        kv_head = T.alloc_var("int32", init=block - item * arg.kv_heads if arg.analysis.by_head else 0)
        line = T.alloc_var("int32", init=line_at(arg, block))
        end = T.alloc_var("int32", init=T.truncdiv(rows.seqlen + (arg.block_N - 1), arg.block_N))
        visited = T.alloc_var("int32", init=0)
        if thread == 0:
            arg.plan[line] = 0
        for step in T.serial(T.truncdiv(end + (THREADS - 1), THREADS)):
            tile = T.alloc_var("int32", init=step * THREADS + thread)
            kind = T.alloc_var("int32", init=HIDDEN)
            if tile < end:
                kind = _kind(arg, rows, kv_head, tile)
            upto = T.alloc_var("int32", init=T.min(kind, 1))
            for i in T.unroll(5):
                below = T.alloc_var("int32", init=T.shfl_up(upto, 1 << i))
                if thread % WARP >= (1 << i):
                    upto += below
            if thread % WARP == WARP - 1:
                totals[step % 2, thread // WARP] = upto
            T.sync_threads()
            for i in T.unroll(WARPS):
                if i < thread // WARP:
                    upto += totals[step % 2, i]
            if tile < end:
                arg.plan[line + tile + 1] = visited + upto
                if kind != HIDDEN:
                    arg.plan[line + arg.line_tiles + visited + upto] = 2 * tile + kind - MIXED
            for i in T.unroll(WARPS):
                visited += totals[step % 2, i]


@T.macro
def _rows(arg, item):
    """The sequence of an item, its number of keys, and the positions of the item's first and last query."""
    b = T.alloc_var("int32", init=0)
    q_tile = T.alloc_var("int32", init=0)
    q_len = T.alloc_var("int32", init=arg.q_len)
    if arg.bounds is None:
        q_tiles = T.truncdiv(arg.q_len * arg.group + (arg.block_M - 1), arg.block_M)
        b = T.truncdiv(item, q_tiles)
        q_tile = item - b * q_tiles
    else:
        # The last sequence whose first item is not behind this one; the items of unused rows have no keys.
        high = T.alloc_var("int32", init=arg.batch - 1)
        while b < high:
            middle = T.alloc_var("int32", init=T.truncdiv(b + high + 1, 2))
            if _first_item(arg, middle) <= item:
                b = middle
            else:
                high = middle - 1
        q_tile = item - _first_item(arg, b)
        q_len = T.max(T.min(arg.bounds[b + 1] - arg.bounds[b], arg.q_len), 0)
    seqlen = T.alloc_var("int32", init=T.max(T.min(arg.seqlens_k[b], arg.capacity), 0))
    row0 = T.alloc_var("int32", init=q_tile * arg.block_M)
    last = T.alloc_var("int32", init=T.min(row0 + arg.block_M, q_len * arg.group) - 1)
    q_lo = T.alloc_var("int32", init=_position(arg, seqlen - q_len + T.truncdiv(row0, arg.group)))
    q_hi = T.alloc_var("int32", init=T.max(_position(arg, seqlen - q_len + T.truncdiv(last, arg.group)), q_lo))
    return SimpleNamespace(b=b, seqlen=seqlen, q_lo=q_lo, q_hi=q_hi)


def _first_item(arg: Any, b: Any) -> Any:
    """The number of the first item of a packed sequence; see records.packed_items."""
    return T.truncdiv(arg.bounds[b] * arg.group, arg.block_M) + b


def _position(arg: Any, q: Any) -> Any:
    """A query's position, where lengths are right; else one that there may be."""
    return T.max(T.min(q, arg.capacity - 1), -arg.q_len)


@T.macro
def _kind(arg, rows, kv_head, tile):
    """The kind of a tile for all heads of a job."""
    visited = T.alloc_var("int32", init=0)
    whole = T.alloc_var("int32", init=T.if_then_else((tile + 1) * arg.block_N <= rows.seqlen, 1, 0))
    # A mask that does not depend on the head is the same for all.
    for i in T.serial(arg.group if arg.analysis.by_head else 1):
        kind = T.alloc_var("int32", init=_emitted(arg, rows, kv_head * arg.group + i, tile))
        visited = T.max(visited, T.min(kind, 1))
        whole = T.min(whole, T.max(kind, MIXED) - MIXED)
    return visited + T.min(visited, whole)


def _emitted(arg: Any, rows: Any, head: Any, tile: Any) -> Any:
    """The kind of a tile for one head."""
    inputs = {("b",): rows.b, ("h",): T.alloc_var("int32", init=head)[0], ("seqlen_k",): rows.seqlen}
    ends = {
        ("q", "first"): rows.q_lo,
        ("q", "last"): rows.q_hi,
        ("k", "first"): tile * arg.block_N,
        ("k", "last"): T.min((tile + 1) * arg.block_N, rows.seqlen) - 1,
    }
    inputs |= {name: T.alloc_var("int32", init=value)[0] for name, value in ends.items()}
    inputs |= {(f"i{number}",): value for number, value in arg.ints.items()}
    inputs |= {("size", *of): value for of, value in arg.sizes.items()}
    return Emitter(inputs, arg.tensors, _no_wide)(arg.analysis.kind)


def _no_wide(*_: Any) -> Any:
    raise AssertionError("a wide load")
