"""dk and dv of wide heads, Hopper schedule: head dims over 128, of which 128 keys would not fit into the registers.

Each block owns one tile of 64 keys and values of one kv head, and walks over the query heads of the group and, for
each, over the tiles of 64 queries that the mask lets see its keys. In a block

    two loading warps        bring K and V, then, tile by tile, one warp Q with lse2 and delta, the other dO, by TMA;
    two consumer warpgroups  take turns: one owns the even tiles of queries, the other the odd ones. The owner computes
                             P and dS and hands them over through shared memory. The first then adds P dO to dV,
                             the second dS Q to dK, of every tile; so each keeps one gradient whole in its registers.

dq comes from a kernel of its own (queries.py): here are neither registers nor shared memory left for it.

What the tensor cores are given, tile after tile (their letters: even tiles A, odd ones B):

    first warpgroup   |  S = Q K^T (A)  |  dP = dO V^T (A)  |  dV += P dO (A)  |                  |  dV (B)
    second warpgroup  |                 |                   |                  |  dK += dS Q (A)  |  S (B)  |  dP (B)
    other units       |                 |  P = exp2(S)      |  dS = P (dP - d) |                  |         |  P (B)
    barriers          ^q_ready          ^do_ready           ^p_ready           ^ds_ready, do_free ^q_free

With 64 rows and columns for one warpgroup alone, S and dP read shared memory a third less than if the warpgroups shared
each tile; and the tile after next has the time of four products to arrive.

S, P, dP and dS have queries in rows: lse2 and delta are two numbers each in every thread. P and dS lie in shared memory
as they come, [64 queries, P of 64 keys and dS of 64 keys], and are transposed by the products that take them.

Every buffer has two mbarriers, ``ready`` and ``free``, as in the forward schedule (forward/hopper/kernel.py); a stage
belongs to the warpgroup that owns its tiles. P and dS need no ``free``: their stage's next owner has waited for the
next Q and dO, which come when both have served. Masked tiles, and tiles over the ends of queries or keys, take a branch
that all threads of a warpgroup agree on.

Blocks start with the tiles of keys that a causal mask lets most queries see. All sizes and strides are run-time values.
Limits: sm_90a, equal head dims up to 256, tensors whose rows begin at multiples of 16 bytes, no gradients of a
modification's tensors.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import tilelang.language as T
from tvm import ir

from .....call.facts import AttentionCall
from .....variant.program import Program
from ...tile import dropout, softmax
from ...tile.assume import assume_aligned, assume_filled
from ...tile.expressions import Emitter
from ...tile.hopper import WARP, WARPGROUP, slices
from ...tile.mask import keep_uniforms
from ...tile.softmax import ROWS
from .. import places, tile
from ..visible import Viewers
from .config import CONSUMERS, HopperWideConfig
from .keys import release, tiles_of_head
from .layouts import accumulator_layout

# Named barriers; 0 is __syncthreads.
KEYS_READ = 1

# The block's task: a tile of keys, by its first, of one kv head of one batch element.
BATCH, KV_HEAD, KEY = range(3)

# Where a warpgroup stands: its next tile of queries, of how many in this head; which of the group's heads; and the
# parities that say that its own stage, and the other one, are ready.
TILE, END, GROUP_HEAD, OWN_PARITY, OTHER_PARITY = range(5)

# The warpgroups, by the gradient that they keep and the rows that it is made of: V's with dO, K's with Q.
OF_V, OF_K = 0, 1

# Tiles are 64 rows: of one warpgroup.
TILE_ROWS, PANEL = 64, 64

# One more for copies panel by panel: with 24 the loading warps kept addresses in local memory.
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 32, 232

_STMATRIX, _PACK = ir.Op.get("tl.ptx_stmatrix"), ir.Op.get("tl.pack_b16")


class Plan:
    """The static facts of one kernel, from which its macros choose what they emit.

    Attributes:
        slopes: the score modification and its slope, or None.
        early: indices of the derivatives that are kept beside the scores.
        head_dim: both, as tiles hold them.
    """

    block_M = block_N = TILE_ROWS

    def __init__(self, call: AttentionCall, config: HopperWideConfig, traced: Program) -> None:
        self.call, self.config, self.traced = call, config, traced
        self.head_dim = config.head_dim(call)
        self.dtype = str(call.dtype).removeprefix("torch.")
        self.slopes = tile.Slopes(call, traced, ()) if traced.score is not None else None
        self.early = tuple(range(len(self.slopes.program.early))) if self.slopes else ()

    def alloc_barriers(self) -> dict[str, Any]:
        """All barriers, by name, in one array; see forward/hopper/plan.py.

        dO of odd tiles has two readers of which neither waits for the other. Of the others the last reader speaks.
        """
        return slices(
            T.alloc_barrier,
            {
                "kv_ready": [WARP],
                "q_ready": [WARP] * 2,
                "q_free": [1] * 2,
                "do_ready": [WARP] * 2,
                "do_free": [1, 2],
                "p_ready": [WARPGROUP] * 2,
                "ds_ready": [WARPGROUP] * 2,
            },
        )


# --- The warps of the producer warpgroup, which have few registers ---


@T.macro
def load_panels(plan, source, b, row, h, tiles, first, ready, stage):
    """64 rows of all columns. A panel is what one copy by TMA takes: columns that lie together."""
    for p in T.unroll(plan.head_dim // PANEL):
        T.tma_copy(
            source[b, row : row + TILE_ROWS, h, p * PANEL : p * PANEL + PANEL],
            tiles[first : first + TILE_ROWS, p * PANEL : p * PANEL + PANEL],
            barrier=ready[stage],
        )


@T.macro
def load_keys(plan, arg, w):
    """V and K, once."""
    k_b, v_b = (T.min(w.task[BATCH], tensor.shape[0] - 1) for tensor in (arg.k, arg.v))
    load_panels(plan, arg.v, v_b, w.task[KEY], w.task[KV_HEAD], w.keys, OF_V * TILE_ROWS, w.kv_ready, 0)
    load_panels(plan, arg.k, k_b, w.task[KEY], w.task[KV_HEAD], w.keys, OF_K * TILE_ROWS, w.kv_ready, 0)
    T.barrier_arrive(w.kv_ready[0])


@T.macro
def load(plan, arg, w, source, kind, ready, free):
    """Q with lse2 and delta, or dO, tile by tile, as stages become free."""
    b = T.alloc_var("int32", init=T.min(w.task[BATCH], source.shape[0] - 1))
    stage = T.alloc_var("int32", init=0)
    parity = T.alloc_var("int32", init=1)  # a fresh barrier lets this parity pass
    for g in T.serial(arg.heads_per_kv_head):
        h = w.task[KV_HEAD] * arg.heads_per_kv_head + g
        row = T.alloc_var("int32", init=tiles_of_head(plan, w, h)[0] * TILE_ROWS)
        count = T.max(tiles_of_head(plan, w, h)[1] - tiles_of_head(plan, w, h)[0], 0)
        for _ in T.serial(count):
            T.barrier_wait(free[stage], parity)
            load_panels(plan, source, b, row, h, w.rows, (2 * kind + stage) * TILE_ROWS, ready, stage)
            if kind == OF_K:
                of_tile = stage * TILE_ROWS
                T.tma_copy(
                    arg.lse2[w.task[BATCH], h, row : row + TILE_ROWS],
                    w.lse2[of_tile : of_tile + TILE_ROWS],
                    barrier=ready[stage],
                )
                T.tma_copy(
                    arg.delta[w.task[BATCH], h, row : row + TILE_ROWS],
                    w.delta[of_tile : of_tile + TILE_ROWS],
                    barrier=ready[stage],
                )
            T.barrier_arrive(ready[stage])
            row += TILE_ROWS
            parity = parity ^ stage
            stage = stage ^ 1


# --- The consumer warpgroups. `group` is which of them a macro is emitted for, and so the stage that it owns. ---


def handed_over(w, group):
    """The barriers of what the warpgroup multiplies: P or dS."""
    return w.p_ready if group == OF_V else w.ds_ready


def loaded(w, group):
    """The barriers of what it multiplies that with: dO or Q."""
    return w.do_ready if group == OF_V else w.q_ready


def weight_of_values(plan, arg):
    """What dV is multiplied by in the end."""
    return arg.weight if plan.call.dropout else 1.0


def freed(w, group):
    return w.do_free if group == OF_V else w.q_free


@T.macro
def await_product(fragment, in_flight, columns):
    """Until only so many products are in flight; the fragment's registers are then its result."""
    T.wait_wgmma(in_flight)
    T.warpgroup_fence_operand(fragment, num_regs=2 * TILE_ROWS * columns // CONSUMERS)


@T.macro
def multiply_scores(plan, w, group):
    """Of the warpgroup's own tile: of the 128 rows, each takes the half that is its stage."""
    T.barrier_wait(w.q_ready[group], w.at[OWN_PARITY])
    T.wgmma_gemm(
        w.rows[2 * OF_K * TILE_ROWS : 2 * OF_K * TILE_ROWS + 2 * TILE_ROWS, 0 : plan.head_dim],
        w.keys[OF_K * TILE_ROWS : OF_K * TILE_ROWS + TILE_ROWS, 0 : plan.head_dim],
        w.acc_s,
        transpose_B=True,
        clear_accum=True,
        policy=ROWS,
    )


@T.macro
def multiply_dp(plan, w, group):
    T.barrier_wait(w.do_ready[group], w.at[OWN_PARITY])
    T.wgmma_gemm(
        w.rows[2 * OF_V * TILE_ROWS : 2 * OF_V * TILE_ROWS + 2 * TILE_ROWS, 0 : plan.head_dim],
        w.keys[OF_V * TILE_ROWS : OF_V * TILE_ROWS + TILE_ROWS, 0 : plan.head_dim],
        w.acc_dp,
        transpose_B=True,
        clear_accum=True,
        policy=ROWS,
    )


@T.macro
def add_product(plan, w, group, stage, parity):
    """To dV or dK, whichever is the warpgroup's, from a tile of which P and dS have been handed over."""
    T.barrier_wait(handed_over(w, group)[stage], parity)
    T.barrier_wait(loaded(w, group)[stage], parity)
    first = (2 * group + stage) * TILE_ROWS
    T.wgmma_gemm(
        w.weights[stage, :, :],
        w.rows[first : first + TILE_ROWS, 0 : plan.head_dim],
        w.acc,
        transpose_A=True,
        policy=ROWS,
    )


@T.macro
def hand_over(w, group, kind, ready):
    """P or dS of the warpgroup's tile, in 16 bits, to shared memory: for the first operand of a product.

    A thread holds elements in rows i, i + 8 and columns j, j + 1, j + 8, j + 9 of each 16 columns: four matrices of
    8 x 8 for stmatrix. (TileLang 0.1.15 uses it by itself for whole buffers only.)
    """
    lane, warp = w.thread % WARP, w.thread // WARP
    for n in T.unroll(TILE_ROWS // 16):
        for e in T.unroll(8):
            w.eight[e] = w.narrow[warp * 16 + lane // 4 + e // 2 % 2 * 8, n * 16 + lane % 4 * 2 + e // 4 * 8 + e % 2]
        place = w.weights[group, warp % 4 * 16 + lane % 16, kind * TILE_ROWS + n * 16 + lane // 16 * 8]
        pairs = [T.call_intrin("int32", _PACK, w.eight[e], w.eight[e + 1]) for e in (0, 2, 4, 6)]
        T.evaluate(T.call_intrin("handle", _STMATRIX, 0, 4, T.access_ptr(place, "w", extent=8), *pairs, "m8n8"))
    T.fence_proxy_async()
    T.barrier_arrive(ready[group])


@T.macro
def scores_to_probabilities(plan, arg, w, group):
    h, row = w.task[KV_HEAD] * arg.heads_per_kv_head + w.at[GROUP_HEAD], w.at[TILE] * TILE_ROWS
    # Position of the tile's row 0: the second warpgroup's begin at row 64.
    q_lo = row + arg.seqlen_k - arg.seqlen_q - group * TILE_ROWS
    c = arg.scale * softmax.LOG2E if plan.slopes is None else 1.0
    if plan.slopes is not None:
        tile.modify(
            w.acc_s, w.early, plan.slopes, w.uniforms, w.emit, arg.scale, w.task[BATCH], h, q_lo, w.task[KEY],
            2 * TILE_ROWS, TILE_ROWS, False,
        )  # fmt: skip
    if (row < w.full[0]) | (row + TILE_ROWS > w.full[1]):
        tile.hide(w.acc_s, w.visible, w.task[BATCH], h, q_lo, w.task[KEY], 2 * TILE_ROWS, TILE_ROWS, False)
    tile.probabilities(w.acc_s, w.lse2, c, 2 * TILE_ROWS, TILE_ROWS, False)
    for index in plan.early:
        tile.weigh(w.early[index], w.acc_s, 2 * TILE_ROWS, TILE_ROWS)
    first = row - group * TILE_ROWS
    tile.mark_dropped(w.acc_s, w.pattern, first, w.task[KEY], 2 * TILE_ROWS, TILE_ROWS, False, True)
    tile.copy_kept(w.acc_s, w.narrow, w.pattern, 2 * TILE_ROWS, TILE_ROWS, False)


@T.macro
def gradients_of_scores(plan, arg, w, group):
    """dS, of the scaled scores, in 16 bits."""
    rows, columns = 2 * TILE_ROWS, TILE_ROWS
    tile.drop_gradients(w.acc_s, w.acc_dp, w.pattern, rows, columns, False)
    if plan.slopes is None:
        for i, j in T.Parallel(rows, columns):
            w.narrow[i, j] = w.acc_s[i, j] * (w.acc_dp[i, j] - w.delta[i])
    else:
        slope = plan.slopes.program.slope
        gradient = tile.kept(slope, w.early, w.acc_s)
        tile.score_gradients(gradient, w.acc_dp, w.delta, rows, columns, False)
        if slope.late is not None:
            h = w.task[KV_HEAD] * arg.heads_per_kv_head + w.at[GROUP_HEAD]
            q_lo = w.at[TILE] * TILE_ROWS + arg.seqlen_k - arg.seqlen_q - group * TILE_ROWS
            tile.times_late(
                gradient, gradient, slope.late, plan.slopes, w.uniforms, w.emit, arg.scale, w.task[BATCH], h, q_lo,
                w.task[KEY], rows, columns, False,
            )  # fmt: skip
        T.copy(gradient, w.narrow)


@T.macro
def own_tile(plan, arg, w, group, follows):
    """P and dS of a tile of the warpgroup's own, and its product with one of them.

    Args:
        follows: whether the other's tile before is still being added.
    """
    multiply_scores(plan, w, group)
    if not plan.config.late_dp:
        multiply_dp(plan, w, group)
    await_product(w.acc, 1 if plan.config.late_dp else 2, plan.head_dim)
    if follows:
        release(w, freed(w, group), 1 - group)
    await_product(w.acc_s, 0 if plan.config.late_dp else 1, TILE_ROWS)
    scores_to_probabilities(plan, arg, w, group)
    if plan.config.late_dp:
        T.barrier_wait(w.do_ready[group], w.at[OWN_PARITY])  # when dO is there, P's place has been read
    hand_over(w, group, OF_V, w.p_ready)
    if plan.config.late_dp:
        multiply_dp(plan, w, group)
    if group == OF_V:
        add_product(plan, w, group, group, w.at[OWN_PARITY])
    await_product(w.acc_dp, 1 if group == OF_V else 0, TILE_ROWS)
    if group == OF_K:
        release(w, w.do_free, group)
    gradients_of_scores(plan, arg, w, group)
    hand_over(w, group, OF_K, w.ds_ready)
    if group == OF_K:
        add_product(plan, w, group, group, w.at[OWN_PARITY])
    await_product(w.acc, 0, plan.head_dim)
    release(w, freed(w, group), group)
    w.at[OWN_PARITY] = w.at[OWN_PARITY] ^ 1


@T.macro
def enter_head(plan, arg, w):
    """What all tiles of a head share."""
    h = w.task[KV_HEAD] * arg.heads_per_kv_head + w.at[GROUP_HEAD]
    full_lo, full_hi = w.visible.full_rows(w.task[BATCH], h, w.task[KEY], w.task[KEY] + TILE_ROWS - 1)
    w.full[0] = w.uniform(full_lo)
    w.full[1] = w.uniform(full_hi)
    w.at[TILE] = w.uniform(tiles_of_head(plan, w, h)[0])
    w.at[END] = w.uniform(tiles_of_head(plan, w, h)[1])
    if plan.slopes is not None:
        keep_uniforms(plan.slopes, w.uniforms, w.emit, arg.scale, w.task[BATCH], h)
    if plan.call.dropout:
        dropout.enter_head(w.pattern.words, arg, w.task[BATCH], h)


@T.macro
def to_next_tile(plan, arg, w):
    """The next one of this head, or the first of the next head that has one. There must be one."""
    w.at[TILE] = w.at[TILE] + 1
    while w.at[TILE] >= w.at[END]:
        w.at[GROUP_HEAD] = w.at[GROUP_HEAD] + 1
        enter_head(plan, arg, w)


@T.macro
def walk(plan, arg, w, group, count):
    """One warpgroup's way through all tiles of queries: each, its own and the other's, adds to its gradient."""
    w.at[GROUP_HEAD] = -1
    w.at[TILE] = -1
    w.at[END] = -1
    w.at[OWN_PARITY] = 0
    w.at[OTHER_PARITY] = 0
    # The first tile is the first warpgroup's own, before which there is none.
    for turn in T.serial(T.truncdiv(count + 1 - group, 2)):
        if group + turn > 0:
            to_next_tile(plan, arg, w)
            add_product(plan, w, group, 1 - group, w.at[OTHER_PARITY])
            w.at[OTHER_PARITY] = w.at[OTHER_PARITY] ^ 1
        to_next_tile(plan, arg, w)
        own_tile(plan, arg, w, group, group + turn > 0)
    if (count > 0) & (T.truncmod(count + group, 2) == 0):
        # The last tile was the other's.
        add_product(plan, w, group, 1 - group, w.at[OTHER_PARITY])
        await_product(w.acc, 0, plan.head_dim)


@T.macro
def store(plan, arg, w, gradient, group):
    """dV or dK by way of shared memory, where V and K were."""
    b, key, kv_h = w.task[BATCH], w.task[KEY], w.task[KV_HEAD]
    for p in T.unroll(plan.head_dim // PANEL):
        T.tma_copy(
            w.keys[group * TILE_ROWS : group * TILE_ROWS + TILE_ROWS, p * PANEL : p * PANEL + PANEL],
            gradient[b, key : key + TILE_ROWS, kv_h, p * PANEL : p * PANEL + PANEL],
            leader_scope_threads=WARPGROUP,
        )
    T.tma_store_wait(0)


@T.macro
def consume(plan, arg, w):
    count = T.alloc_var("int32", init=0)
    for g in T.serial(arg.heads_per_kv_head):
        h = w.task[KV_HEAD] * arg.heads_per_kv_head + g
        count += T.max(tiles_of_head(plan, w, h)[1] - tiles_of_head(plan, w, h)[0], 0)
    T.fill(w.acc, 0)
    w.group[0] = w.thread // WARPGROUP
    T.barrier_wait(w.kv_ready[0], 0)
    if w.group[0] == OF_V:
        walk(plan, arg, w, OF_V, count)
    else:
        walk(plan, arg, w, OF_K, count)
    factor = T.alloc_var("float32", init=T.if_then_else(w.group[0] == OF_V, weight_of_values(plan, arg), arg.scale))
    for i, d in T.Parallel(2 * TILE_ROWS, plan.head_dim):
        w.acc[i, d] *= factor
    T.sync_threads(KEYS_READ, CONSUMERS)
    T.copy(w.acc, w.keys)
    T.fence_proxy_async()
    T.sync_threads(KEYS_READ, CONSUMERS)
    if w.group[0] == OF_V:
        store(plan, arg, w, arg.dv, OF_V)
    else:
        store(plan, arg, w, arg.dk, OF_K)


@T.macro
def take_part(plan, arg, w):
    """Each warp in its role."""
    if w.thread >= CONSUMERS:
        T.set_max_nreg(PRODUCER_REGISTERS, 0)
        if w.thread < CONSUMERS + WARP:
            load_keys(plan, arg, w)
            load(plan, arg, w, arg.q, OF_K, w.q_ready, w.q_free)
        elif w.thread < CONSUMERS + 2 * WARP:
            load(plan, arg, w, arg.do, OF_V, w.do_ready, w.do_free)
    else:
        T.set_max_nreg(CONSUMER_REGISTERS, 1)
        consume(plan, arg, w)


def body(call: AttentionCall, config: HopperWideConfig, traced: Program) -> Any:
    """The macro that emits the kernel, given its parameters (see signature.py)."""
    plan = Plan(call, config, traced)

    @T.macro
    def kernel(arg):
        with T.Kernel(places.blocks(arg, "seqlen_k", TILE_ROWS, arg.kv_heads), threads=CONSUMERS + WARPGROUP) as block:
            assume_filled(arg.operands)
            assume_aligned(arg.q.strides, arg.k.strides, arg.v.strides, arg.do.strides)
            at = places.find(arg, block, arg.kv_heads, places.BY_TMA)
            arg = at.arg
            key_tiles, side = T.ceildiv(arg.seqlen_k, TILE_ROWS), arg.side_by_side
            # `side` kv heads side by side, each beginning with its first keys.
            turn, place = T.truncdiv(at.block, side * key_tiles), T.truncmod(at.block, side * key_tiles)
            pair = T.alloc_var("int32", init=turn * side + T.truncmod(place, side))
            emit = Emitter(arg.operands)
            thread = T.get_thread_binding()
            score_tile = [2 * TILE_ROWS, TILE_ROWS]  # of both warpgroups, one below the other
            w = SimpleNamespace(
                task=T.alloc_local([3], "int32"),
                emit=emit,
                visible=Viewers(traced, emit, arg.seqlen_q, arg.seqlen_k, call.packed and plan.slopes is None),
                keys=T.alloc_shared([2 * TILE_ROWS, plan.head_dim], plan.dtype),  # V, K
                rows=T.alloc_shared([4 * TILE_ROWS, plan.head_dim], plan.dtype),  # two stages of dO, two of Q
                weights=T.alloc_shared([2, TILE_ROWS, 2 * TILE_ROWS], plan.dtype),  # P and dS, side by side
                lse2=T.alloc_shared([2 * TILE_ROWS], "float32"),
                delta=T.alloc_shared([2 * TILE_ROWS], "float32"),
                acc_s=T.alloc_fragment(score_tile, "float32"),
                acc_dp=T.alloc_fragment(score_tile, "float32"),
                early=[T.alloc_fragment(score_tile, "float32") for _ in plan.early],
                narrow=T.alloc_fragment(score_tile, plan.dtype),
                acc=T.alloc_fragment([2 * TILE_ROWS, plan.head_dim], "float32"),  # dV, dK
                uniforms=plan.slopes.allocate() if plan.slopes is not None else None,
                pattern=tile.Pattern(arg, plan.early) if call.dropout else None,
                eight=T.alloc_local([8], plan.dtype),
                at=T.alloc_local([5], "int32"),
                full=T.alloc_local([2], "int32"),
                group=T.alloc_local([1], "int32"),
                thread=thread,
                uniform=at.uniform,
                **plan.alloc_barriers(),
            )
            w.task[BATCH] = at.uniform(at.number(pair))
            w.task[KV_HEAD] = at.uniform(T.truncmod(pair, arg.kv_heads))
            w.task[KEY] = at.uniform(T.truncdiv(place, side) * TILE_ROWS)
            T.annotate_layout({w.narrow: accumulator_layout(*score_tile)})
            if at.exists:
                take_part(plan, arg, w)

    return kernel
