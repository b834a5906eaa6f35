"""dq's sums on Hopper: the warpgroups exchange dS, multiply, and each tile of dQ is added to the sums in memory."""

from __future__ import annotations

import tilelang.language as T

from ...tile.hopper import WARPGROUP
from ...tile.lists import length_of_line, tile_of_line
from ...tile.matrices import store_matrices, transposed
from ...tile.softmax import ROWS
from .copied_tile import take_gradient
from .loads import first_head, head_count, line_of_head, tiles_of_head
from .plan import BATCH, DQ_PARITY, DS


@T.macro
def add_tile(plan, arg, w, h, place, parity):
    """Adds both halves of a tile of dQ to the sums from row `place` on; first writes out its tensor's gradient."""
    half = plan.sum_rows // 2
    row = T.alloc_var("int32", init=place)
    if plan.leaving is not None:
        take_gradient(plan, arg, w, h, T.truncdiv(row, plan.sum_rows), 0, parity)
        take_gradient(plan, arg, w, h, T.truncdiv(row, plan.sum_rows), 1, parity)
    for group in T.serial(2):
        T.barrier_wait(w.dq_ready[group], parity)
        T.atomic_add(
            arg.dq_sum[w.task[BATCH], h, row + group * half : row + group * half + half, :],
            w.dq_sum[group * half : group * half + half, :],
            use_tma=True,
        )
        T.barrier_arrive(w.dq_free[group])


@T.macro
def add_dq(plan, arg, w):
    """The adding warp: adds each warpgroup's half of each tile of dQ to the sums in memory."""
    half = plan.sum_rows // 2
    parity = T.alloc_var("int32", init=0)
    for g in T.serial(head_count(plan, arg, w)):
        h = first_head(plan, arg, w) + g
        if plan.listed:
            line = T.alloc_var("int32", init=line_of_head(plan, arg, w, h))
            count = T.alloc_var("int32", init=length_of_line(arg, line))
            for step in T.serial(count):
                add_tile(plan, arg, w, h, tile_of_line(arg, line, step) * plan.sum_rows, parity)
                parity = parity ^ 1
        else:
            row = T.alloc_var("int32", init=tiles_of_head(plan, w, h)[0] * plan.sum_rows)
            count = T.max(tiles_of_head(plan, w, h)[1] - tiles_of_head(plan, w, h)[0], 0)
            for _ in T.serial(count):
                if plan.leaving is not None:
                    take_gradient(plan, arg, w, h, T.truncdiv(row, plan.sum_rows), 0, parity)
                    take_gradient(plan, arg, w, h, T.truncdiv(row, plan.sum_rows), 1, parity)
                for group in T.serial(2):
                    T.barrier_wait(w.dq_ready[group], parity)
                    T.atomic_add(
                        arg.dq_sum[w.task[BATCH], h, row + group * half : row + group * half + half, :],
                        w.dq_sum[group * half : group * half + half, :],
                        use_tma=True,
                    )
                    T.barrier_arrive(w.dq_free[group])
                row += plan.sum_rows
                parity = parity ^ 1


@T.macro
def add_half_of_dq(plan, arg, w, group):
    """An adding warp of its own for one warpgroup's half of each tile of dQ."""
    half = plan.sum_rows // 2
    parity = T.alloc_var("int32", init=0)
    for g in T.serial(head_count(plan, arg, w)):
        h = first_head(plan, arg, w) + g
        row = T.alloc_var("int32", init=tiles_of_head(plan, w, h)[0] * plan.sum_rows + group * half)
        count = T.max(tiles_of_head(plan, w, h)[1] - tiles_of_head(plan, w, h)[0], 0)
        for _ in T.serial(count):
            T.barrier_wait(w.dq_ready[group], parity)
            T.atomic_add(
                arg.dq_sum[w.task[BATCH], h, row : row + half, :],
                w.dq_sum[group * half : group * half + half, :],
                use_tma=True,
            )
            T.barrier_arrive(w.dq_free[group])
            row += plan.sum_rows
            parity = parity ^ 1


@T.macro
def share_ds(plan, w):
    """Writes dS of this warpgroup's keys to shared memory, with queries in rows, for dQ's product."""
    place_of = transposed(w.shared_ds, w.at[DS])
    store_matrices(w.ds, w.eight, plan.block_M, place_of, True, w.thread, plan.config.words)


@T.macro
def multiply_dq(plan, w):
    policy = T.GemmWarpPolicy.FullCol if plan.order.shares_columns else ROWS
    if plan.order.transposed:
        T.wgmma_gemm(
            w.k,
            w.shared_ds[w.at[DS], :, :],
            w.acc_dq,
            transpose_A=True,
            transpose_B=True,
            clear_accum=True,
            policy=policy,
        )
    else:
        T.wgmma_gemm(w.shared_ds[w.at[DS], :, :], w.k, w.acc_dq, clear_accum=True, policy=policy)


@T.macro
def write_out_dq(plan, w):
    """Passes dQ to the adding warp, once the adding warp has finished with the last tile."""
    group = w.thread // WARPGROUP
    T.barrier_wait(w.dq_free[group], w.at[DQ_PARITY])
    for i, j in T.Parallel(*plan.order.shape):
        w.dq_sum[plan.order.place(i, j)[0], plan.order.place(i, j)[1]] = w.acc_dq[i, j]
    T.fence_proxy_async()
    T.barrier_arrive(w.dq_ready[group])
