"""Loads of the kernel for dk, dv and dq's sums on Hopper: K and V once, then Q and dO tile by tile."""

from __future__ import annotations

import tilelang.language as T

from .plan import BATCH, KEY, KV_HEAD


@T.macro
def load_keys(plan, arg, w):
    """K and V, once."""
    k_b, v_b = (T.min(w.task[BATCH], tensor.shape[0] - 1) for tensor in (arg.k, arg.v))
    key, kv_h = w.task[KEY], w.task[KV_HEAD]
    T.tma_copy(arg.k[k_b, key : key + plan.block_N, kv_h, 0 : plan.head_dim], w.k, barrier=w.kv_ready[0])
    T.tma_copy(arg.v[v_b, key : key + plan.block_N, kv_h, 0 : plan.head_dim_v], w.v, barrier=w.kv_ready[0])
    T.barrier_arrive(w.kv_ready[0])


@T.macro
def load(plan, arg, w, source, tiles, head_dim, of_rows, rows, ready, free):
    """Q with lse2, or dO with delta, tile by tile, as stages become free."""
    b = T.alloc_var("int32", init=T.min(w.task[BATCH], source.shape[0] - 1))
    stage = T.alloc_var("int32", init=0)
    parity = T.alloc_var("int32", init=1)  # a fresh barrier lets this parity pass
    for g in T.serial(arg.heads_per_kv_head):
        h = w.task[KV_HEAD] * arg.heads_per_kv_head + g
        row = T.alloc_var("int32", init=tiles_of_head(plan, w, h)[0] * plan.block_M)
        count = T.max(tiles_of_head(plan, w, h)[1] - tiles_of_head(plan, w, h)[0], 0)
        for _ in T.serial(count):
            T.barrier_wait(free[stage], parity)
            T.tma_copy(source[b, row : row + plan.block_M, h, 0:head_dim], tiles[stage, :, :], barrier=ready[stage])
            T.tma_copy(
                of_rows[w.task[BATCH], h, row : row + plan.block_M], rows[stage, 0 : plan.block_M], barrier=ready[stage]
            )
            T.barrier_arrive(ready[stage])
            row += plan.block_M
            parity = T.if_then_else(stage == plan.stages - 1, parity ^ 1, parity)
            stage = T.if_then_else(stage == plan.stages - 1, 0, stage + 1)


def tiles_of_head(plan, w, h):
    """Tiles of queries [first, end) that see the block's keys: none, if it is not the case that first < end."""
    row_lo, row_hi = w.visible.rows(w.task[BATCH], h, w.task[KEY], w.task[KEY] + plan.block_N - 1)
    return T.truncdiv(row_lo, plan.block_M), T.ceildiv(row_hi, plan.block_M)
