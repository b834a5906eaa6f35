"""The producer warp of the Hopper schedule: draws tasks, loads Q, K, V and a bias by TMA; see kernel.py."""

import tilelang.language as T

from ...packed.tasks import task_count
from ...tile.expressions import Emitter
from .plan import LEADER
from .tasks import (
    BATCH,
    COUNT,
    HEAD,
    LEFT,
    RIGHT,
    ROW,
    first_key_of,
    places,
    read_message,
    rows_of,
    send,
    sizes_of_task,
    task_total,
    tile_of_step,
    write_message,
)


@T.macro
def load_tile(plan, arg, w, b, h, row, k_lo, n):
    """Copies the tensor's tile for the scores, signalled by K's barrier. Elements beyond the tensor's edges are 0."""
    emit = Emitter(arg.operands)
    outer = [emit(index, b=b, h=h) for index in plan.copied.outer]
    of = sizes_of_task(plan, arg, w)
    first = emit(plan.copied.row, b=b, h=h, q=row + of.seqlen_k - of.seqlen_q)
    T.barrier_wait(w.tile_free[n % plan.stages], ((n // plan.stages) & 1) ^ 1)
    # [block_M, block_N]
    T.tma_copy(
        arg.operands[plan.copied.name][(*outer, slice(first, first + plan.block_M), slice(k_lo, k_lo + plan.block_N))],
        w.tile[n % plan.stages, :, :],
        barrier=w.k_ready[n % plan.stages],
        eviction_policy="evict_first" if plan.copied_once else None,
    )


@T.macro
def announce(plan, arg, w, turn, tile):
    """Sends the next task to all warps of both blocks."""
    total = task_total(plan, arg, w)
    if w.rank == LEADER:
        T.barrier_wait(w.message_free[turn % plan.messages], ((turn // plan.messages) & 1) ^ 1)
        if w.thread == plan.consumers:
            if w.ticket[0] == total - 1:
                arg.tickets[0] = 0  # the last ticket: leave the queue as the next launch must find it
            if tile < total:
                write_message(plan, arg, w, turn, tile)
            else:
                w.message[turn % plan.messages, COUNT] = 0
            send(plan, w, turn)


@T.macro
def load(plan, arg, w, turn, step):
    """Loads Q, K and V of one task as buffers become free, and announces the next task before the last V."""
    b, h, row = w.task[BATCH], w.task[HEAD], w.task[ROW]
    count, right, left = w.task[COUNT], w.task[RIGHT], w.task[LEFT]
    kv_h = T.alloc_var("int32", init=T.truncdiv(h, arg.heads_per_kv_head))
    q_b, k_b, v_b = places(plan, arg, w, b)
    T.barrier_wait(w.q_free[0], (turn & 1) ^ 1)
    # Q: [block_M, head_dim]
    T.tma_copy(rows_of(plan, arg.q, q_b, row, plan.block_M, h, slice(0, plan.head_dim)), w.q, barrier=w.q_ready[0])
    T.barrier_arrive(w.q_ready[0])
    for j in T.serial(count):
        k_lo = first_key_of(plan, w, tile_of_step(plan, arg, w, j, count, right, left))
        n = step + j
        if (j == count - 1) & (w.rank == LEADER) & (w.thread == plan.consumers):
            # Draw as late as the answer can still be in time: a block that draws sooner may hold a tile back at the end
            # while other blocks have none.
            w.ticket[0] = T.atomic_add(arg.tickets[0], 1, return_prev=True)
        T.barrier_wait(w.k_free[n % plan.stages], ((n // plan.stages) & 1) ^ 1)
        # K: [block_N, head_dim]
        T.tma_copy(
            rows_of(plan, arg.k, k_b, k_lo, plan.block_N, kv_h, slice(0, plan.head_dim)),
            w.k[n % plan.stages, :, :],
            barrier=w.k_ready[n % plan.stages],
            cluster_mask=plan.everyone,
        )
        if plan.copied is not None:
            load_tile(plan, arg, w, b, h, row, k_lo, n)
        T.barrier_arrive(w.k_ready[n % plan.stages])
        if j == count - 1:
            # Before the last V, whose stage is freed later than K's: Q of the next task then follows without delay.
            announce(plan, arg, w, turn + 1, w.ticket[0] + arg.blocks // plan.cluster)
        T.barrier_wait(w.v_free[n % plan.stages], ((n // plan.stages) & 1) ^ 1)
        # V: [block_N, head_dim_v], in fp8 [head_dim_v, block_N]
        if plan.fp8:
            T.tma_copy(
                arg.v[v_b, kv_h, 0 : plan.head_dim_v, k_lo : k_lo + plan.block_N],
                w.v[n % plan.stages, :, :],
                barrier=w.v_ready[n % plan.stages],
                cluster_mask=plan.everyone,
            )
        else:
            T.tma_copy(
                rows_of(plan, arg.v, v_b, k_lo, plan.block_N, kv_h, slice(0, plan.head_dim_v)),
                w.v[n % plan.stages, :, :],
                barrier=w.v_ready[n % plan.stages],
                cluster_mask=plan.everyone,
            )
        T.barrier_arrive(w.v_ready[n % plan.stages])


@T.macro
def produce(plan, arg, w):
    turn = T.alloc_var("int32", init=0)
    step = T.alloc_var("int32", init=0)
    w.ticket[0] = -1  # none drawn yet: the first task follows from the block's number
    if plan.packed:
        w.total[0] = task_count(arg)
    announce(plan, arg, w, turn, w.block // plan.cluster)
    read_message(plan, w, turn)
    while w.task[COUNT] > 0:
        load(plan, arg, w, turn, step)
        step += w.task[COUNT]
        turn += 1
        read_message(plan, w, turn)
