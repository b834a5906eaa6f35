"""Loads of the kernels for dk and dv on Hopper: K and V once, then Q and dO tile by tile."""

from __future__ import annotations

from types import SimpleNamespace

import tilelang.language as T

from ...tile.lists import length_of_line, line_of, tile_of_line
from ..places import heads_of_block
from .plan import BATCH, FIRST_HEAD, HEADS, KEY, KV_HEAD, PARTS
from .stages import Ring, loading_ring


@T.macro
def load_keys(arg, w, copy):
    """Loads K and V, once. `copy` starts the copies, given their batch elements."""
    k_b, v_b = (T.min(w.task[BATCH], tensor.shape[0] - 1) for tensor in (arg.k, arg.v))
    copy(k_b, v_b)
    T.barrier_arrive(w.kv_ready[0])


@T.macro
def copy_keys(plan, arg, w, k_b, v_b):
    """Copies K and V."""
    key, kv_h = w.task[KEY], w.task[KV_HEAD]
    T.tma_copy(arg.k[k_b, key : key + plan.block_N, kv_h, 0 : plan.head_dim], w.k, barrier=w.kv_ready[0])
    T.tma_copy(arg.v[v_b, key : key + plan.block_N, kv_h, 0 : plan.head_dim_v], w.v, barrier=w.kv_ready[0])


@T.macro
def copy_rows(plan, w, source, tiles, head_dim, of_rows, rows, ready, at):
    """Copies a tile of Q with lse2, or of dO with delta."""
    T.tma_copy(
        source[at.b, at.row : at.row + plan.block_M, at.h, 0:head_dim],
        tiles[at.stage, :, :],
        barrier=ready[at.stage],
    )
    T.tma_copy(
        of_rows[w.task[BATCH], at.h, at.row : at.row + plan.block_M],
        rows[at.stage, 0 : plan.block_M],
        barrier=ready[at.stage],
    )


@T.macro
def load_rows(plan, arg, w, source, ready, free, copy, stages, kind=Ring):
    """Loads Q with lse2, or dO with delta, tile by tile, as stages become free.

    Args:
        source: the tensor, q or do.
        ready, free: the barriers of its stages.
        copy: starts the copies of a tile, given its batch element `b`, head `h`, first `row` and `stage`.
        stages: the number of stages.
        kind: the class of the ring.
    """
    b = T.alloc_var("int32", init=T.min(w.task[BATCH], source.shape[0] - 1))
    ring = loading_ring(stages, kind)
    for g in T.serial(head_count(plan, arg, w)):
        h = first_head(plan, arg, w) + g
        if plan.listed:
            line = T.alloc_var("int32", init=line_of_head(plan, arg, w, h))
            count = T.alloc_var("int32", init=length_of_line(arg, line))
            for step in T.serial(count):
                row = T.alloc_var("int32", init=tile_of_line(arg, line, step) * plan.block_M)
                T.barrier_wait(free[ring.stage], ring.parity)
                copy(SimpleNamespace(b=b, h=h, row=row, stage=ring.stage))
                T.barrier_arrive(ready[ring.stage])
                ring.advance()
        else:
            row = T.alloc_var("int32", init=tiles_of_head(plan, w, h)[0] * plan.block_M)
            count = T.max(tiles_of_head(plan, w, h)[1] - tiles_of_head(plan, w, h)[0], 0)
            for _ in T.serial(count):
                T.barrier_wait(free[ring.stage], ring.parity)
                copy(SimpleNamespace(b=b, h=h, row=row, stage=ring.stage))
                T.barrier_arrive(ready[ring.stage])
                row += plan.block_M
                ring.advance()


@T.macro
def take_share(arg, w):
    """Turns the number of a share, among those of all heads, into its kv head and query heads."""
    of_share = heads_of_block(arg, w.task[KV_HEAD])
    w.share[PARTS] = w.task[KV_HEAD]  # all threads write the same values
    w.share[FIRST_HEAD] = of_share.first_head
    w.share[HEADS] = of_share.heads
    T.fence_proxy_async()  # else TileLang puts one before each product and copy
    T.sync_threads()
    w.task[KV_HEAD] = of_share.kv_head


def head_count(plan, arg, w):
    """The number of query heads that a block walks over."""
    return w.share[HEADS] if plan.split else arg.heads_per_kv_head


def first_head(plan, arg, w):
    """The first of them."""
    return w.share[FIRST_HEAD] if plan.split else w.task[KV_HEAD] * arg.heads_per_kv_head


def line_of_head(plan, arg, w, h):
    """The line that lists the tiles of queries of the block's keys."""
    number = T.truncdiv(w.task[KEY], plan.block_N)
    return line_of(arg, w.task[BATCH], h, w.first + number if plan.call.packed else number)


def tiles_of_head(plan, w, h):
    """The tiles of queries [first, end) that see the block's keys; none unless first < end."""
    row_lo, row_hi = w.visible.rows(w.task[BATCH], h, w.task[KEY], w.task[KEY] + plan.block_N - 1)
    return T.truncdiv(row_lo, plan.block_M), T.ceildiv(row_hi, plan.block_M)
