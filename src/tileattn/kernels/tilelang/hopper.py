"""The forward pass, Hopper schedule: FlashAttention-3's warp specialisation (Shah et al. 2024, arXiv 2407.08608).

Persistent blocks, one per multiprocessor, draw tiles of ``block_M`` queries of one head from a common queue. In a block

    one producer warp    draws the next tile, finds out which keys it may see, writes both into a *message*, which all
                         warps read, and loads Q, then K and V tile by tile, by TMA;
    consumer warpgroups  own 64 query rows each; they multiply (wgmma), keep the softmax, and store O by TMA.

A bias, or another tensor that a score modification reads tile by tile, is loaded with K and awaited by K's barrier;
the consumers take each tile to registers under S = Q K^T and then free it.

All warps run ahead as far as the barriers let them: while the consumers still finish one tile, Q and the first K and V
of the next are on their way, and O is stored under the next tile's arithmetic.

Every shared buffer has two mbarriers, ``ready`` (filled: the producer's 32 lanes and the bytes have arrived; for a
message its writer) and ``free`` (read: its readers have arrived). A barrier's phase flips each time it completes. The
n-th use of a buffer (n = 0, 1, ...) waits for ``ready`` with parity ``n % 2`` and for ``free`` with parity
``(n + 1) % 2``, which a fresh barrier lets pass. K and V have ``num_stages`` buffers each, so their use number n is
that of stage ``n % num_stages``, turn ``n // num_stages``.

One iteration of a consumer warpgroup, j being the tile of keys before; the tensor cores work under the softmax:

    tensor cores    |  S = Q K_j+1^T  |      O += P V_j       |                     |  S = Q K_j+2^T ...
    other units     |                 |  softmax of S(j+1)    |  O *= alpha, P = S  |
    K barriers      ^ready            ^free (early)           ^free (late_release)
    V barriers          ^ready                                ^free

Visible keys are walked from the last to the first, but tiles that need the mask come before all others, in a loop of
their own: the main loop holds no mask.

With ``cluster`` = 2, two blocks on neighbouring multiprocessors take neighbouring tiles of queries and share the keys:
the *leader*'s producer draws the tiles, sends the message to the *follower* too, and loads K and V into the shared
memory of both (TMA multicast), once both blocks' consumers have freed the stage. Half the bytes leave the L2 cache.

With ``ping_pong`` the warpgroups take turns in issuing their products, by named barriers, so that the softmax of one
runs under the products of another.

The schedule keeps O's old scale while the row maximum has grown by at most ``patience`` (in powers of two): the weights
then exceed 1, which the division by their sum at the end undoes exactly as otherwise; and most rescaling is skipped.

fp8: both products are taken in e4m3 and summed in float32. The matrix units read 8-bit operands only along the sum, so
that V comes transposed (transpose_fp8.py), with its keys in the order in which the threads hold the weights. The
descales of q and k join the scale, that of v the division by the row's sum. Weights are stored 2^4 times as large, and
the patience is 4 at most: they stay within e4m3's 448, and those down to 2^-13 of a row's largest are not lost.

Layouts: q, o (batch, seqlen_q, heads, .), k, v (batch, seqlen_k, kv_heads, .), strides of 16 bytes; lse (batch, heads,
seqlen_q). All sizes and strides are run-time values. Limits: sm_90a, head dims up to 256; see ``backend.refusal``.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import tilelang.language as T
from tilelang.layout import (
    make_full_bank_swizzled_layout,
    make_half_bank_swizzled_layout,
    make_quarter_bank_swizzled_layout,
    make_swizzled_layout,
)

from ...call import AttentionCall
from ...fp8 import FP8
from ...variant import Program
from . import softmax
from .config import HopperConfig, padded
from .expressions import Emitter
from .mask import Score, Visibility, apply_mask, apply_score, keep_uniforms
from .signature import assume_aligned

ROWS = T.GemmWarpPolicy.FullRow  # each warp keeps whole rows of a tile, so that the softmax stays within it
WARP, WARPGROUP = 32, 128

# A message's fields. A count of 0 says that no tile is left.
FIELDS = 8
BATCH, HEAD, ROW, BEGIN, END, RIGHT, LEFT, COUNT = range(FIELDS)

# A cluster's blocks, by rank: the leader draws tasks and loads K and V for both.
LEADER, FOLLOWER = 0, 1

# Weights in e4m3 are stored 2^FP8_SHIFT times as large; with `patience` up to 4 they stay below 2^8, the format's 448.
FP8_SHIFT = 4.0

# Named barriers: 0 is __syncthreads; each consumer warpgroup has one for its turn and one for itself.
TURN, WITHIN = 1, 4


def tile_layout(buffer: Any, row_bytes: int) -> Any:
    """Swizzled, so that the eight rows of 16 bytes that a warp reads at a time lie in different banks.

    In the widest panels of columns that divide the rows: a copy by TMA asks for one row of a panel at a time.
    """
    if row_bytes % 128 == 0:
        return make_full_bank_swizzled_layout(buffer)
    return make_half_bank_swizzled_layout(buffer) if row_bytes % 64 == 0 else make_quarter_bank_swizzled_layout(buffer)


def body(call: AttentionCall, config: HopperConfig, traced: Program) -> Any:
    """The macro that emits the kernel, given its parameters (see signature.py)."""
    block_M, block_N, stages = config.block_M, config.block_N, config.num_stages
    size = call.dtype.itemsize
    head_dim, head_dim_v = padded(call.head_dim, size), padded(call.head_dim_v, size)
    dtype, out_dtype = (str(kind).removeprefix("torch.") for kind in (call.dtype, call.out_dtype))
    fp8 = call.dtype == FP8
    shift = FP8_SHIFT if fp8 else 0.0
    v_tile = [head_dim_v, block_N] if fp8 else [block_N, head_dim_v]
    consumers = config.consumer_threads()
    warpgroups = consumers // WARPGROUP
    ping_pong = config.ping_pong and warpgroups > 1
    output_apart = config.output_apart(call)
    score = Score(call, traced) if traced.score is not None else None
    masks_inside = traced.allows is not None  # else only the last tile of keys may end beyond seqlen_k
    # A tensor that is read tile by tile (see tile_loads.py), such as a bias: the producer copies its tiles with K's.
    copied, copied_dtype = traced.copied_tile or (None, None)
    # Neighbours in the queue are to share its tiles in the L2 cache: heads do, or else batch elements.
    batch_first = copied is not None and copied.differs_by("h") and not copied.differs_by("b")
    # Tiles that nobody shares need not stay there.
    copied_once = copied is not None and copied.differs_by("h") and copied.differs_by("b")
    panel = next(width for width in (64, 32, 16) if head_dim_v % width == 0)  # columns of O that one TMA store takes
    cluster = config.cluster
    rows = cluster * block_M  # queries of one task
    everyone = (1 << cluster) - 1 if cluster > 1 else None  # the blocks that a load of K or V reaches
    # Barriers on which the other block's threads arrive too.
    alloc_common_barrier = T.alloc_cluster_barrier if cluster > 1 else T.alloc_barrier

    # ---------------------------------------------------------------- producer

    def tile_of_step(j, begin, end, right, left):
        """Which tile of keys comes j-th: first those that need the mask, at the right and left ends, then the rest."""
        inner = end - 1 - j + left  # right ones: end - 1 - j; after them `left` steps went elsewhere
        if not masks_inside:
            return end - 1 - j
        return T.if_then_else(j < right, end - 1 - j, T.if_then_else(j < right + left, begin + j - right, inner))

    @T.macro
    def load_tile(arg, w, b, h, row, k_lo, n):
        """The scores' tile of the tensor; it is awaited together with K. What lies beyond the tensor's edges is 0."""
        emit = Emitter(arg.operands)
        outer = [emit(index, b=b, h=h) for index in copied.outer]
        first = emit(copied.row, b=b, h=h, q=row + arg.seqlen_k - arg.seqlen_q)
        T.barrier_wait(w.tile_free[n % stages], ((n // stages) & 1) ^ 1)
        T.tma_copy(
            arg.operands[copied.name][(*outer, slice(first, first + block_M), slice(k_lo, k_lo + block_N))],
            w.tile[n % stages, :, :],
            barrier=w.k_ready[n % stages],
            eviction_policy="evict_first" if copied_once else None,
        )

    @T.macro
    def load(arg, w, turn, step):
        """Q, K and V of one task, as buffers become free."""
        b, h, row = w.task[BATCH], w.task[HEAD], w.task[ROW]
        begin, end, right, left = w.task[BEGIN], w.task[END], w.task[RIGHT], w.task[LEFT]
        kv_h = T.alloc_var("int32", init=T.truncdiv(h, arg.heads_per_kv_head))
        q_b, k_b, v_b = (T.min(b, tensor.shape[0] - 1) for tensor in (arg.q, arg.k, arg.v))
        T.barrier_wait(w.q_free, (turn & 1) ^ 1)
        T.tma_copy(arg.q[q_b, row : row + block_M, h, 0:head_dim], w.q, barrier=w.q_ready)
        T.barrier_arrive(w.q_ready)
        for j in T.serial(w.task[COUNT]):
            k_lo = tile_of_step(j, begin, end, right, left) * block_N
            n = step + j
            if (j == w.task[COUNT] - 1) & (w.rank == LEADER) & (w.thread == consumers):
                # As late as the answer still comes in time: a block that draws early may keep a tile waiting at the
                # end while others have none.
                w.ticket[0] = T.atomic_add(arg.tickets[0], 1, return_prev=True)
            T.barrier_wait(w.k_free[n % stages], ((n // stages) & 1) ^ 1)
            T.tma_copy(
                arg.k[k_b, k_lo : k_lo + block_N, kv_h, 0:head_dim],
                w.k[n % stages, :, :],
                barrier=w.k_ready[n % stages],
                cluster_mask=everyone,
            )
            if copied is not None:
                load_tile(arg, w, b, h, row, k_lo, n)
            T.barrier_arrive(w.k_ready[n % stages])
            T.barrier_wait(w.v_free[n % stages], ((n // stages) & 1) ^ 1)
            if fp8:
                T.tma_copy(
                    arg.v[v_b, kv_h, 0:head_dim_v, k_lo : k_lo + block_N],
                    w.v[n % stages, :, :],
                    barrier=w.v_ready[n % stages],
                    cluster_mask=everyone,
                )
            else:
                T.tma_copy(
                    arg.v[v_b, k_lo : k_lo + block_N, kv_h, 0:head_dim_v],
                    w.v[n % stages, :, :],
                    barrier=w.v_ready[n % stages],
                    cluster_mask=everyone,
                )
            T.barrier_arrive(w.v_ready[n % stages])

    @T.macro
    def write_message(arg, w, turn, tile):
        """Which queries and keys the tile-th task is."""
        emit = Emitter(arg.operands)
        visible = Visibility(traced, emit, arg.seqlen_k)
        side = arg.side_by_side
        tiles = T.ceildiv(arg.seqlen_q, rows)
        # Tiles in the order of the queue: `side_by_side` heads, whose keys and values fit into the L2 cache together,
        # begin with their last query tiles, which a causal mask makes longest.
        pair = T.alloc_var(
            "int32", init=T.truncdiv(tile, side * tiles) * side + T.truncmod(T.truncmod(tile, side * tiles), side)
        )
        row = T.alloc_var("int32", init=(tiles - 1 - T.truncdiv(T.truncmod(tile, side * tiles), side)) * rows)
        b = T.alloc_var("int32", init=T.truncmod(pair, arg.batch) if batch_first else T.truncdiv(pair, arg.heads))
        h = T.alloc_var("int32", init=T.truncdiv(pair, arg.batch) if batch_first else T.truncmod(pair, arg.heads))
        q_lo = row + arg.seqlen_k - arg.seqlen_q
        q_hi = T.min(q_lo + rows, arg.seqlen_k) - 1
        kv_lo, kv_hi = visible.kv_range(b, h, q_lo, q_hi)
        full_lo, full_hi = visible.full_range(b, h, q_lo, q_hi)
        # Tiles of keys [begin, end), of which [full_begin, full_end) are wholly visible. At least one tile, all masked
        # where nothing is visible.
        begin = T.alloc_var("int32", init=T.truncdiv(kv_lo, block_N))
        end = T.alloc_var("int32", init=T.max(T.ceildiv(kv_hi, block_N), begin + 1))
        full_end = T.min(T.max(T.truncdiv(full_hi, block_N), begin), end)
        w.message[turn % 2, BATCH] = b
        w.message[turn % 2, HEAD] = h
        w.message[turn % 2, ROW] = row
        w.message[turn % 2, BEGIN] = begin
        w.message[turn % 2, END] = end
        w.message[turn % 2, RIGHT] = end - full_end
        w.message[turn % 2, LEFT] = T.min(T.max(T.ceildiv(full_lo, block_N), begin), full_end) - begin
        w.message[turn % 2, COUNT] = end - begin

    @T.macro
    def send(w, turn):
        """Hands the message over to all that wait for it in the leader, and to the follower."""
        T.barrier_arrive(w.message_ready[turn % 2])
        if cluster > 1:
            T.fence_proxy_async()
            T.copy_cluster(
                w.message[turn % 2, 0:FIELDS],
                w.message[turn % 2, 0:FIELDS],
                dst_block=FOLLOWER,
                remote_barrier=w.message_ready[turn % 2],
            )

    @T.macro
    def read_message(w, turn):
        """Waits for the next task and keeps it in registers."""
        T.barrier_wait(w.message_ready[turn % 2], (turn // 2) & 1)
        for field in T.unroll(FIELDS):
            w.task[field] = w.message[turn % 2, field]
        w.task[ROW] += w.rank * block_M
        if cluster > 1:
            T.mbarrier_arrive(w.message_free[turn % 2], LEADER)
        else:
            T.barrier_arrive(w.message_free[turn % 2])

    @T.macro
    def produce(arg, w):
        total = T.ceildiv(arg.seqlen_q, rows) * arg.batch * arg.heads
        tile = T.alloc_var("int32", init=w.block // cluster)
        turn = T.alloc_var("int32", init=0)
        step = T.alloc_var("int32", init=0)
        w.task[COUNT] = 1
        while w.task[COUNT] > 0:
            if w.rank == LEADER:
                T.barrier_wait(w.message_free[turn % 2], ((turn // 2) & 1) ^ 1)
                if w.thread == consumers:
                    if tile < total:
                        write_message(arg, w, turn, tile)
                    else:
                        w.message[turn % 2, COUNT] = 0
                    send(w, turn)
            read_message(w, turn)
            if w.task[COUNT] > 0:
                load(arg, w, turn, step)
                step += w.task[COUNT]
                turn += 1
                if w.rank == LEADER:
                    if (w.thread == consumers) & (w.ticket[0] == total - 1):
                        arg.tickets[0] = 0  # the last ticket: leave the queue as the next launch must find it
                    tile = T.shfl_sync(w.ticket[0], 0) + arg.blocks // cluster

    # --------------------------------------------------------------- consumers

    # What products of q and k are multiplied by.
    def scale_of(arg, w):
        return w.descaled[0] if fp8 else arg.scale

    # Scores are scaled by score_mod's kernel itself, otherwise within the softmax's exponent.
    def score_unit(arg, w):
        return softmax.LOG2E if traced.score is not None else scale_of(arg, w) * softmax.LOG2E

    def releases(w):
        """Whether a thread is the one of its warpgroup that says that a stage is free; in a cluster one per block."""
        return T.shuffle_elect(WARPGROUP) if cluster == 1 else w.thread % WARPGROUP < cluster

    def arrive_at_producers(w, barriers, stage):
        if cluster == 1:
            return T.barrier_arrive(barriers[stage])
        return T.mbarrier_arrive(barriers[stage], w.thread % WARPGROUP)

    @T.macro
    def release(w, barriers, stage):
        if releases(w):
            arrive_at_producers(w, barriers, stage)

    @T.macro
    def release_after_softmax(w, barriers, stage):
        """Releases K only now, on a condition that needs all weights although it always holds: no sum is negative.

        Otherwise ptxas moves the wait for P V, which follows, up in front of the exponentials that are meant to run at
        the same time as P V: it moves waits past arithmetic, but not past an arrival at a barrier.
        """
        softmax.lowest_sum(w.sums, w.lowest, consumers)
        # The sign bit rather than a comparison with 0: a NaN must not keep K for ever.
        if releases(w) & (T.reinterpret(w.lowest[w.thread], "int32") >= 0):
            arrive_at_producers(w, barriers, stage)

    @T.macro
    def wait_for_turn(w):
        if ping_pong:
            T.sync_threads(TURN + w.thread // WARPGROUP, 2 * WARPGROUP)

    @T.macro
    def end_turn(w):
        if ping_pong:
            T.named_barrier_arrive(TURN + (w.thread // WARPGROUP + 1) % warpgroups, 2 * WARPGROUP)

    @T.macro
    def multiply_qk(w, stage):
        if config.q_in_registers:
            T.wgmma_gemm(w.q_registers, w.k[stage, :, :], w.acc_s, transpose_B=True, clear_accum=True, policy=ROWS)
        else:
            T.wgmma_gemm(w.q, w.k[stage, :, :], w.acc_s, transpose_B=True, clear_accum=True, policy=ROWS)

    @T.macro
    def multiply_pv(w, stage):
        if fp8 and config.two_level:
            T.wgmma_gemm(w.weights, w.v[stage, :, :], w.product, transpose_B=True, clear_accum=True, policy=ROWS)
        elif fp8:
            T.wgmma_gemm(w.weights, w.v[stage, :, :], w.acc_o, transpose_B=True, policy=ROWS)
        else:
            T.wgmma_gemm(w.weights, w.v[stage, :, :], w.acc_o, policy=ROWS)

    @T.macro
    def wait_for_pv(w):
        T.wait_wgmma(0)
        if fp8 and config.two_level:
            T.warpgroup_fence_operand(w.product, num_regs=block_M * head_dim_v // consumers)
            softmax.add_product(w.acc_o, w.product, block_M, head_dim_v)
        else:
            T.warpgroup_fence_operand(w.acc_o, num_regs=block_M * head_dim_v // consumers)

    @T.macro
    def keep_weights(w):
        """The first operand of the next P V."""
        if fp8:
            softmax.to_fp8_weights(w.acc_s, w.weights, block_M, block_N)
        else:
            T.copy(w.acc_s, w.weights)

    @T.macro
    def take_tile(w, stage):
        """The copied tile to registers, under the product that makes the scores."""
        if copied is not None:
            T.copy(w.tile[stage, :, :], w.tile_registers)
            T.sync_warp()  # one lane answers for all
            if T.shuffle_elect(WARP):
                T.barrier_arrive(w.tile_free[stage])

    @T.macro
    def scores_to_weights(arg, w, k_lo, masked):
        b, h, row = w.task[BATCH], w.task[HEAD], w.task[ROW]
        emit = Emitter(arg.operands, {} if copied is None else {copied.text: w.tile_registers})
        visible = Visibility(traced, emit, arg.seqlen_k)
        q_lo = row + arg.seqlen_k - arg.seqlen_q
        c = score_unit(arg, w)
        if traced.score is not None:
            apply_score(w.acc_s, score, w.uniforms, emit, scale_of(arg, w), b, h, q_lo, k_lo, block_M, block_N)
        if masked:
            apply_mask(w.acc_s, visible, b, h, q_lo, k_lo, block_M, block_N)
        softmax.raise_maximum(w.acc_s, w.m, w.alpha, w.base, c, block_M, config.patience, shift)
        softmax.exponentials(w.acc_s, w.base, c, block_M, block_N)
        softmax.add_own_columns(w.acc_s, w.sums, w.alpha, block_M, block_N)

    @T.macro
    def store(arg, w):
        """O by way of shared memory, each warpgroup its own 64 rows; lse from registers."""
        b, h, row = w.task[BATCH], w.task[HEAD], w.task[ROW]
        group = w.thread // WARPGROUP
        T.tma_store_wait(0)  # the last tile's O has left the buffer
        T.sync_threads(WITHIN + group, WARPGROUP)
        T.copy(w.acc_o, w.o[0:block_M, 0:head_dim_v])
        T.fence_proxy_async()
        T.sync_threads(WITHIN + group, WARPGROUP)
        for p in T.unroll(head_dim_v // panel):
            T.tma_copy(
                w.o[group * 64 : group * 64 + 64, p * panel : p * panel + panel],
                arg.o[b, row + group * 64 : row + group * 64 + 64, h, p * panel : p * panel + panel],
                leader_scope_threads=WARPGROUP,
            )
        if call.return_lse:
            T.copy(w.l, arg.lse[b, h, row : row + block_M])
        if not output_apart:
            T.tma_store_wait(0)  # O lies where Q was
            T.barrier_arrive(w.q_free)

    @T.macro
    def advance(arg, w, n, k_lo, masked):
        """Scores of the K/V tile of use number n + 1, under whose softmax the values of tile n are added to O."""
        T.barrier_wait(w.k_ready[(n + 1) % stages], ((n + 1) // stages) & 1)
        wait_for_turn(w)
        multiply_qk(w, (n + 1) % stages)
        T.barrier_wait(w.v_ready[n % stages], (n // stages) & 1)
        multiply_pv(w, n % stages)
        end_turn(w)
        take_tile(w, (n + 1) % stages)
        T.wait_wgmma(1)
        T.warpgroup_fence_operand(w.acc_s, num_regs=block_M * block_N // consumers)
        if not config.late_release:
            release(w, w.k_free, (n + 1) % stages)
        scores_to_weights(arg, w, k_lo, masked)
        if config.late_release:
            release_after_softmax(w, w.k_free, (n + 1) % stages)
        wait_for_pv(w)
        release(w, w.v_free, n % stages)
        keep_weights(w)
        softmax.rescale_if_needed(w.acc_o, w.alpha, w.lowest, w.thread, block_M, head_dim_v, consumers)

    @T.macro
    def attend(arg, w, turn, step):
        """One tile of queries from its first product to the store of O."""
        begin, end, right, left = w.task[BEGIN], w.task[END], w.task[RIGHT], w.task[LEFT]
        masked = T.max(right + left, 1)
        if fp8:
            kv_h = T.truncdiv(w.task[HEAD], arg.heads_per_kv_head)
            w.descaled[0] = arg.scale * (arg.q_descale[w.task[BATCH], kv_h] * arg.k_descale[w.task[BATCH], kv_h])
            w.descaled[1] = arg.v_descale[w.task[BATCH], kv_h]
        if traced.score is not None:
            emit = Emitter(arg.operands)
            keep_uniforms(score, w.uniforms, emit, scale_of(arg, w), w.task[BATCH], w.task[HEAD])
        softmax.reset(w.m, w.l, w.acc_o)
        T.fill(w.sums, 0)
        T.barrier_wait(w.q_ready, turn & 1)
        if config.q_in_registers:
            T.copy(w.q, w.q_registers)
            if output_apart:
                T.barrier_arrive(w.q_free)
        T.barrier_wait(w.k_ready[step % stages], (step // stages) & 1)
        wait_for_turn(w)
        multiply_qk(w, step % stages)
        end_turn(w)
        take_tile(w, step % stages)
        T.wait_wgmma(0)
        T.warpgroup_fence_operand(w.acc_s, num_regs=block_M * block_N // consumers)
        release(w, w.k_free, step % stages)
        scores_to_weights(arg, w, tile_of_step(0, begin, end, right, left) * block_N, right + left > 0)
        keep_weights(w)
        if masks_inside:
            for j in T.serial(masked - 1):
                advance(arg, w, step + j, tile_of_step(j + 1, begin, end, right, left) * block_N, True)
        for j in T.serial(end - begin - masked):
            # Past the masked tiles; those at the left came before.
            advance(arg, w, step + masked - 1 + j, (end - 1 - (masked + j) + left) * block_N, False)
        n = step + end - begin - 1
        if output_apart and not config.q_in_registers:
            T.barrier_arrive(w.q_free)  # the next Q may come under the last product and the store of O
        T.barrier_wait(w.v_ready[n % stages], (n // stages) & 1)
        multiply_pv(w, n % stages)
        T.reduce_sum(w.sums, w.l, dim=1)
        if call.sink:
            sink = arg.sink[w.task[HEAD]] * softmax.LOG2E
            softmax.add_sink(w.m, w.l, w.alpha, w.base, sink, score_unit(arg, w), block_M, shift)
        else:
            T.fill(w.alpha, 1)
        wait_for_pv(w)
        release(w, w.v_free, n % stages)
        softmax.finish(w.l, w.base, w.alpha, w.acc_o, block_M, head_dim_v, w.descaled[1] if fp8 else None)
        store(arg, w)

    @T.macro
    def consume(arg, w):
        turn = T.alloc_var("int32", init=0)
        step = T.alloc_var("int32", init=0)
        if ping_pong:
            if w.thread < WARPGROUP:
                T.named_barrier_arrive(TURN, 2 * WARPGROUP)
        read_message(w, turn)
        while w.task[COUNT] > 0:
            attend(arg, w, turn, step)
            step += w.task[COUNT]
            turn += 1
            read_message(w, turn)
        T.tma_store_wait(0)

    # --------------------------------------------------------------- the block

    @T.macro
    def kernel(arg):
        with T.Kernel(
            arg.blocks, threads=consumers + WARPGROUP, cluster_dims=cluster if cluster > 1 else None
        ) as block:
            assume_aligned(arg.q.strides, arg.k.strides, arg.v.strides, itemsize=size)
            tile_shared, tile_free, tile_registers = None, None, None
            if copied is not None:
                assume_aligned(arg.operands[copied.name].strides, itemsize=copied_dtype.itemsize)
                kind = str(copied_dtype).removeprefix("torch.")
                tile_shared = T.alloc_shared([stages, block_M, block_N], kind)
                tile_free = T.alloc_barrier([consumers // WARP] * stages)
                tile_registers = T.alloc_fragment([block_M, block_N], kind)
            q_shared = T.alloc_shared([block_M, head_dim], dtype)
            k_shared = T.alloc_shared([stages, block_N, head_dim], dtype)
            v_shared = T.alloc_shared([stages, *v_tile], dtype)
            if output_apart:
                o_shared = T.alloc_shared([block_M, head_dim_v], out_dtype)
            else:
                o_shared = q_shared
            message = T.alloc_shared([2, FIELDS], "int32")
            thread = T.get_thread_binding()
            w = SimpleNamespace(
                q=q_shared,
                k=k_shared,
                v=v_shared,
                o=o_shared,
                message=message,
                task=T.alloc_local([FIELDS], "int32"),
                ticket=T.alloc_local([1], "int32"),
                block=block,
                rank=T.block_rank_in_cluster() if cluster > 1 else 0,
                thread=thread,
                message_ready=T.alloc_barrier([1] * 2),
                message_free=alloc_common_barrier([cluster * (consumers + WARP)] * 2),
                q_ready=T.alloc_barrier(WARP),
                q_free=T.alloc_barrier(consumers),
                k_ready=T.alloc_barrier([WARP] * stages),
                k_free=alloc_common_barrier([cluster * warpgroups] * stages),
                v_ready=T.alloc_barrier([WARP] * stages),
                v_free=alloc_common_barrier([cluster * warpgroups] * stages),
                acc_s=T.alloc_fragment([block_M, block_N], "float32"),
                weights=T.alloc_fragment([block_M, block_N], dtype),
                acc_o=T.alloc_fragment([block_M, head_dim_v], "float32"),
                m=T.alloc_fragment([block_M], "float32"),
                l=T.alloc_fragment([block_M], "float32"),
                alpha=T.alloc_fragment([block_M], "float32"),
                base=T.alloc_fragment([block_M], "float32"),
                sums=T.alloc_fragment([block_M, 4], "float32"),
                lowest=T.alloc_fragment([consumers], "float32"),
                q_registers=T.alloc_fragment([block_M, head_dim], dtype),
                tile=tile_shared,
                tile_free=tile_free,
                tile_registers=tile_registers,
                product=T.alloc_fragment([block_M, head_dim_v], "float32") if config.two_level else None,
                descaled=T.alloc_local([2], "float32") if fp8 else None,
                uniforms=score.allocate() if score is not None else None,
            )
            if config.q_in_registers:
                T.annotate_layout({w.q: make_swizzled_layout(w.q)})
            if copied is not None:
                T.annotate_layout({w.tile: tile_layout(w.tile, block_N * copied_dtype.itemsize)})
            T.annotate_layout({w.sums: softmax.own_columns_layout(block_M)})
            T.annotate_layout({w.lowest: softmax.per_thread_layout(consumers)})
            if thread >= consumers:
                T.set_max_nreg(config.producer_registers, 0)
                if thread < consumers + WARP:
                    produce(arg, w)
            else:
                T.set_max_nreg(config.consumer_registers(), 1)
                consume(arg, w)
            if cluster > 1:
                T.cluster_sync()  # a block must not leave while the other may still arrive on its barriers

    return kernel
