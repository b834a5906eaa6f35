"""dk, dv and dq's sums, Hopper schedule: the backward pass of FlashAttention-3 (Shah et al. 2024, arXiv 2407.08608).

Each block owns one tile of 128 keys and values of one kv head. It loops over the query heads of the group and, for
each, over the tiles of queries that may see its keys. A block has

    two loading warps        one loads K and V, then Q with lse2 tile by tile; the other dO with delta; all by TMA
    two consumer warpgroups  own 64 keys each; they multiply (wgmma), and keep dK and dV in registers
    one adding warp          adds each tile of dQ to the float32 sums in memory, by TMA, which sums in the L2 cache
    one more loading warp    loads tiles of a bias, or of another tensor that a modification reads tile by tile

One iteration of a consumer warpgroup; the tensor cores start the next product before the last one's result is used:

    tensor cores  |  S = K Q^T  |  dP = V dO^T  |        |  dV += P dO  |  dQ = dS^T K  |  dK += dS Q  |
    other units   |             |  P = exp2(S)  |  dS = P (dP - delta)  |               |  dQ to shared memory
    barriers      ^q_ready      ^do_ready                               ^both have dS   ^do_free       ^q_free

S, P, dP and dS have keys in rows, so that P and dS are first operands straight from registers. dQ needs dS of all 128
keys: both warpgroups write theirs to shared memory, transposed (stmatrix), and wait for each other. With two buffers of
dS that is the only time they wait.

dQ is written out in the order of registers (dq_order.py), half a tile by each warpgroup: to shared memory, without bank
conflicts, and from there by one bulk reduction, which adds it to the sums. finish.py restores the order of q.

A bias's tile has queries in rows, as in memory, and is swizzled. With 16-bit elements it is loaded to registers during
S = K Q^T by ldmatrix, which transposes it; 32-bit elements are read where they are used. Neither has bank conflicts.
Its gradient takes the same way back: it is written to shared memory, transposed, after dV's product. The adding warp
stores it, or adds it to float32 sums if heads or batch elements share the bias. Batch elements that share a bias are
neighbours in the grid.

With lists of tiles (tile_lists.py) the warps read the number of each tile of queries from the block's line, in which
those that need the mask come first.

Every buffer has two mbarriers, ``ready`` and ``free``, as in the forward schedule (forward/hopper/kernel.py). Masked
tiles, and tiles at the ends of queries or keys, take a branch that is uniform across threads. Windows and documents
hide scores there by a bit for each (query_words.py).

Blocks start with the tiles of keys that most queries see under a causal mask. All sizes and strides are run-time
values. Limits: sm_90a, head dims up to 128, tensors whose rows begin at multiples of 16 bytes. Without dq, which
queries.py then computes, the head dims may be larger if their sum is at most 320: with 192 and 128, or 160 twice, the
warpgroups keep 160 registers of dK and dV, and take 32 queries at a time.
"""

from __future__ import annotations

from typing import Any

import tilelang
import tilelang.language as T

from .....call.facts import AttentionCall
from .....variant.program import Program
from ...tile import dropout
from ...tile.assume import assume_aligned, assume_filled
from ...tile.hopper import WARP, WARPGROUP
from ...tile.key_words import layouts
from ...tile.lists import tile_of_line
from ...tile.mask import keep_uniforms
from ...tile.matrices import accumulator_layout
from ...tile.softmax import ROWS
from .. import places, tile
from ..operand_gradients import BY_KEY, Path
from ..operand_stores import add_to_sums, to_elements, write_out_sums
from ..places import store_part
from .config import CONSUMERS, HopperBackwardConfig
from .copied_tile import (
    alloc_transposed_tile,
    have_read,
    load_tiles,
    release_tile,
    take_gradients,
    take_tile,
    write_out_gradient,
)
from .dq_sums import add_dq, add_half_of_dq, multiply_dq, share_ds, write_out_dq
from .loads import copy_keys, copy_rows, first_head, head_count, load_keys, load_rows, take_share
from .plan import (
    BATCH,
    DQ_PARITY,
    DS,
    DS_READ,
    DS_WRITTEN,
    KEY,
    KV_HEAD,
    PARTS,
    KeysPlan,
    Row,
    allocate,
)
from .products import await_product, multiply_transposed
from .query_words import find_ranges, has_bits_at, take_bits
from .roles import CONSUMER_REGISTERS, PRODUCER_REGISTERS, place_of, take_part
from .rows import find_line, find_rows
from .scores import gradients_of_scores, scores_to_probabilities
from .stages import release


@T.macro
def probabilities(plan, w, scores):
    """P of a tile, and the operand of dV's product."""
    at = scores.held("q_lo")
    scores_to_probabilities(plan, w, at, Row(w.lse2, w.ring.stage))
    if plan.copied is not None and (plan.tile_in_registers or not plan.tile_is_recomputed):
        release_tile(plan, w, have_read(w, plan.block_M))
    tile.mark_dropped(w.acc_s, at, True)
    tile.copy_kept(w.acc_s, w.p, at)
    for index in plan.kept:
        tile.weigh(w.kept[index], w.acc_s, at)


@T.macro
def tensor_gradients(plan, arg, w, scores):
    """The gradients of the tensors that the modification reads."""
    at = scores.held("b", "k_lo", "q_lo")
    for index, path in enumerate(plan.paths):
        if index == plan.leaving:
            continue
        factor = plan.slopes.program.loads[index]
        if factor.recomputed is not None:
            # In the registers of dP, which is no longer needed.
            tile.times_recomputed(w.acc_dp, tile.kept_product(factor, w.kept, w.acc_s), factor.recomputed, scores)
        gradient = w.acc_dp if factor.recomputed is not None else tile.kept_product(factor, w.kept, w.acc_s)
        if path.way == BY_KEY:
            add_to_sums(gradient, w.tile_sum, w.sums[plan.sums_by_key[index]], plan.block_N)
        else:
            to_elements(gradient, arg.written_out[index], path, at)


@T.macro
def times_slope(plan, arg, w, scores):
    """The gradients of tensors; then dS of the scaled scores, from dS of the modified ones."""
    tensor_gradients(plan, arg, w, scores)
    slope = plan.slopes.program.slope
    if slope.recomputed is not None:
        tile.times_recomputed(w.acc_dp, tile.kept_product(slope, w.kept, w.acc_s), slope.recomputed, scores)
    T.copy(w.acc_dp if slope.recomputed is not None else tile.kept_product(slope, w.kept, w.acc_s), w.ds)


@T.macro
def next_stage(plan, w):
    w.ring.advance()
    if plan.config.ds_buffers > 1:
        w.at[DS] = w.at[DS] ^ 1
    w.at[DQ_PARITY] = w.at[DQ_PARITY] ^ 1


def scores_at(plan, arg, w, h, row, masked, step):
    """The tile of scores of a head's queries from `row` on.

    Args:
        masked: whether a listed tile needs the mask.
        step: its number in the line.
    """
    if not plan.listed:
        masked = (row < w.rows[2]) | (row + plan.block_M > w.rows[3])
    return w.scores.at(
        b=w.task[BATCH],
        h=h,
        row=row,
        k_lo=w.task[KEY],
        masked=masked,
        has_bits=has_bits_at(plan, arg, w, step),
    )


@T.macro
def advance(plan, arg, w, h, row, masked=None, step=None):
    """One iteration: a tile of queries."""
    take_bits(plan, arg, w, masked, step)
    scores = scores_at(plan, arg, w, h, row, masked, step)
    multiply_transposed(w.q_ready, w.ring, w.k, w.q[w.ring.stage, :, :], w.acc_s)
    if plan.config.late_dp:
        take_tile(plan, w)
        await_product(w.acc_s, 0)
        probabilities(plan, w, scores)
        multiply_transposed(w.do_ready, w.ring, w.v, w.do[w.ring.stage, :, :], w.acc_dp)
    else:
        multiply_transposed(w.do_ready, w.ring, w.v, w.do[w.ring.stage, :, :], w.acc_dp)
        take_tile(plan, w)
        await_product(w.acc_s, 1)
        probabilities(plan, w, scores)
    await_product(w.acc_dp, 0)
    delta = Row(w.delta, w.ring.stage)
    gradients_of_scores(plan, w, scores, delta, w.ds, lambda: times_slope(plan, arg, w, scores))
    if plan.tile_is_recomputed and not plan.tile_in_registers and plan.leaving is None:
        release_tile(plan, w)
    if plan.config.stores_first:
        share_ds(plan, w)
    T.wgmma_gemm(w.p, w.do[w.ring.stage, :, :], w.acc_dv, policy=ROWS)
    if plan.leaving is not None:
        write_out_gradient(plan, w, scores)
    if plan.adds_dq:
        if plan.config.ds_buffers == 1:
            T.sync_threads(DS_READ, CONSUMERS)
        if not plan.config.stores_first:
            share_ds(plan, w)
        T.fence_proxy_async()
        T.sync_threads(DS_WRITTEN, CONSUMERS)
        multiply_dq(plan, w)
        await_product(w.acc_dv, 1)
        release(w, w.do_free, w.ring.stage)
        T.wgmma_gemm(w.ds, w.q[w.ring.stage, :, :], w.acc_dk, policy=ROWS)
        await_product(w.acc_dq, 1)
        write_out_dq(plan, w)
    else:
        T.wgmma_gemm(w.ds, w.q[w.ring.stage, :, :], w.acc_dk, policy=ROWS)
        await_product(w.acc_dv, 1)
        release(w, w.do_free, w.ring.stage)
    await_product(w.acc_dk, 0)
    release(w, w.q_free, w.ring.stage)
    next_stage(plan, w)


@T.macro
def store(plan, arg, w):
    """Stores dK and dV; of a share of the heads, its float32 parts."""
    for i, d in T.Parallel(plan.block_N, plan.head_dim):
        w.acc_dk[i, d] *= arg.scale
    if plan.call.dropout:
        for i, d in T.Parallel(plan.block_N, plan.head_dim_v):
            w.acc_dv[i, d] *= arg.weight
    if plan.split:
        store_part(w.acc_dv, arg.dv, plan.call.head_dim_v, w.task[BATCH], w.task[KEY], w.share[PARTS], arg.seqlen_k)
        store_part(w.acc_dk, arg.dk, plan.call.head_dim, w.task[BATCH], w.task[KEY], w.share[PARTS], arg.seqlen_k)
    else:
        store_sums(plan, arg, w)


@T.macro
def store_sums(plan, arg, w):
    """Stores dK and dV, through the shared memory of K and V."""
    T.sync_threads(DS_WRITTEN, CONSUMERS)  # K and V have been read by both
    T.copy(w.acc_dv, w.v)
    T.copy(w.acc_dk, w.k)
    T.fence_proxy_async()
    T.sync_threads(DS_WRITTEN, CONSUMERS)
    group = w.thread // WARPGROUP
    if group == 0:
        T.tma_copy(
            w.v,
            arg.dv[w.task[BATCH], w.task[KEY] : w.task[KEY] + plan.block_N, w.task[KV_HEAD], 0 : plan.head_dim_v],
            leader_scope_threads=WARPGROUP,
        )
    else:
        T.tma_copy(
            w.k,
            arg.dk[w.task[BATCH], w.task[KEY] : w.task[KEY] + plan.block_N, w.task[KV_HEAD], 0 : plan.head_dim],
            leader_scope_threads=WARPGROUP,
        )
    T.tma_store_wait(0)


@T.macro
def consume(plan, arg, w):
    T.fill(w.acc_dv, 0)
    T.fill(w.acc_dk, 0)
    for i in T.unroll(3):
        w.at[i] = 0
    w.at[DQ_PARITY] = 1  # a fresh barrier lets this parity pass
    if plan.keeps_ranges and not w.visible.differ_by_head:
        find_ranges(w, 0)
    T.barrier_wait(w.kv_ready[0], 0)
    for g in T.serial(head_count(plan, arg, w)):
        h = first_head(plan, arg, w) + g
        if plan.listed:
            find_line(plan, arg, w, h)
        else:
            find_rows(plan, w, h)
        if plan.keeps_ranges and w.visible.differ_by_head:
            find_ranges(w, h)
        if plan.slopes is not None:
            keep_uniforms(plan.slopes, w.scores.registers, w.emit, arg.scale, w.task[BATCH], h)
        if plan.call.dropout:
            dropout.enter_head(w.scores.pattern.words, arg, w.task[BATCH], h)
        for number in plan.sums_by_key.values():
            T.fill(w.sums[number], 0)
        if plan.listed:
            for step in T.serial(w.rows[1]):
                row = T.alloc_var("int32", init=tile_of_line(arg, w.rows[0], step) * plan.block_M)
                advance(plan, arg, w, h, row, step < w.rows[2], step)
        else:
            for number in T.serial(w.rows[0], w.rows[1]):
                advance(plan, arg, w, h, number * plan.block_M)
        for index, number in plan.sums_by_key.items():
            write_out_sums(w.sums[number], arg.written_out[index], w.task[BATCH], h, w.task[KEY], plan.block_N)
    store(plan, arg, w)


@T.macro
def produce(plan, arg, w, load_first, load_second):
    """The roles of the producer warps: two load, one adds, and one loads the copied tensor's tiles."""
    if w.thread < CONSUMERS + WARP:
        load_first()
    elif w.thread < CONSUMERS + 2 * WARP:
        load_second()
    elif w.thread < CONSUMERS + 3 * WARP:
        if plan.adds_dq and plan.config.adders == 2:
            add_half_of_dq(plan, arg, w, 0)
        elif plan.adds_dq:
            add_dq(plan, arg, w)
        elif plan.leaving is not None:
            take_gradients(plan, arg, w)
    elif plan.copied is not None:
        load_tiles(plan, arg, w)
    elif plan.adds_dq and plan.config.adders == 2:
        add_half_of_dq(plan, arg, w, 1)


def take_parts(plan: KeysPlan, arg: Any, w: Any) -> None:
    """The roles of all warps."""

    def copy_queries(at: Any) -> None:
        copy_rows(plan, w, arg.q, w.q, plan.head_dim, arg.lse2, w.lse2, w.q_ready, at)

    def copy_gradients(at: Any) -> None:
        copy_rows(plan, w, arg.do, w.do, plan.head_dim_v, arg.delta, w.delta, w.do_ready, at)

    def load_first() -> None:
        load_keys(arg, w, lambda k_b, v_b: copy_keys(plan, arg, w, k_b, v_b))
        load_rows(plan, arg, w, arg.q, w.q_ready, w.q_free, copy_queries, plan.stages)

    def load_second() -> None:
        load_rows(plan, arg, w, arg.do, w.do_ready, w.do_free, copy_gradients, plan.stages)

    def producers() -> None:
        produce(plan, arg, w, load_first, load_second)

    def consumers() -> None:
        consume(plan, arg, w)

    take_part(w, (PRODUCER_REGISTERS, CONSUMER_REGISTERS), producers, consumers)


def body(
    call: AttentionCall, config: HopperBackwardConfig, traced: Program, paths: tuple[Path, ...], adds_dq: bool
) -> Any:
    """The macro that emits the kernel, given its parameters (see ``signature.declare_main``).

    Args: see :func:`generic.body`.
    """
    plan = KeysPlan(call, config, traced, paths, adds_dq)

    @T.macro
    def kernel(arg):
        grid = places.blocks(arg, "seqlen_k", plan.block_N, arg.share_heads)
        with T.Kernel(grid, threads=CONSUMERS + WARPGROUP) as block:
            assume_filled(arg.operands)
            assume_aligned(arg.q.strides, arg.k.strides, arg.v.strides, arg.do.strides)
            at = places.find(arg, block, arg.share_heads, places.BY_TMA_BUT_PARTS if plan.split else places.BY_TMA)
            arg = at.arg
            mine = place_of(arg, at, "key_tiles", T.ceildiv(arg.seqlen_k, plan.block_N))
            thread = T.get_thread_binding()
            w = allocate(plan, arg, at, thread)
            if plan.copied is not None:
                alloc_transposed_tile(plan, arg, w)
            if plan.batch_first:
                w.task[BATCH] = T.truncmod(mine.pair, arg.batch)
                w.task[KV_HEAD] = T.truncdiv(mine.pair, arg.batch)
            else:
                w.task[BATCH] = at.uniform(at.number(mine.pair))
                w.task[KV_HEAD] = at.uniform(T.truncmod(mine.pair, arg.share_heads))
            if plan.split:
                take_share(arg, w)
            w.task[KEY] = at.uniform(T.truncdiv(mine.place, mine.side) * plan.block_N)
            T.annotate_layout({w.ds: accumulator_layout(plan.block_N, plan.block_M), **layouts(w.query_words)})
            if adds_dq:
                T.annotate_layout({w.dq_sum: tilelang.layout.make_linear_layout(w.dq_sum)})
            if at.exists:
                take_parts(plan, arg, w)

    return kernel
