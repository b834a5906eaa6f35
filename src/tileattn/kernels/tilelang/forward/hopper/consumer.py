"""The consumer warpgroups of the Hopper schedule: products, softmax, and the store of O; see kernel.py."""

import tilelang.language as T

from ...packed.tasks import lse_of, sink_of
from ...tile import dropout, softmax
from ...tile.expressions import Emitter
from ...tile.hopper import WARP, WARPGROUP
from ...tile.key_words import find_ranges
from ...tile.mask import Visibility, apply_score, keep_uniforms
from ...tile.matrices import load_words, straight
from ...tile.softmax import ROWS
from .mixed_tiles import hide_scores, take_bits
from .tasks import (
    BATCH,
    COUNT,
    HEAD,
    K_END,
    LEFT,
    Q_END,
    Q_LEN,
    RIGHT,
    ROW,
    first_key_of,
    place_of_o,
    read_message,
    recall,
    rows_of,
    sizes_of_task,
    tile_of_step,
    whole_tile,
)

# Named barriers: 0 is __syncthreads; each consumer warpgroup has one for its turn and one for itself.
TURN, WITHIN = 1, 4

# Fields of a warpgroup's state: the stages of the next K and the next V, and the parities of their `ready` barriers.
# They are counted along. Computing them from a tile's number took 5 % of the loop's instructions at head dim 64.
K_STAGE, K_PARITY, V_STAGE, V_PARITY = range(4)


def scale_of(plan, arg, w):
    """The factor of the products of q and k."""
    return w.descaled[0] if plan.fp8 else arg.scale


def score_unit(plan, arg, w):
    """The factor that makes scores powers of two in the softmax."""
    return plan.score.log2_unit(w.uniforms) if plan.score is not None else scale_of(plan, arg, w) * softmax.LOG2E


def output_factor(plan, arg, w):
    """The factor of O, applied when O is divided by the row's sum; None for 1."""
    if not plan.fp8:
        return arg.weight
    return w.descaled[1] * arg.weight if plan.call.dropout else w.descaled[1]


def sink_of_task(plan, arg, w):
    return sink_of(arg, w.task[HEAD], w.task[K_END]) if plan.packed else arg.sink[w.task[HEAD]]


def releases(plan, w):
    """Whether this thread signals for its warpgroup that a stage is free; in a cluster one thread per block does."""
    return w.thread % WARPGROUP < plan.cluster


def arrive_at_producers(plan, w, barriers, stage):
    if plan.cluster == 1:
        return T.barrier_arrive(barriers[stage])
    return T.mbarrier_arrive(barriers[stage], w.thread % WARPGROUP)


@T.macro
def release(plan, w, barriers, stage):
    if releases(plan, w):
        arrive_at_producers(plan, w, barriers, stage)


@T.macro
def release_after_maximum(plan, w, barriers, stage):
    """Releases K once the maximum is known.

    The condition, that no alpha is negative, always holds; it makes the arrival depend on the maximum. The arrival
    keeps the wait for P V, which follows, behind the arithmetic that is to run at the same time as P V: ptxas moves
    waits past arithmetic, but not past an arrival at a barrier. If K is released at once, only half of the search for
    the maximum hides P V. If K is released after all exponentials, the tile after next comes too late. This place was
    the fastest of the three on an H200 at all head dims, by 1 to 4 %.
    """
    softmax.minimum_alpha(w.alpha, w.min_alpha, plan.consumers)
    # The sign bit rather than a comparison with 0: a NaN must not keep K for ever.
    if releases(plan, w) & (T.reinterpret(w.min_alpha[w.thread], "int32") >= 0):
        arrive_at_producers(plan, w, barriers, stage)


@T.macro
def release_after_half(plan, w, barriers, stage):
    """The same where there is no maximum: once half of the tile's weights are added up. No sum is negative."""
    softmax.own_sum(w.sums, w.min_alpha)
    if releases(plan, w) & T.Not(w.min_alpha[w.thread] < 0.0):
        arrive_at_producers(plan, w, barriers, stage)


@T.macro
def first_stages(w):
    for i in T.unroll(4):
        w.stage[i] = 0


@T.macro
def next_k(plan, w):
    """Advances to the next K; V takes the stage that K had."""
    w.stage[V_STAGE] = w.stage[K_STAGE]
    w.stage[V_PARITY] = w.stage[K_PARITY]
    last = w.stage[V_STAGE] == plan.stages - 1
    w.stage[K_STAGE] = T.if_then_else(last, 0, w.stage[V_STAGE] + 1)
    w.stage[K_PARITY] = T.if_then_else(last, w.stage[V_PARITY] ^ 1, w.stage[V_PARITY])


@T.macro
def wait_for_turn(plan, w):
    if plan.ping_pong:
        T.sync_threads(TURN + w.thread // WARPGROUP, 2 * WARPGROUP)


@T.macro
def end_turn(plan, w):
    if plan.ping_pong:
        T.named_barrier_arrive(TURN + (w.thread // WARPGROUP + 1) % plan.warpgroups, 2 * WARPGROUP)


@T.macro
def multiply_qk(plan, w, stage):
    # S = Q K^T: [block_M, block_N]
    if plan.config.q_in_registers:
        T.wgmma_gemm(w.q_registers, w.k[stage, :, :], w.acc_s, transpose_B=True, clear_accum=True, policy=ROWS)
    else:
        T.wgmma_gemm(w.q, w.k[stage, :, :], w.acc_s, transpose_B=True, clear_accum=True, policy=ROWS)


@T.macro
def multiply_pv(plan, w, stage):
    # O += P V: [block_M, head_dim_v]
    if plan.fp8 and plan.config.two_level:
        T.wgmma_gemm(w.weights, w.v[stage, :, :], w.product, transpose_B=True, clear_accum=True, policy=ROWS)
    elif plan.fp8:
        T.wgmma_gemm(w.weights, w.v[stage, :, :], w.acc_o, transpose_B=True, policy=ROWS)
    else:
        T.wgmma_gemm(w.weights, w.v[stage, :, :], w.acc_o, policy=ROWS)


@T.macro
def wait_for_pv(plan, w):
    T.wait_wgmma(0)
    if plan.fp8 and plan.config.two_level:
        T.warpgroup_fence_operand(w.product, num_regs=plan.block_M * plan.head_dim_v // plan.consumers)
        softmax.add_product(w.acc_o, w.product, plan.block_M, plan.head_dim_v)
    else:
        T.warpgroup_fence_operand(w.acc_o, num_regs=plan.block_M * plan.head_dim_v // plan.consumers)


@T.macro
def keep_weights(plan, w):
    """Copies the weights to the first operand of the next P V."""
    # P: [block_M, block_N]
    if plan.fp8:
        softmax.to_fp8_weights(w.acc_s, w.weights, plan.block_M, plan.block_N)
    else:
        T.copy(w.acc_s, w.weights)
    if plan.config.weights_in_shared:
        # Each warp's part of the product reads the rows that this warp has written, no others.
        T.fence_proxy_async()
        T.sync_warp()


@T.macro
def take_tile(plan, w, stage):
    """Copies the producer's tile to registers while the tensor cores compute the scores."""
    if plan.copied is not None:
        # [block_M, block_N]
        if plan.tile_in_words:
            load_words(w.tile_registers, straight(w.tile, stage), w.thread)
        else:
            T.copy(w.tile[stage, :, :], w.tile_registers)


@T.macro
def release_tile(plan, w, stage):
    """Releases the copied tile on the same condition as K.

    An arrival does not wait for reads in flight; TMA would overwrite what they read.
    """
    if plan.copied is not None:
        T.sync_warp()  # one lane arrives for the warp
        if T.shuffle_elect(WARP) & (T.reinterpret(w.min_alpha[w.thread], "int32") >= 0):
            T.barrier_arrive(w.tile_free[stage])


@T.macro
def scores_to_weights(plan, arg, w, first_key, masked, bounded=False, number=0):
    k_lo = T.alloc_var("int32", init=first_key)
    b, h, row = w.task[BATCH], w.task[HEAD], w.task[ROW]
    emit = Emitter(arg.operands, {} if plan.copied is None else {plan.copied.text: w.tile_registers})
    of = sizes_of_task(plan, arg, w)
    visible = Visibility(plan.traced, emit, of.seqlen_k)
    q_lo = row + of.seqlen_k - of.seqlen_q
    c = score_unit(plan, arg, w)
    if plan.traced.score is not None:
        apply_score(w.acc_s, plan.score, w.uniforms, emit, scale_of(plan, arg, w), b, h, q_lo, k_lo)
    if masked:
        hide_scores(plan, arg, w, number, visible, b, h, q_lo, k_lo)
    if bounded:
        softmax.exponentials(w.acc_s, w.base, c, plan.block_M, plan.block_N)
        softmax.add_own_half(w.acc_s, w.sums, 0)
        release_after_half(plan, w, w.k_free, w.stage[K_STAGE])
        softmax.add_own_half(w.acc_s, w.sums, plan.block_N // 2)
    else:
        softmax.raise_maximum(
            w.acc_s,
            w.m,
            w.alpha,
            w.base,
            c,
            plan.block_M,
            plan.config.rescale_threshold,
            plan.shift,
            plan.bounded,
        )
        release_after_maximum(plan, w, w.k_free, w.stage[K_STAGE])
        release_tile(plan, w, w.stage[K_STAGE])
        softmax.exponentials(w.acc_s, w.base, c, plan.block_M, plan.block_N)
        softmax.add_own_columns(w.acc_s, w.sums, w.alpha, plan.block_M, plan.block_N)
    if plan.call.dropout:
        dropout.enter_tile(w.words, arg, row, k_lo)
        dropout.share_in_warp(w.words)
        dropout.drop(w.acc_s, w.acc_s, w.words, plan.block_M, plan.block_N)


@T.macro
def store(plan, arg, w):
    """Stores O through shared memory, each warpgroup its own 64 rows, and lse from registers."""
    b, h, row = w.task[BATCH], w.task[HEAD], w.task[ROW]
    group = w.thread // WARPGROUP
    T.tma_store_wait(0)  # the last tile's O has left the buffer
    T.sync_threads(WITHIN + group, WARPGROUP)
    # O: [block_M, head_dim_v]
    T.copy(w.acc_o, w.o[0 : plan.block_M, 0 : plan.head_dim_v])
    T.fence_proxy_async()
    T.sync_threads(WITHIN + group, WARPGROUP)
    for p in T.unroll(plan.head_dim_v // plan.panel):
        # O of the warpgroup: [64, panel]
        T.tma_copy(
            w.o[group * 64 : group * 64 + 64, p * plan.panel : p * plan.panel + plan.panel],
            rows_of(
                plan,
                arg.o,
                place_of_o(plan, w, b),
                row + group * 64,
                64,
                h,
                slice(p * plan.panel, p * plan.panel + plan.panel),
            ),
            leader_scope_threads=WARPGROUP,
        )
    if plan.call.return_lse:
        # lse: [block_M]
        if plan.packed:
            T.copy(w.l, lse_of(arg.lse, w.task[Q_END] - w.task[Q_LEN], w.task[Q_LEN])[0, h, row : row + plan.block_M])
        else:
            T.copy(w.l, arg.lse[b, h, row : row + plan.block_M])
    if not plan.output_apart:
        T.tma_store_wait(0)  # O lies where Q was
        T.barrier_arrive(w.q_free[0])


@T.macro
def advance(plan, arg, w, k_lo, masked, bounded, number=0):
    """Computes the scores of the next tile of keys, and adds the values of the tile before to O under the softmax."""
    if masked:
        take_bits(plan, arg, w, number)
    T.barrier_wait(w.k_ready[w.stage[K_STAGE]], w.stage[K_PARITY])
    wait_for_turn(plan, w)
    multiply_qk(plan, w, w.stage[K_STAGE])
    T.barrier_wait(w.v_ready[w.stage[V_STAGE]], w.stage[V_PARITY])
    multiply_pv(plan, w, w.stage[V_STAGE])
    end_turn(plan, w)
    take_tile(plan, w, w.stage[K_STAGE])
    T.wait_wgmma(1)
    T.warpgroup_fence_operand(w.acc_s, num_regs=plan.block_M * plan.block_N // plan.consumers)
    scores_to_weights(plan, arg, w, k_lo, masked, bounded, number)
    wait_for_pv(plan, w)
    release(plan, w, w.v_free, w.stage[V_STAGE])
    keep_weights(plan, w)
    next_k(plan, w)
    if not bounded:
        softmax.rescale_if_needed(
            w.acc_o, w.alpha, w.min_alpha, w.thread, plan.block_M, plan.head_dim_v, plan.consumers
        )


@T.macro
def walk_masked(plan, arg, w, count, right, left, masked):
    """The masked tiles of keys but the first."""
    if plan.masks_inside:
        for j in T.serial(masked - 1):
            tile = tile_of_step(plan, arg, w, j + 1, count, right, left)
            advance(plan, arg, w, first_key_of(plan, w, tile), True, False, j + 1)


@T.macro
def walk_whole(plan, arg, w, count, left, masked, bounded):
    """The tiles without a mask; bounded: without a maximum (see :data:`softmax.LARGEST_BOUND`)."""
    for j in T.serial(count - masked):
        tile = whole_tile(plan, arg, w, masked + j, count, left)
        advance(plan, arg, w, first_key_of(plan, w, tile), False, bounded)


@T.macro
def attend(plan, arg, w, turn):
    """Computes one tile of queries, from its first product to the store of O."""
    count, right, left = w.task[COUNT], w.task[RIGHT], w.task[LEFT]
    masked = T.max(right + left, 1)
    if plan.fp8:
        kv_h = T.truncdiv(w.task[HEAD], arg.heads_per_kv_head)
        w.descaled[0] = arg.scale * (arg.q_descale[w.task[BATCH], kv_h] * arg.k_descale[w.task[BATCH], kv_h])
        w.descaled[1] = arg.v_descale[w.task[BATCH], kv_h]
    if plan.traced.score is not None:
        emit = Emitter(arg.operands)
        keep_uniforms(plan.score, w.uniforms, emit, scale_of(plan, arg, w), w.task[BATCH], w.task[HEAD])
    softmax.reset(w.m, w.l, w.acc_o)
    T.fill(w.sums, 0)
    if plan.by_ranges:
        of = sizes_of_task(plan, arg, w)
        visible = Visibility(plan.traced, Emitter(arg.operands), of.seqlen_k)
        find_ranges(w.ranges, visible, w.task[BATCH], w.task[HEAD], w.task[ROW] + of.seqlen_k - of.seqlen_q)
    take_bits(plan, arg, w, 0)
    T.barrier_wait(w.q_ready[0], turn & 1)
    if plan.config.q_in_registers:
        # Q: [block_M, head_dim]
        T.copy(w.q, w.q_registers)
        if plan.output_apart:
            T.barrier_arrive(w.q_free[0])
    T.barrier_wait(w.k_ready[w.stage[K_STAGE]], w.stage[K_PARITY])
    wait_for_turn(plan, w)
    multiply_qk(plan, w, w.stage[K_STAGE])
    end_turn(plan, w)
    take_tile(plan, w, w.stage[K_STAGE])
    if plan.call.dropout:
        dropout.enter_head(w.words, arg, w.task[BATCH], w.task[HEAD])
    T.wait_wgmma(0)
    T.warpgroup_fence_operand(w.acc_s, num_regs=plan.block_M * plan.block_N // plan.consumers)
    first_key = first_key_of(plan, w, tile_of_step(plan, arg, w, 0, count, right, left))
    scores_to_weights(plan, arg, w, first_key, right + left > 0)
    keep_weights(plan, w)
    next_k(plan, w)
    walk_masked(plan, arg, w, count, right, left, masked)
    if plan.bounded:
        if score_unit(plan, arg, w) > softmax.LARGEST_BOUND:
            walk_whole(plan, arg, w, count, left, masked, False)
        else:
            softmax.fix_base(w.m, w.base, score_unit(plan, arg, w))
            walk_whole(plan, arg, w, count, left, masked, True)
    else:
        walk_whole(plan, arg, w, count, left, masked, False)
    if plan.output_apart and not plan.config.q_in_registers:
        T.barrier_arrive(w.q_free[0])  # the next Q may come under the last product and the store of O
    T.barrier_wait(w.v_ready[w.stage[V_STAGE]], w.stage[V_PARITY])
    multiply_pv(plan, w, w.stage[V_STAGE])
    if plan.recalls:
        recall(plan, w, turn)
    # l: [block_M], of sums [block_M, 4]
    T.reduce_sum(w.sums, w.l, dim=1)
    if plan.bounded and plan.call.sink:
        softmax.forget_fixed(w.m, w.l)
    if plan.call.sink:
        sink = sink_of_task(plan, arg, w) * softmax.LOG2E
        softmax.add_sink(w.m, w.l, w.alpha, w.base, sink, score_unit(plan, arg, w), plan.block_M, plan.shift)
    else:
        T.fill(w.alpha, 1)
    wait_for_pv(plan, w)
    release(plan, w, w.v_free, w.stage[V_STAGE])
    softmax.finish(w.l, w.base, w.alpha, w.acc_o, plan.block_M, plan.head_dim_v, output_factor(plan, arg, w))
    store(plan, arg, w)


@T.macro
def consume(plan, arg, w):
    turn = T.alloc_var("int32", init=0)
    first_stages(w)
    if plan.ping_pong:
        if w.thread < WARPGROUP:
            T.named_barrier_arrive(TURN, 2 * WARPGROUP)
    read_message(plan, w, turn, plan.recalls)
    while w.task[COUNT] > 0:
        attend(plan, arg, w, turn)
        turn += 1
        read_message(plan, w, turn, plan.recalls)
    T.tma_store_wait(0)
