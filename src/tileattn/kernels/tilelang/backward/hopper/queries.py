"""dq alone, Hopper schedule: without atomic operations, and so in a fixed order.

For ``deterministic=True``, and for head dims so wide that dk, dv and dq's sums do not fit into one kernel together
(wide.py). Each block owns one tile of 128 queries of one head, and walks over the tiles of keys that the mask
lets it see. In a block

    two loading warps        bring Q and dO, and then, tile by tile, one warp K and the other V, by TMA;
    one more loading warp    brings a bias's tiles, or those of another tensor that a modification reads tile by tile;
    two consumer warpgroups  own 64 queries each: they multiply (wgmma), and keep dQ in registers.

One iteration of a consumer warpgroup, j being the tile of keys before. dQ comes one tile late, so that the tensor cores
have work under the exponentials; the other warpgroup's products run under the rest:

    tensor cores  |  dQ += dS_j K_j  |  S = Q K_j+1^T  |   dP = dO V_j+1^T   |                      |  dQ += ...
    other units   |                  |                 |  P = exp2(S)        |  dS = P (dP - delta) |
    K barriers    |                  ^ready, ^free (j)
    V barriers    |                                    ^ready                ^free

S, P, dP and dS have queries in rows: dS is a first operand as it lies in registers, and lse2 and delta are two numbers
each in every thread. The warpgroups share nothing but the stages of K and V, and never wait for each other.

Every buffer has two mbarriers, ``ready`` and ``free``, as in the forward schedule (forward/hopper/kernel.py). Masked
tiles, and tiles over the ends of queries or keys, take a branch that all threads agree on. dQ leaves through shared
memory, where Q was: each warpgroup reads, and then overwrites, its own rows only.

Blocks start with the last tiles of queries, which a causal mask makes longest. All sizes and strides are run-time
values. Limits: sm_90a, head dims up to 256, tensors whose rows begin at multiples of 16 bytes.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import tilelang.language as T
from tilelang.language.eager.builder import Builder

from .....call.facts import AttentionCall
from .....variant.program import Program
from ...architecture import padded, panel
from ...tile import dropout, softmax
from ...tile.assume import assume_aligned, assume_filled
from ...tile.expressions import Emitter
from ...tile.hopper import WARP, WARPGROUP, slices, tile_layout
from ...tile.mask import keep_uniforms
from ...tile.softmax import ROWS
from .. import places, tile
from ..visible import Viewers
from .config import CONSUMERS, HopperQueriesConfig
from .keys import CONSUMER_REGISTERS, PRODUCER_REGISTERS, have_read, release
from .layouts import accumulator_layout

# Named barriers; 0 is __syncthreads. Each warpgroup has one for itself.
WITHIN = 1

# The block's task: a tile of queries, by its first, of one head of one batch element, and which tiles of keys it sees.
BATCH, HEAD, ROW, FIRST, COUNT = range(5)

# Where a warpgroup stands in the stages of K and V; LAST is the stage of the K that dQ still needs.
K_STAGE, K_PARITY, LAST, V_STAGE, V_PARITY = range(5)


class Plan:
    """The static facts of one kernel, from which its macros choose what they emit.

    Attributes:
        slopes: the score modification and its slope, or None.
        early: indices of the derivatives that are kept beside the scores.
        copied: the tile load whose tiles, such as a bias's, are copied, or None; and its dtype.
        copied_once: whether nobody else reads these tiles, so that they need not stay in the L2 cache.
        panel: columns of dQ that one TMA store takes.
    """

    def __init__(self, call: AttentionCall, config: HopperQueriesConfig, traced: Program) -> None:
        self.call, self.config, self.traced = call, config, traced
        self.block_M, self.block_N = config.block_M, config.block_N
        self.head_dim, self.head_dim_v = padded(call.head_dim), padded(call.head_dim_v)
        self.dtype = str(call.dtype).removeprefix("torch.")
        self.slopes = tile.Slopes(call, traced, ()) if traced.score is not None else None
        self.early = tuple(range(len(self.slopes.program.early))) if self.slopes else ()
        self.copied, self.copied_dtype = config.copied(call) or (None, None)
        self.copied_once = self.copied is not None and all(map(self.copied.differs_by, "hb"))
        self.panel = panel(self.head_dim)

    def alloc_barriers(self) -> dict[str, Any]:
        """All barriers, by name, in one array; see forward/hopper/plan.py."""
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


# --- The warps of the producer warpgroup, which have few registers ---


@T.macro
def load(plan, arg, w, rows, rows_shared, rows_ready, keys, tiles, stages, head_dim, ready, free):
    """Q, then K tile by tile as stages become free; or dO, then V."""
    rows_b, keys_b = (T.alloc_var("int32", init=T.min(w.task[BATCH], x.shape[0] - 1)) for x in (rows, keys))
    kv_h = T.alloc_var("int32", init=T.truncdiv(w.task[HEAD], arg.heads_per_kv_head))
    row, h = w.task[ROW], w.task[HEAD]
    T.tma_copy(rows[rows_b, row : row + plan.block_M, h, 0:head_dim], rows_shared, barrier=rows_ready[0])
    T.barrier_arrive(rows_ready[0])
    key = T.alloc_var("int32", init=w.task[FIRST] * plan.block_N)
    stage = T.alloc_var("int32", init=0)
    parity = T.alloc_var("int32", init=1)  # a fresh barrier lets this parity pass
    for _ in T.serial(w.task[COUNT]):
        T.barrier_wait(free[stage], parity)
        T.tma_copy(keys[keys_b, key : key + plan.block_N, kv_h, 0:head_dim], tiles[stage, :, :], barrier=ready[stage])
        T.barrier_arrive(ready[stage])
        key += plan.block_N
        parity = T.if_then_else(stage == stages - 1, parity ^ 1, parity)
        stage = T.if_then_else(stage == stages - 1, 0, stage + 1)


@T.macro
def load_tiles(plan, arg, w):
    """The scores' tiles of the copied tensor. What lies beyond its edges is 0."""
    b, h = w.task[BATCH], w.task[HEAD]
    outer = [w.emit(index, b=b, h=h) for index in plan.copied.outer]
    row = T.alloc_var("int32", init=w.emit(plan.copied.row, b=b, h=h, q=w.task[ROW] + arg.seqlen_k - arg.seqlen_q))
    key = T.alloc_var("int32", init=w.task[FIRST] * plan.block_N)
    stage = T.alloc_var("int32", init=0)
    parity = T.alloc_var("int32", init=1)  # a fresh barrier lets this parity pass
    last = plan.config.tile_stages - 1
    for _ in T.serial(w.task[COUNT]):
        T.barrier_wait(w.tile_free[stage], parity)
        T.tma_copy(
            arg.operands[plan.copied.name][(*outer, slice(row, row + plan.block_M), slice(key, key + plan.block_N))],
            w.tile[stage, :, :],
            barrier=w.tile_ready[stage],
            eviction_policy="evict_first" if plan.copied_once else None,
        )
        T.barrier_arrive(w.tile_ready[stage])
        key += plan.block_N
        parity = T.if_then_else(stage == last, parity ^ 1, parity)
        stage = T.if_then_else(stage == last, 0, stage + 1)


# --- The consumer warpgroups ---


def alloc_tile(plan, arg, w):
    """The copied tile's stages in shared memory, and its elements in registers."""
    assume_aligned(arg.operands[plan.copied.name].strides, itemsize=plan.copied_dtype.itemsize)
    kind = str(plan.copied_dtype).removeprefix("torch.")
    w.tile = T.alloc_shared([plan.config.tile_stages, plan.block_M, plan.block_N], kind)
    w.tile_registers = T.alloc_fragment([plan.block_M, plan.block_N], kind)
    w.emit.tiles[plan.copied.text] = w.tile_registers
    layouts = {
        w.tile: tile_layout(w.tile, plan.block_N * plan.copied_dtype.itemsize),
        w.acc_s: accumulator_layout(plan.block_M, plan.block_N),  # for single elements of it (`have_read`)
    }
    Builder.current().eval(T.annotate_layout(layouts))


@T.macro
def take_tile(plan, w):
    """The copied tile to registers, under the products."""
    if plan.copied is not None:
        stage, parity = tile_stage(plan, w)
        T.barrier_wait(w.tile_ready[stage], parity)
        T.copy(w.tile[stage, :, :], w.tile_registers)


def tile_stage(plan, w):
    """Of the copied tile, and the parity of its use: it goes with K, or with V."""
    with_k = plan.config.tile_stages == plan.config.k_stages
    return (w.at[K_STAGE], w.at[K_PARITY]) if with_k else (w.at[V_STAGE], w.at[V_PARITY])


@T.macro
def release_tile(plan, w):
    if plan.copied is not None:
        T.sync_warp()  # one lane answers for all
        if T.shuffle_elect(WARP) & have_read(w, plan.block_N):
            T.barrier_arrive(w.tile_free[tile_stage(plan, w)[0]])


@T.macro
def await_product(plan, fragment, in_flight, columns):
    """Until only so many products are in flight; the fragment's registers are then its result."""
    T.wait_wgmma(in_flight)
    T.warpgroup_fence_operand(fragment, num_regs=plan.block_M * columns // CONSUMERS)


@T.macro
def multiply_scores(plan, w):
    T.barrier_wait(w.k_ready[w.at[K_STAGE]], w.at[K_PARITY])
    T.wgmma_gemm(w.q, w.k[w.at[K_STAGE], :, :], w.acc_s, transpose_B=True, clear_accum=True, policy=ROWS)


@T.macro
def multiply_dp(plan, w):
    T.barrier_wait(w.v_ready[w.at[V_STAGE]], w.at[V_PARITY])
    T.wgmma_gemm(w.do, w.v[w.at[V_STAGE], :, :], w.acc_dp, transpose_B=True, clear_accum=True, policy=ROWS)


@T.macro
def add_dq(plan, w):
    T.wgmma_gemm(w.ds, w.k[w.at[LAST], :, :], w.acc_dq, policy=ROWS)


@T.macro
def scores_to_probabilities(plan, arg, w, k_lo):
    b, h, row = w.task[BATCH], w.task[HEAD], w.task[ROW]
    q_lo = row + arg.seqlen_k - arg.seqlen_q
    c = arg.scale * softmax.LOG2E if plan.slopes is None else 1.0
    if plan.slopes is not None:
        tile.modify(
            w.acc_s, w.early, plan.slopes, w.uniforms, w.emit, arg.scale, b, h, q_lo, k_lo,
            plan.block_M, plan.block_N, False,
        )  # fmt: skip
    if (k_lo < w.full[0]) | (k_lo + plan.block_N > w.full[1]):
        tile.hide(w.acc_s, w.visible, b, h, q_lo, k_lo, plan.block_M, plan.block_N, False)
    tile.probabilities(w.acc_s, w.lse2, c, plan.block_M, plan.block_N, False)
    release_tile(plan, w)
    tile.mark_dropped(w.acc_s, w.pattern, row, k_lo, plan.block_M, plan.block_N, False, True)
    for index in plan.early:
        tile.weigh(w.early[index], w.acc_s, plan.block_M, plan.block_N)


@T.macro
def gradients_of_scores(plan, arg, w, k_lo):
    """dS, of the scaled scores, in 16 bits."""
    tile.drop_gradients(w.acc_s, w.acc_dp, w.pattern, plan.block_M, plan.block_N, False)
    if plan.slopes is None:
        for i, j in T.Parallel(plan.block_M, plan.block_N):
            w.ds[i, j] = w.acc_s[i, j] * (w.acc_dp[i, j] - w.delta[i])
    else:
        slope = plan.slopes.program.slope
        gradient = tile.kept(slope, w.early, w.acc_s)
        tile.score_gradients(gradient, w.acc_dp, w.delta, plan.block_M, plan.block_N, False)
        if slope.late is not None:
            tile.times_late(
                gradient, gradient, slope.late, plan.slopes, w.uniforms, w.emit, arg.scale, w.task[BATCH],
                w.task[HEAD], w.task[ROW] + arg.seqlen_k - arg.seqlen_q, k_lo, plan.block_M, plan.block_N, False,
            )  # fmt: skip
        T.copy(gradient, w.ds)


@T.macro
def next_stages(plan, w):
    """K, once used, is one tile ahead of dQ."""
    w.at[LAST] = w.at[K_STAGE]
    last = w.at[LAST] == plan.config.k_stages - 1
    w.at[K_PARITY] = T.if_then_else(last, w.at[K_PARITY] ^ 1, w.at[K_PARITY])
    w.at[K_STAGE] = T.if_then_else(last, 0, w.at[LAST] + 1)
    if plan.config.v_stages == 1:
        w.at[V_PARITY] = w.at[V_PARITY] ^ 1
    else:
        last_v = w.at[V_STAGE] == plan.config.v_stages - 1
        w.at[V_PARITY] = T.if_then_else(last_v, w.at[V_PARITY] ^ 1, w.at[V_PARITY])
        w.at[V_STAGE] = T.if_then_else(last_v, 0, w.at[V_STAGE] + 1)


@T.macro
def first_tile(plan, arg, w, k_lo):
    multiply_scores(plan, w)
    multiply_dp(plan, w)
    take_tile(plan, w)
    await_product(plan, w.acc_s, 1, plan.block_N)
    scores_to_probabilities(plan, arg, w, k_lo)
    await_product(plan, w.acc_dp, 0, plan.block_N)
    release(w, w.v_free, w.at[V_STAGE])
    gradients_of_scores(plan, arg, w, k_lo)
    next_stages(plan, w)


@T.macro
def advance(plan, arg, w, k_lo):
    """dQ from the last tile of keys, and dS of the next."""
    add_dq(plan, w)
    multiply_scores(plan, w)
    multiply_dp(plan, w)
    take_tile(plan, w)
    await_product(plan, w.acc_dq, 2, plan.head_dim)
    release(w, w.k_free, w.at[LAST])
    await_product(plan, w.acc_s, 1, plan.block_N)
    scores_to_probabilities(plan, arg, w, k_lo)
    await_product(plan, w.acc_dp, 0, plan.block_N)
    release(w, w.v_free, w.at[V_STAGE])
    gradients_of_scores(plan, arg, w, k_lo)
    next_stages(plan, w)


@T.macro
def store(plan, arg, w):
    """dQ by way of shared memory, each warpgroup its own 64 rows."""
    b, h, row = w.task[BATCH], w.task[HEAD], w.task[ROW]
    group = w.thread // WARPGROUP
    for i, d in T.Parallel(plan.block_M, plan.head_dim):
        w.acc_dq[i, d] *= arg.scale
    T.sync_threads(WITHIN + group, WARPGROUP)  # all of the warpgroup have done with its rows of Q
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
    q_lo = row + arg.seqlen_k - arg.seqlen_q
    full_lo, full_hi = w.visible.full_range(b, h, q_lo, T.min(q_lo + plan.block_M, arg.seqlen_k) - 1)
    w.full[0] = w.uniform(full_lo)
    # Tiles over the last query are masked as a whole: the modification of what lies there may be anything.
    w.full[1] = w.uniform(T.if_then_else(row + plan.block_M > arg.seqlen_q, 0, full_hi))
    T.copy(arg.lse2[b, h, row : row + plan.block_M], w.lse2)
    T.copy(arg.delta[b, h, row : row + plan.block_M], w.delta)
    T.fill(w.acc_dq, 0)
    for i in T.unroll(5):
        w.at[i] = 0
    if plan.slopes is not None:
        keep_uniforms(plan.slopes, w.uniforms, w.emit, arg.scale, b, h)
    if plan.call.dropout:
        dropout.enter_head(w.pattern.words, arg, b, h)
    T.barrier_wait(w.q_ready[0], 0)
    T.barrier_wait(w.do_ready[0], 0)
    first_tile(plan, arg, w, w.task[FIRST] * plan.block_N)
    for j in T.serial(w.task[COUNT] - 1):
        advance(plan, arg, w, (w.task[FIRST] + 1 + j) * plan.block_N)
    add_dq(plan, w)
    await_product(plan, w.acc_dq, 0, plan.head_dim)
    store(plan, arg, w)


@T.macro
def take_part(plan, arg, w):
    """Each warp in its role."""
    if w.thread >= CONSUMERS:
        T.set_max_nreg(PRODUCER_REGISTERS, 0)
        if w.thread < CONSUMERS + WARP:
            load(
                plan, arg, w, arg.q, w.q, w.q_ready,
                arg.k, w.k, plan.config.k_stages, plan.head_dim, w.k_ready, w.k_free,
            )  # fmt: skip
        elif w.thread < CONSUMERS + 2 * WARP:
            load(
                plan, arg, w, arg.do, w.do, w.do_ready,
                arg.v, w.v, plan.config.v_stages, plan.head_dim_v, w.v_ready, w.v_free,
            )  # fmt: skip
        if plan.copied is not None:
            # Two conditions, for TileLang counts a branch's threads, of which one copies, by single ones.
            if w.thread >= CONSUMERS + 2 * WARP:
                if w.thread < CONSUMERS + 3 * WARP:
                    load_tiles(plan, arg, w)
    else:
        T.set_max_nreg(CONSUMER_REGISTERS, 1)
        consume(plan, arg, w)


def body(call: AttentionCall, config: HopperQueriesConfig, traced: Program) -> Any:
    """The macro that emits the kernel, given its parameters (see ``signature.declare_queries``)."""
    plan = Plan(call, config, traced)

    @T.macro
    def kernel(arg):
        grid = places.blocks(arg, "seqlen_q", plan.block_M, arg.heads)
        with T.Kernel(grid, threads=CONSUMERS + WARPGROUP) as block:
            assume_filled(arg.operands)
            assume_aligned(arg.q.strides, arg.k.strides, arg.v.strides, arg.do.strides)
            at = places.find(arg, block, arg.heads, places.ROWS_BY_TMA)
            arg = at.arg
            query_tiles, side = T.ceildiv(arg.seqlen_q, plan.block_M), arg.side_by_side
            # `side` heads side by side, each beginning with its last queries.
            turn, place = T.truncdiv(at.block, side * query_tiles), T.truncmod(at.block, side * query_tiles)
            pair = T.alloc_var("int32", init=turn * side + T.truncmod(place, side))
            emit = Emitter(arg.operands)
            score_tile = [plan.block_M, plan.block_N]
            thread = T.get_thread_binding()
            w = SimpleNamespace(
                task=T.alloc_local([5], "int32"),
                emit=emit,
                visible=Viewers(traced, emit, arg.seqlen_q, arg.seqlen_k, call.packed),
                q=T.alloc_shared([plan.block_M, plan.head_dim], plan.dtype),
                do=T.alloc_shared([plan.block_M, plan.head_dim_v], plan.dtype),
                k=T.alloc_shared([config.k_stages, plan.block_N, plan.head_dim], plan.dtype),
                v=T.alloc_shared([config.v_stages, plan.block_N, plan.head_dim_v], plan.dtype),
                acc_s=T.alloc_fragment(score_tile, "float32"),
                acc_dp=T.alloc_fragment(score_tile, "float32"),
                early=[T.alloc_fragment(score_tile, "float32") for _ in plan.early],
                ds=T.alloc_fragment(score_tile, plan.dtype),
                acc_dq=T.alloc_fragment([plan.block_M, plan.head_dim], "float32"),
                lse2=T.alloc_fragment([plan.block_M], "float32"),
                delta=T.alloc_fragment([plan.block_M], "float32"),
                uniforms=plan.slopes.allocate() if plan.slopes is not None else None,
                pattern=tile.Pattern(arg, plan.early) if call.dropout else None,
                at=T.alloc_local([5], "int32"),
                full=T.alloc_local([2], "int32"),
                thread=thread,
                uniform=at.uniform,
                **plan.alloc_barriers(),
            )
            w.task[BATCH] = at.uniform(at.number(pair))
            w.task[HEAD] = at.uniform(T.truncmod(pair, arg.heads))
            w.task[ROW] = at.uniform((query_tiles - 1 - T.truncdiv(place, side)) * plan.block_M)
            q_lo = w.task[ROW] + arg.seqlen_k - arg.seqlen_q
            q_hi = T.min(q_lo + plan.block_M, arg.seqlen_k) - 1
            kv_lo, kv_hi = w.visible.kv_range(w.task[BATCH], w.task[HEAD], q_lo, q_hi)
            w.task[FIRST] = at.uniform(T.truncdiv(kv_lo, plan.block_N))
            # At least one tile, all masked where nothing is visible.
            w.task[COUNT] = at.uniform(T.max(T.ceildiv(kv_hi, plan.block_N) - w.task[FIRST], 1))
            if plan.copied is not None:
                alloc_tile(plan, arg, w)
            T.annotate_layout({w.ds: accumulator_layout(plan.block_M, plan.block_N)})
            if at.exists:
                take_part(plan, arg, w)

    return kernel
