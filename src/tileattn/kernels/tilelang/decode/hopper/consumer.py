"""The consumer warpgroup of the Hopper decode schedule: products, softmax, and the store of O; see kernel.py."""

import tilelang.language as T

from ...tile import softmax
from ...tile.expressions import Emitter
from ...tile.mask import Visibility
from ...tile.softmax import ROWS
from ..combine import merge_parts, place_of_query, sink_of, store_part
from ..lines.entries import count_of, entry_of, tile_in
from ..packed_rows import apply_row_mask, apply_row_score, keep_row_uniforms, locate_rows
from ..walk import begin_worker, enter_job, enter_part, head_of, locate_part, next_job, query_of
from .stages import PARITY, STAGE, next_stage, stage_of

WITHIN = 1  # the consumers' named barrier; 0 is __syncthreads


def score_unit(plan, arg, w):
    """The factor that makes scores powers of two in the softmax."""
    return plan.score.softmax_unit(w.uniforms) if plan.score is not None else arg.scale * softmax.LOG2E


@T.macro
def synchronize(plan):
    T.sync_threads(WITHIN, plan.consumers)


@T.macro
def release(w, barriers):
    """One thread says that the warpgroup has read a stage."""
    if w.thread == 0:
        T.barrier_arrive(barriers[w.at[STAGE]])


@T.macro
def load_queries(plan, arg, w, job):
    """Q of a job to shared memory. Rows that do not exist hold anything: nothing of them is stored."""
    synchronize(plan)  # all have read the job before
    # Addresses take some 40 instructions a row, which all wait for: of no more rows than there are.
    at_once = plan.query_rows_at_once
    for step in T.serial(T.truncdiv(job.rows + (at_once - 1), at_once)):
        # Q: [block_M, head_dim]
        for i, d in T.Parallel(at_once, plan.head_dim):
            row = step * at_once + i
            b, q = place_of_query(plan, job, query_of(job, row))
            if row < job.rows:
                w.q[row, d] = (
                    arg.q[b, q, head_of(arg, job, row), d]
                    if plan.head_dim == plan.call.head_dim
                    else T.if_then_else(d < plan.call.head_dim, arg.q[b, q, head_of(arg, job, row), d], 0)
                )
    T.fence_proxy_async()
    synchronize(plan)


@T.macro
def begin_rows(plan, arg, w, job):
    """Where each row stands, and what it has of its own in scores and sink."""
    locate_rows(arg, job, w.row_head, w.row_pos)
    if plan.score is not None:
        emit = Emitter(arg.operands, clamps=True)
        keep_row_uniforms(plan.score, w.uniforms, w.row_uniforms, emit, arg.scale, job.sequence, w.row_head)


@T.macro
def clear_values(plan, w, job, k_lo):
    """Clears the rows of V that have no keys of the mask's range: 0 * NaN is NaN."""
    for i, d in T.Parallel(plan.block_N, plan.head_dim_v):
        if (k_lo + i < job.kv_lo) | (k_lo + i >= job.kv_hi):
            w.v[stage_of(plan, w), i, d] = 0
    T.fence_proxy_async()
    synchronize(plan)


@T.macro
def scores_to_weights(plan, arg, w, job, k_lo, masked):
    emit = Emitter(arg.operands, clamps=True)
    visible = Visibility(plan.traced, emit, job.seqlen)
    c = score_unit(plan, arg, w)
    if plan.score is not None:
        apply_row_score(
            w.acc_s, plan.score, w.uniforms, w.row_uniforms, emit, arg.scale, job.sequence, w.row_head, w.row_pos, k_lo
        )
    if masked:
        apply_row_mask(w.acc_s, visible, job.sequence, w.row_head, w.row_pos, k_lo)
    softmax.raise_maximum(w.acc_s, w.m, w.alpha, w.base, c, plan.block_M, plan.config.rescale_threshold)
    softmax.exponentials(w.acc_s, w.base, c, plan.block_M, plan.block_N)
    softmax.add_own_columns(w.acc_s, w.sums, w.alpha, plan.block_M, plan.block_N)
    # P: [block_M, block_N]
    T.copy(w.acc_s, w.weights)


def entry_ahead(plan, arg, job, part, tile):
    """The line's entry of a tile that a part visits, loaded before the barriers; None without lines."""
    return T.alloc_var("int32", init=entry_of(plan, arg, job, part, tile))[0] if plan.call.listed else None


def first_key(plan, part, tile, entry):
    return (part.lo + tile) * plan.block_N if entry is None else tile_in(entry) * plan.block_N


def is_masked(plan, k_lo, entry, full_lo, full_hi):
    """Whether a tile takes the mask: not one that all rows see."""
    masked = (k_lo < full_lo) | (k_lo + plan.block_N > full_hi)
    return masked if entry is None else masked & (entry % 2 == 0)


@T.macro
def attend(plan, arg, w, job, part, full_lo, full_hi):
    """Computes one part: O, unnormalised, the rows' sums l and the exponents' base."""
    softmax.reset(w.m, w.l, w.acc_o)
    T.fill(w.base, 0)
    T.fill(w.sums, 0)
    for tile in T.serial(count_of(plan, part)):
        entry = entry_ahead(plan, arg, job, part, tile)
        k_lo = T.alloc_var("int32", init=first_key(plan, part, tile, entry))
        T.barrier_wait(w.k_ready[w.at[STAGE]], w.at[PARITY])
        if plan.gather:
            T.fence_proxy_async()  # wgmma is to see what cp.async wrote
        # S = Q K^T: [block_M, block_N]
        T.wgmma_gemm(w.q, w.k[stage_of(plan, w), :, :], w.acc_s, transpose_B=True, clear_accum=True, policy=ROWS)
        T.wait_wgmma(0)
        T.warpgroup_fence_operand(w.acc_s, num_regs=plan.block_M * plan.block_N // plan.consumers)
        release(w, w.k_free)
        masked = is_masked(plan, k_lo, entry, full_lo, full_hi)
        scores_to_weights(plan, arg, w, job, k_lo, masked)
        softmax.minimum_alpha(w.alpha, w.min_alpha, plan.consumers)
        softmax.rescale_if_needed(
            w.acc_o, w.alpha, w.min_alpha, w.thread, plan.block_M, plan.head_dim_v, plan.consumers
        )
        T.barrier_wait(w.v_ready[w.at[STAGE]], w.at[PARITY])
        if plan.gather:
            T.fence_proxy_async()
        else:
            if (k_lo < job.kv_lo) | (k_lo + plan.block_N > job.kv_hi):
                clear_values(plan, w, job, k_lo)
        # O += P V: [block_M, head_dim_v]
        T.wgmma_gemm(w.weights, w.v[stage_of(plan, w), :, :], w.acc_o, policy=ROWS)
        T.wait_wgmma(0)
        T.warpgroup_fence_operand(w.acc_o, num_regs=plan.block_M * plan.head_dim_v // plan.consumers)
        release(w, w.v_free)
        next_stage(plan, w)
    # l: [block_M], of sums [block_M, 4]
    T.reduce_sum(w.sums, w.l, dim=1)


@T.macro
def store(plan, arg, w, job):
    """Divides by the sums, after the sinks have joined them, and stores the rows of o and lse that exist."""
    if plan.call.sink:
        for i in T.Parallel(plan.block_M):
            w.sinks[i] = sink_of(arg, job, w.row_head[i]) * softmax.LOG2E
        # From the base, which is m in powers of two: bit for bit as where parts are merged.
        for i in T.Parallel(plan.block_M):
            w.m[i] = T.if_then_else(w.l[i] == 0.0, -T.infinity("float32"), w.base[i])
        softmax.add_sink(w.m, w.l, w.alpha, w.base, w.sinks, 1.0, plan.block_M)
    else:
        T.fill(w.alpha, 1)
    softmax.finish(w.l, w.base, w.alpha, w.acc_o, plan.block_M, plan.head_dim_v)
    # o: [block_M, head_dim_v]
    for i, d in T.Parallel(plan.block_M, plan.head_dim_v):
        if (i < job.rows) & (d < plan.call.head_dim_v):
            b, q = place_of_query(plan, job, w.row_pos[i] - job.q_pos)
            arg.o[b, q, w.row_head[i], d] = w.acc_o[i, d]
    if plan.call.return_lse:
        # lse: [block_M]
        for i in T.Parallel(plan.block_M):
            if i < job.rows:
                b, q = place_of_query(plan, job, w.row_pos[i] - job.q_pos)
                arg.lse[b, w.row_head[i], q] = w.l[i]


@T.macro
def enter_rows(plan, arg, w, job):
    """Loads a job's queries; the keys that all of its rows see."""
    load_queries(plan, arg, w, job)
    begin_rows(plan, arg, w, job)
    full_lo = T.alloc_var("int32", init=0)
    full_hi = T.alloc_var("int32", init=0)
    if not plan.always_masked:
        visible = Visibility(plan.traced, Emitter(arg.operands, clamps=True), job.seqlen)
        lo, hi = visible.full_range(job.sequence, 0, job.q_lo, job.q_hi)
        full_lo = lo
        full_hi = hi
    return full_lo, full_hi


@T.macro
def consume(plan, arg, w):
    w.at[STAGE] = 0
    w.at[PARITY] = 0
    worker = begin_worker(arg, w.block)
    for _ in T.serial(worker.steps):
        job = enter_job(plan, arg, worker)
        if job.units > 0:
            full_lo, full_hi = enter_rows(plan, arg, w, job)
            for index in T.serial(job.units):
                attend(plan, arg, w, job, enter_part(plan, arg, job, index), full_lo, full_hi)
                part = locate_part(arg, worker, job, index)
                if part.parts == 1:
                    store(plan, arg, w, job)
                else:
                    store_part(plan, arg, job, part, w.acc_o, w.base, w.l)
                    merge_parts(
                        plan, arg, job, part, w.flag, w.thread, plan.consumers,
                        lambda: T.sync_threads(WITHIN, plan.consumers),
                    )  # fmt: skip
        next_job(arg, worker)
