"""dq alone, Hopper schedule: without atomic operations, and so in a fixed order.

For ``deterministic=True``, and for head dims so wide that one kernel has no room for dk, dv and dq's sums (wide.py).
Each block owns one tile of 128 queries of one head. It loops over the tiles of keys that they may see. A block has

    two loading warps        one loads Q, then K tile by tile; the other dO, then V; by TMA
    one more loading warp    loads tiles of a bias, or of another tensor that a modification reads tile by tile
    two consumer warpgroups  own 64 queries each; they multiply (wgmma), and keep dQ in registers

One iteration of a consumer warpgroup, where j is the previous tile of keys. dQ is one tile late, so that the tensor
cores have work during the exponentials. During the rest they compute the other warpgroup's products:

    tensor cores  |  dQ += dS_j K_j  |  S = Q K_j+1^T  |   dP = dO V_j+1^T   |                      |  dQ += ...
    other units   |                  |                 |  P = exp2(S)        |  dS = P (dP - delta) |
    K barriers    |                  ^ready, ^free (j)
    V barriers    |                                    ^ready                ^free

S, P, dP and dS have queries in rows: dS is a first operand straight from registers, and every thread holds two numbers
of lse2 and two of delta. The warpgroups share only the stages of K and V, and never wait for each other.

With lists of tiles (tile_lists.py) the warps read the number of each tile of keys from the block's line, in which those
that need the mask come first.

Every buffer has two mbarriers, ``ready`` and ``free``, as in the forward schedule (forward/hopper/kernel.py). Masked
tiles, and tiles at the ends of queries or keys, take a branch that is uniform across threads. dQ is stored through the
shared memory of Q: each warpgroup reads, and then overwrites, only its own rows.

Blocks start with the last tiles of queries, which see the most keys under a causal mask. All sizes and strides are
run-time values. Limits: sm_90a, head dims up to 256, tensors whose rows begin at multiples of 16 bytes.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import tilelang.language as T

from .....call.facts import AttentionCall
from .....variant.program import Program
from ...architecture import panel
from ...tile import dropout
from ...tile.assume import assume_aligned, assume_filled
from ...tile.expressions import Emitter
from ...tile.hopper import WARP, WARPGROUP, slices
from ...tile.mask import keep_uniforms
from ...tile.matrices import accumulator_layout
from ...tile.softmax import ROWS
from .. import places, tile
from ..visible import Viewers
from .config import CONSUMERS, HopperQueriesConfig
from .copied_tile import alloc_tile, annotate, have_read, load_tile
from .plan import TilePlan
from .products import await_product, multiply_transposed
from .queries_task import BATCH, COUNT, FIRST, HEAD, ROW, find_task, key_of_step, mixed_tiles
from .roles import CONSUMER_REGISTERS, PRODUCER_REGISTERS, load_in_two_warps, place_of, take_part
from .scores import gradients_of_scores, scores_to_probabilities, settle, times_slope_in_place
from .stages import OneStage, Ring, loading_ring, release

# Named barriers; 0 is __syncthreads. Each warpgroup has its own: WITHIN, WITHIN + 1.
WITHIN = 1

# Indices of a warpgroup's state: stage and parity of K and of V; LAST is the stage of K that dQ still needs.
K_STAGE, K_PARITY, LAST, V_STAGE, V_PARITY = range(5)


class QueriesPlan(TilePlan):
    """The static facts of the kernel, from which its macros choose what they emit.

    Attributes:
        panel: the columns of dQ in one TMA store.
    """

    keys_first = False

    def __init__(self, call: AttentionCall, config: HopperQueriesConfig, traced: Program) -> None:
        super().__init__(call, config, traced)
        self.panel = panel(self.head_dim)

    def alloc_barriers(self) -> dict[str, Any]:
        """All barriers, by name, in one array; see tile/hopper.py."""
        return slices(
            T.alloc_barrier,
            {
                "q_ready": [WARP],
                "do_ready": [WARP],
                "k_ready": [WARP] * self.config.k_stages,
                "k_free": [2] * self.config.k_stages,
                "v_ready": [WARP] * self.config.v_stages,
                "v_free": [2] * self.config.v_stages,
                "tile_ready": [WARP] * self.config.tile_stages,
                "tile_free": [CONSUMERS // WARP] * self.config.tile_stages,
            },
        )

    def rings(self, at: Any) -> tuple[Ring, Ring, Ring]:
        """The rings of K, V and the copied tile, which shares the ring of K or of V."""
        k = Ring((at, K_STAGE), (at, K_PARITY), self.config.k_stages, "last", before=(at, LAST))
        kind = OneStage if self.config.v_stages == 1 else Ring
        v = kind((at, V_STAGE), (at, V_PARITY), self.config.v_stages, "last_v")
        return k, v, k if self.config.tile_stages == self.config.k_stages else v


# --- The warps of the producer warpgroup, which have few registers ---


@T.macro
def load_listed(plan, keys, b, key, kv_h, ring):
    """Copies the tile of K or V from `key` on, when its stage is free; `keys` as of :func:`load`."""
    T.barrier_wait(keys.free[ring.stage], ring.parity)
    T.tma_copy(
        keys.source[b, key : key + plan.block_N, kv_h, 0 : keys.head_dim],
        keys.tiles[ring.stage, :, :],
        barrier=keys.ready[ring.stage],
    )
    T.barrier_arrive(keys.ready[ring.stage])


@T.macro
def load(plan, arg, w, rows, rows_shared, rows_ready, keys):
    """Loads Q, then K tile by tile as stages become free; or dO, then V.

    Args:
        rows, rows_shared, rows_ready: q or do, its tile, and the tile's barriers.
        keys: for k or v: the `source`, its `tiles`, the number of `stages`, the barriers `ready` and `free`, and the
            `head_dim`.
    """
    rows_b, keys_b = (T.alloc_var("int32", init=T.min(w.task[BATCH], x.shape[0] - 1)) for x in (rows, keys.source))
    kv_h = T.alloc_var("int32", init=T.truncdiv(w.task[HEAD], arg.heads_per_kv_head))
    row, h = w.task[ROW], w.task[HEAD]
    T.tma_copy(rows[rows_b, row : row + plan.block_M, h, 0 : keys.head_dim], rows_shared, barrier=rows_ready[0])
    T.barrier_arrive(rows_ready[0])
    key = T.alloc_var("int32", init=w.task[FIRST] * plan.block_N)
    ring = loading_ring(keys.stages)
    if plan.listed:
        for j in T.serial(w.task[COUNT]):
            key = key_of_step(plan, arg, w, j)
            load_listed(plan, keys, keys_b, key, kv_h, ring)
            ring.advance()
    else:
        for _ in T.serial(w.task[COUNT]):
            T.barrier_wait(keys.free[ring.stage], ring.parity)
            T.tma_copy(
                keys.source[keys_b, key : key + plan.block_N, kv_h, 0 : keys.head_dim],
                keys.tiles[ring.stage, :, :],
                barrier=keys.ready[ring.stage],
            )
            T.barrier_arrive(keys.ready[ring.stage])
            key += plan.block_N
            ring.advance()


@T.macro
def load_tiles(plan, arg, w):
    """Loads the tiles of the copied tensor that a block of queries needs."""
    b, h = w.task[BATCH], w.task[HEAD]
    outer = [w.emit(index, b=b, h=h) for index in plan.copied.outer]
    row = T.alloc_var("int32", init=w.emit(plan.copied.row, b=b, h=h, q=w.task[ROW] + arg.seqlen_k - arg.seqlen_q))
    key = T.alloc_var("int32", init=w.task[FIRST] * plan.block_N)
    ring = loading_ring(plan.config.tile_stages)
    if plan.listed:
        for j in T.serial(w.task[COUNT]):
            key = key_of_step(plan, arg, w, j)
            load_tile(plan, arg, w, ring, (*outer, slice(row, row + plan.block_M), slice(key, key + plan.block_N)))
            ring.advance()
    else:
        for _ in T.serial(w.task[COUNT]):
            load_tile(plan, arg, w, ring, (*outer, slice(row, row + plan.block_M), slice(key, key + plan.block_N)))
            key += plan.block_N
            ring.advance()


# --- The consumer warpgroups ---


@T.macro
def take_tile(plan, w):
    """Waits for the copied tile, and loads it to registers during the products."""
    if plan.copied is not None:
        stage, parity = w.tile_ring.stage, w.tile_ring.parity
        T.barrier_wait(w.tile_ready[stage], parity)
        T.copy(w.tile[stage, :, :], w.tile_registers)


@T.macro
def release_tile(plan, w):
    if plan.copied is not None:
        T.sync_warp()  # one lane arrives for all
        if T.shuffle_elect(WARP) & have_read(w, plan.block_N):
            T.barrier_arrive(w.tile_free[w.tile_ring.stage])


@T.macro
def add_dq(w):
    T.wgmma_gemm(w.ds, w.k[w.at[LAST], :, :], w.acc_dq, policy=ROWS)


@T.macro
def probabilities(plan, w, scores):
    """P of a tile."""
    at = scores.held("b", "h", "row", "q_lo")
    scores_to_probabilities(plan, w, at, w.lse2)
    release_tile(plan, w)
    tile.mark_dropped(w.acc_s, at, True)
    for index in plan.kept:
        tile.weigh(w.kept[index], w.acc_s, at)


def scores_at(plan, w, k_lo, masked):
    """The tile of scores of the keys from `k_lo` on. masked: whether a listed tile needs the mask."""
    if not plan.listed:
        masked = (k_lo < w.full[0]) | (k_lo + plan.block_N > w.full[1])
    return w.scores.at(b=w.task[BATCH], h=w.task[HEAD], row=w.task[ROW], k_lo=k_lo, masked=masked)


@T.macro
def advance(plan, w, k_lo, follows, masked=None):
    """One iteration: the previous tile's part of dQ, if this tile `follows` another, and dS of this tile."""
    scores = scores_at(plan, w, k_lo, masked)
    if follows:
        add_dq(w)
    multiply_transposed(w.k_ready, w.k_ring, w.q, w.k[w.k_ring.stage, :, :], w.acc_s)
    multiply_transposed(w.v_ready, w.v_ring, w.do, w.v[w.v_ring.stage, :, :], w.acc_dp)
    take_tile(plan, w)
    if follows:
        await_product(w.acc_dq, 2)
        release(w, w.k_free, w.at[LAST])
    await_product(w.acc_s, 1)
    probabilities(plan, w, scores)
    if plan.config.settles:
        settle(w, plan.block_N)
    await_product(w.acc_dp, 0)
    release(w, w.v_free, w.v_ring.stage)
    at = scores.held("k_lo")
    gradients_of_scores(plan, w, at, w.delta, w.ds, lambda: times_slope_in_place(plan, w, at, w.ds))
    # The ring of K is now one tile ahead of dQ.
    w.k_ring.advance()
    w.v_ring.advance()


@T.macro
def store(plan, arg, w):
    """Stores dQ through shared memory, each warpgroup its own 64 rows."""
    b, h, row = w.task[BATCH], w.task[HEAD], w.task[ROW]
    group = w.thread // WARPGROUP
    for i, d in T.Parallel(plan.block_M, plan.head_dim):
        w.acc_dq[i, d] *= arg.scale
    T.sync_threads(WITHIN + group, WARPGROUP)  # all of the warpgroup have read its rows of Q
    T.copy(w.acc_dq, w.q)
    T.fence_proxy_async()
    T.sync_threads(WITHIN + group, WARPGROUP)
    for p in T.unroll(plan.head_dim // plan.panel):
        T.tma_copy(
            w.q[group * 64 : group * 64 + 64, p * plan.panel : p * plan.panel + plan.panel],
            arg.dq[b, row + group * 64 : row + group * 64 + 64, h, p * plan.panel : p * plan.panel + plan.panel],
            leader_scope_threads=WARPGROUP,
        )
    T.tma_store_wait(0)


@T.macro
def consume(plan, arg, w):
    b, h, row = w.task[BATCH], w.task[HEAD], w.task[ROW]
    if plan.listed:
        w.full[0] = mixed_tiles(arg, w)
    else:
        q_lo = row + arg.seqlen_k - arg.seqlen_q
        full_lo, full_hi = w.visible.full_range(b, h, q_lo, T.min(q_lo + plan.block_M, arg.seqlen_k) - 1)
        w.full[0] = w.uniform(full_lo)
        # If the tile ends beyond the last query, all its scores are masked: the modification may be NaN there.
        w.full[1] = w.uniform(T.if_then_else(row + plan.block_M > arg.seqlen_q, 0, full_hi))
    T.copy(arg.lse2[b, h, row : row + plan.block_M], w.lse2)
    T.copy(arg.delta[b, h, row : row + plan.block_M], w.delta)
    T.fill(w.acc_dq, 0)
    for i in T.unroll(5):
        w.at[i] = 0
    if plan.slopes is not None:
        keep_uniforms(plan.slopes, w.scores.registers, w.emit, arg.scale, b, h)
    if plan.call.dropout:
        dropout.enter_head(w.scores.pattern.words, arg, b, h)
    T.barrier_wait(w.q_ready[0], 0)
    T.barrier_wait(w.do_ready[0], 0)
    if plan.listed:
        key = T.alloc_var("int32", init=key_of_step(plan, arg, w, 0))
        advance(plan, w, key, False, 0 < w.full[0])
        for j in T.serial(w.task[COUNT] - 1):
            key = key_of_step(plan, arg, w, 1 + j)
            advance(plan, w, key, True, 1 + j < w.full[0])
    else:
        advance(plan, w, w.task[FIRST] * plan.block_N, False)
        for j in T.serial(w.task[COUNT] - 1):
            advance(plan, w, (w.task[FIRST] + 1 + j) * plan.block_N, True)
    add_dq(w)
    await_product(w.acc_dq, 0)
    store(plan, arg, w)


@T.macro
def produce(plan, arg, w, load_first, load_second):
    """The roles of the producer warps: two load, and one more loads the copied tensor's tiles."""
    load_in_two_warps(w, load_first, load_second)
    if plan.copied is not None:
        # Two nested conditions: TileLang counts a branch's threads, of which one copies, only by single conditions.
        if w.thread >= CONSUMERS + 2 * WARP:
            if w.thread < CONSUMERS + 3 * WARP:
                load_tiles(plan, arg, w)


def take_parts(plan: QueriesPlan, arg: Any, w: Any) -> None:
    """The roles of all warps."""
    k = SimpleNamespace(
        source=arg.k, tiles=w.k, stages=plan.config.k_stages, head_dim=plan.head_dim, ready=w.k_ready, free=w.k_free
    )
    v = SimpleNamespace(
        source=arg.v, tiles=w.v, stages=plan.config.v_stages, head_dim=plan.head_dim_v, ready=w.v_ready, free=w.v_free
    )

    def load_first() -> None:
        load(plan, arg, w, arg.q, w.q, w.q_ready, k)

    def load_second() -> None:
        load(plan, arg, w, arg.do, w.do, w.do_ready, v)

    def producers() -> None:
        produce(plan, arg, w, load_first, load_second)

    def consumers() -> None:
        consume(plan, arg, w)

    take_part(w, (PRODUCER_REGISTERS, CONSUMER_REGISTERS), producers, consumers)


def allocate(plan: QueriesPlan, arg: Any, at: Any, thread: Any) -> SimpleNamespace:
    """A block's tiles, barriers and numbers."""
    emit = Emitter(arg.operands)
    visible = Viewers(plan.traced, emit, arg.seqlen_q, arg.seqlen_k, plan.call.packed)
    w = SimpleNamespace(
        task=T.alloc_local([5], "int32"),
        emit=emit,
        visible=visible,
        # [block_M, head_dim]
        q=T.alloc_shared([plan.block_M, plan.head_dim], plan.dtype),
        # [block_M, head_dim_v]
        do=T.alloc_shared([plan.block_M, plan.head_dim_v], plan.dtype),
        # [k_stages, block_N, head_dim]
        k=T.alloc_shared([plan.config.k_stages, plan.block_N, plan.head_dim], plan.dtype),
        # [v_stages, block_N, head_dim_v]
        v=T.alloc_shared([plan.config.v_stages, plan.block_N, plan.head_dim_v], plan.dtype),
        # [block_M, block_N]
        acc_s=T.alloc_fragment(plan.score_tile, "float32"),
        acc_dp=T.alloc_fragment(plan.score_tile, "float32"),
        kept=[T.alloc_fragment(plan.score_tile, "float32") for _ in plan.kept],
        ds=T.alloc_fragment(plan.score_tile, plan.dtype),
        # [block_M, head_dim]
        acc_dq=T.alloc_fragment([plan.block_M, plan.head_dim], "float32"),
        # [block_M]
        lse2=T.alloc_fragment([plan.block_M], "float32"),
        delta=T.alloc_fragment([plan.block_M], "float32"),
        scores=tile.score_tile(
            plan, arg, emit, visible, plan.score_tile, keys_first=False, lengths=(arg.seqlen_q, arg.seqlen_k)
        ),
        at=T.alloc_local([5], "int32"),
        full=T.alloc_local([2], "int32"),
        thread=thread,
        uniform=at.uniform,
        **plan.alloc_barriers(),
    )
    w.k_ring, w.v_ring, w.tile_ring = plan.rings(w.at)
    return w


def body(call: AttentionCall, config: HopperQueriesConfig, traced: Program) -> Any:
    """The macro that emits the kernel, given its parameters (see ``signature.declare_queries``)."""
    plan = QueriesPlan(call, config, traced)

    @T.macro
    def kernel(arg):
        grid = places.blocks(arg, "seqlen_q", plan.block_M, arg.heads)
        with T.Kernel(grid, threads=CONSUMERS + WARPGROUP) as block:
            assume_filled(arg.operands)
            assume_aligned(arg.q.strides, arg.k.strides, arg.v.strides, arg.do.strides)
            at = places.find(arg, block, arg.heads, places.ROWS_BY_TMA)
            arg = at.arg
            # Each head starts with its last queries.
            mine = place_of(arg, at, "query_tiles", T.ceildiv(arg.seqlen_q, plan.block_M))
            thread = T.get_thread_binding()
            w = allocate(plan, arg, at, thread)
            find_task(plan, arg, at, mine, w)
            if plan.copied is not None:
                annotate(alloc_tile(plan, arg, w))
            T.annotate_layout({w.ds: accumulator_layout(plan.block_M, plan.block_N)})
            if plan.config.settles:
                T.annotate_layout({w.acc_s: accumulator_layout(plan.block_M, plan.block_N)})
            if at.exists:
                take_parts(plan, arg, w)

    return kernel
