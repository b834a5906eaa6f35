"""dk, dv and dq's sums, Hopper schedule: the backward pass of FlashAttention-3 (Shah et al. 2024, arXiv 2407.08608).

Each block owns one tile of 128 keys and values of one kv head, and walks over the query heads of the group and, for
each, over the tiles of queries that the mask lets see its keys. In a block

    two loading warps        bring, by TMA, K and V and then Q with lse2, tile by tile, and dO with delta;
    two consumer warpgroups  own 64 keys each: they multiply (wgmma), and keep dK and dV in registers;
    one adding warp          adds each tile of dQ to the float32 sums in memory, by TMA, which sums in the L2 cache;
    one more loading warp    brings a bias's tiles, or those of another tensor that a modification reads tile by tile.

One iteration of a consumer warpgroup; the tensor cores are given the next product before the last one's result is used:

    tensor cores  |  S = K Q^T  |  dP = V dO^T  |        |  dV += P dO  |  dQ = dS^T K  |  dK += dS Q  |
    other units   |             |  P = exp2(S)  |  dS = P (dP - delta)  |               |  dQ to shared memory
    barriers      ^q_ready      ^do_ready                               ^both have dS   ^do_free       ^q_free

S, P, dP and dS have keys in rows, so that P and dS are first operands as they lie in registers. dQ needs dS of all 128
keys: both warpgroups write theirs to shared memory, transposed (stmatrix), and wait for each other. With two buffers of
dS that is the only time they wait.

dQ leaves the registers in the order in which they hold it (dq_order.py), half a tile for each warpgroup, so that
writing it to shared memory meets no bank conflicts, and one bulk reduction adds it up; finish.py undoes the order.

A bias's tile comes as it lies in memory, queries in rows, swizzled. Of 16 bits it is taken to registers under S = K Q^T
by ldmatrix, which transposes it; of 32 bits it is read where it is used: either way banks do not collide. Its gradient
leaves the same way: transposed to shared memory, behind dV's product, from where the adding warp stores it, or adds it
to float32 sums where heads or batch elements share the bias. Batch elements that share one are neighbours in the grid.

Every buffer has two mbarriers, ``ready`` and ``free``, as in the forward schedule (forward/hopper/kernel.py). Masked
tiles, and tiles over the ends of queries or keys, take a branch that all threads agree on.

Blocks start with the tiles of keys that a causal mask lets most queries see. All sizes and strides are run-time values.
Limits: sm_90a, head dims up to 128, tensors whose rows begin at multiples of 16 bytes. Without dq, which
queries.py then computes, the head dims may be larger if both together are no more than 320: with 192 and 128 the
warpgroups keep 160 registers of dK and dV, and take 32 queries at a time.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import tilelang
import tilelang.language as T
from tilelang.language.eager.builder import Builder
from tvm import ir

from .....call.facts import AttentionCall
from .....variant.program import Program
from ...architecture import padded
from ...tile import dropout, softmax
from ...tile.assume import assume_aligned, assume_filled
from ...tile.hopper import WARP, WARPGROUP, slices, tile_layout
from ...tile.mask import keep_uniforms
from ...tile.softmax import ROWS
from .. import places, tile
from ..operand_gradients import ADDED, BY_KEY, SPREAD, STORED, Path
from ..operand_stores import add_to_elements, add_to_sums, hand_over_sums, spread, store_elements
from ..visible import Viewers
from .config import CONSUMERS, HopperBackwardConfig, leaving
from .dq_order import COLUMNS
from .layouts import accumulator_layout

# Named barriers; 0 is __syncthreads.
DS_WRITTEN, DS_READ = 1, 2

# The block's task: a tile of keys, by its first, of one kv head of one batch element.
BATCH, KV_HEAD, KEY = range(3)

# Where a warpgroup stands in the stages of Q and dO, in the buffers of dS, and in the uses of dQ's.
STAGE, PARITY, DS, DQ_PARITY = range(4)

PRODUCER_REGISTERS, CONSUMER_REGISTERS = 24, 240

_LDMATRIX = ir.Op.get("tl.ptx_ldmatrix")
_STMATRIX, _PACK = ir.Op.get("tl.ptx_stmatrix"), ir.Op.get("tl.pack_b16")


class Plan:
    """The static facts of one kernel, from which its macros choose what they emit.

    Attributes:
        slopes: the score modification and its derivatives, or None.
        early: indices of the derivatives that are kept beside the scores.
        paths: to the tensors whose gradients are wanted; `sums_by_key` numbers those that are summed by key.
        copied: the tile load whose tiles, such as a bias's, are copied, or None; and its dtype.
        tile_in_registers: whether they are taken to registers: those of 16 bits, which ldmatrix transposes.
        tile_is_late: whether a derivative that is computed late needs them once more.
        leaving: index of the path whose gradient leaves by TMA, tile by tile, or None; and the dtype of these tiles.
        batch_first: whether neighbours in the grid are batch elements rather than heads, to share those tiles.
        copied_once: whether nobody shares them, so that they need not stay in the L2 cache.
        adds_dq: whether dq is added up here.
        order: of dq's sums; `sum_rows`, of 256, are a tile's.
    """

    def __init__(
        self, call: AttentionCall, config: HopperBackwardConfig, traced: Program, paths: tuple[Path, ...], adds_dq: bool
    ) -> None:
        self.call, self.config, self.traced, self.paths, self.adds_dq = call, config, traced, paths, adds_dq
        self.block_M, self.block_N, self.stages = config.block_M, config.block_N, config.num_stages
        self.head_dim, self.head_dim_v = padded(call.head_dim), padded(call.head_dim_v)
        self.dtype = str(call.dtype).removeprefix("torch.")
        self.slopes = None
        if traced.score is not None:
            self.slopes = tile.Slopes(call, traced, tuple(path.load for path in paths))
        self.early = tuple(range(len(self.slopes.program.early))) if self.slopes else ()
        self.copied, self.copied_dtype = config.copied(call) or (None, None)
        self.tile_in_registers = self.copied is not None and self.copied_dtype.itemsize == 2
        self.tile_is_late = self.copied is not None and self.slopes.is_late(self.copied.text)
        self.leaving, self.leaving_dtype = leaving(config, call, paths) or (None, None)
        by_head, by_batch = (self.copied is not None and self.copied.differs_by(symbol) for symbol in "hb")
        self.batch_first = by_head and not by_batch and not call.packed
        self.copied_once = by_head and by_batch
        by_key = [index for index, path in enumerate(paths) if path.way == BY_KEY]
        self.sums_by_key = {index: number for number, index in enumerate(by_key)}
        self.order = config.order(call)
        self.sum_rows = self.order.size // COLUMNS

    def alloc_barriers(self) -> dict[str, Any]:
        """All barriers, by name, in one array; see forward/hopper/plan.py."""
        return slices(
            T.alloc_barrier,
            {
                "kv_ready": [WARP],
                "q_ready": [WARP] * self.stages,
                "q_free": [2] * self.stages,
                "do_ready": [WARP] * self.stages,
                "do_free": [2] * self.stages,
                "dq_ready": [WARPGROUP] * 2,
                "dq_free": [WARP] * 2,
                "gradient_ready": [WARPGROUP] * 2 if self.leaving is not None else [],
                "gradient_free": [WARP] * 2 if self.leaving is not None else [],
                "tile_ready": [WARP] * self.config.tile_stages,
                "tile_free": [CONSUMERS // WARP] * self.config.tile_stages,
            },
        )


class Row:
    """One row of a buffer."""

    def __init__(self, buffer: Any, row: Any) -> None:
        self._buffer, self._row = buffer, row

    def __getitem__(self, index: Any) -> Any:
        return self._buffer[self._row, index]


class RowsOfHead:
    """What :func:`find_rows` finds, in a packed call: the last two numbers in shared memory, for want of registers.

    Of a dense call all of them follow from parameters of the kernel, of which ptxas needs to keep nothing.
    """

    def __init__(self) -> None:
        self._registers = T.alloc_local([2], "int32")
        self._shared = T.alloc_shared([2], "int32", scope="shared")

    def __getitem__(self, index: int) -> Any:
        return self._registers[index] if index < 2 else self._shared[index - 2]

    def __setitem__(self, index: int, value: Any) -> None:
        # All threads write the same, and each reads what it has written itself.
        buffer, place = (self._registers, index) if index < 2 else (self._shared, index - 2)
        T.buffer_store(buffer, value, [place])


class TransposedTile:
    """The copied tile of a warpgroup's stage, by key and query."""

    def __init__(self, plan: Plan, w: Any) -> None:
        self._plan, self._w = plan, w

    def __getitem__(self, index: tuple[Any, Any]) -> Any:
        return self._w.tile[tile_stage(self._plan, self._w), index[1], index[0]]


# --- The warps of the producer warpgroup, which have few registers ---


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


@T.macro
def load_tiles(plan, arg, w):
    """The scores' tiles of the copied tensor. What lies beyond its edges is 0."""
    stage = T.alloc_var("int32", init=0)
    parity = T.alloc_var("int32", init=1)  # a fresh barrier lets this parity pass
    key = w.task[KEY]
    for g in T.serial(arg.heads_per_kv_head):
        h = w.task[KV_HEAD] * arg.heads_per_kv_head + g
        outer = [w.emit(index, b=w.task[BATCH], h=h) for index in plan.copied.outer]
        first_tile = tiles_of_head(plan, w, h)[0]
        q_lo = first_tile * plan.block_M + arg.seqlen_k - arg.seqlen_q
        row = T.alloc_var("int32", init=w.emit(plan.copied.row, b=w.task[BATCH], h=h, q=q_lo))
        count = T.max(tiles_of_head(plan, w, h)[1] - first_tile, 0)
        for _ in T.serial(count):
            T.barrier_wait(w.tile_free[stage], parity)
            T.tma_copy(
                arg.operands[plan.copied.name][
                    (*outer, slice(row, row + plan.block_M), slice(key, key + plan.block_N))
                ],
                w.tile[stage, :, :],
                barrier=w.tile_ready[stage],
                eviction_policy="evict_first" if plan.copied_once else None,
            )
            T.barrier_arrive(w.tile_ready[stage])
            row += plan.block_M
            parity = T.if_then_else(stage == plan.config.tile_stages - 1, parity ^ 1, parity)
            stage = T.if_then_else(stage == plan.config.tile_stages - 1, 0, stage + 1)


@T.macro
def take_gradient(plan, arg, w, h, number, group, parity):
    """A warpgroup's half of a tile of the copied tensor's gradient, to where the tile is from. Beyond lies nothing."""
    path = plan.paths[plan.leaving]
    half = plan.block_N // 2
    q_lo = number * plan.block_M + arg.seqlen_k - arg.seqlen_q
    outer = [w.emit(index, b=w.task[BATCH], h=h) for index in plan.copied.outer]
    row = w.emit(plan.copied.row, b=w.task[BATCH], h=h, q=q_lo)
    key = w.task[KEY] + group * half
    place = (*outer, slice(row, row + plan.block_M), slice(key, key + half))
    T.barrier_wait(w.gradient_ready[group], parity)
    if path.way == ADDED:
        T.atomic_add(
            arg.handed_over[plan.leaving][place],
            w.gradient_tile[0 : plan.block_M, group * half : group * half + half],
            use_tma=True,
        )
    else:
        T.tma_copy(
            w.gradient_tile[0 : plan.block_M, group * half : group * half + half],
            arg.handed_over[plan.leaving][place],
            leader_scope_threads=WARP,
        )
        T.tma_store_wait(0)
    T.barrier_arrive(w.gradient_free[group])


@T.macro
def take_gradients(plan, arg, w):
    """As :func:`add_dq`, which there is none of then."""
    parity = T.alloc_var("int32", init=0)
    for g in T.serial(arg.heads_per_kv_head):
        h = w.task[KV_HEAD] * arg.heads_per_kv_head + g
        for number in T.serial(tiles_of_head(plan, w, h)[0], tiles_of_head(plan, w, h)[1]):
            take_gradient(plan, arg, w, h, number, 0, parity)
            take_gradient(plan, arg, w, h, number, 1, parity)
            parity = parity ^ 1


@T.macro
def add_dq(plan, arg, w):
    """Each warpgroup's half of dQ, as it comes, to the sums in memory."""
    half = plan.sum_rows // 2
    parity = T.alloc_var("int32", init=0)
    for g in T.serial(arg.heads_per_kv_head):
        h = w.task[KV_HEAD] * arg.heads_per_kv_head + g
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


def tiles_of_head(plan, w, h):
    """Tiles of queries [first, end) that see the block's keys: none, if it is not the case that first < end."""
    row_lo, row_hi = w.visible.rows(w.task[BATCH], h, w.task[KEY], w.task[KEY] + plan.block_N - 1)
    return T.truncdiv(row_lo, plan.block_M), T.ceildiv(row_hi, plan.block_M)


# --- The consumer warpgroups ---


def alloc_tile(plan, arg, w):
    """The copied tile's stages in shared memory, what its elements are emitted as, and its gradient's tile."""
    assume_aligned(arg.operands[plan.copied.name].strides, itemsize=plan.copied_dtype.itemsize)
    kind = str(plan.copied_dtype).removeprefix("torch.")
    w.tile = T.alloc_shared([plan.config.tile_stages, plan.block_M, plan.block_N], kind)
    layouts = {
        w.tile: tile_layout(w.tile, plan.block_N * plan.copied_dtype.itemsize),
        w.acc_s: accumulator_layout(plan.block_N, plan.block_M),  # for single elements of it (:func:`have_read`)
    }
    if plan.tile_in_registers:
        w.tile_registers = T.alloc_fragment([plan.block_N, plan.block_M], kind)
        w.eight_of_tile = T.alloc_local([8], kind)
        layouts[w.tile_registers] = accumulator_layout(plan.block_N, plan.block_M)
    if plan.leaving is not None:
        kind = str(plan.leaving_dtype).removeprefix("torch.")
        assume_aligned(arg.handed_over[plan.leaving].strides, itemsize=plan.leaving_dtype.itemsize)
        w.gradient_tile = T.alloc_shared([plan.block_M, plan.block_N], kind)
        w.eight_of_gradient = T.alloc_local([8], kind)
        layouts[w.gradient_tile] = tile_layout(w.gradient_tile, plan.block_N * plan.leaving_dtype.itemsize)
    w.emit.tiles[plan.copied.text] = w.tile_registers if plan.tile_in_registers else TransposedTile(plan, w)
    Builder.current().eval(T.annotate_layout(layouts))


@T.macro
def release(w, barriers, stage):
    """One thread of each warpgroup says that it has read a stage."""
    if w.thread % WARPGROUP == 0:
        T.barrier_arrive(barriers[stage])


@T.macro
def multiply_scores(plan, w):
    T.barrier_wait(w.q_ready[w.at[STAGE]], w.at[PARITY])
    T.wgmma_gemm(w.k, w.q[w.at[STAGE], :, :], w.acc_s, transpose_B=True, clear_accum=True, policy=ROWS)


@T.macro
def multiply_dp(plan, w):
    T.barrier_wait(w.do_ready[w.at[STAGE]], w.at[PARITY])
    T.wgmma_gemm(w.v, w.do[w.at[STAGE], :, :], w.acc_dp, transpose_B=True, clear_accum=True, policy=ROWS)


@T.macro
def await_product(plan, fragment, in_flight, columns):
    """Until only so many products are in flight; the fragment's registers are then its result."""
    T.wait_wgmma(in_flight)
    T.warpgroup_fence_operand(fragment, num_regs=plan.block_N * columns // CONSUMERS)


@T.macro
def take_tile(plan, w):
    """The copied tile to registers, if it is of 16 bits, under the product that makes the scores; else only waits.

    Its rows are queries. ldmatrix transposes as stmatrix does in :func:`share_ds`: four matrices of 8 x 8 at a time.
    Elements of 32 bits are read from shared memory where they are used: a warp's meet no bank conflict as they lie.
    """
    if plan.copied is not None:
        T.barrier_wait(w.tile_ready[tile_stage(plan, w)], tile_parity(plan, w))
        if plan.tile_in_registers:
            lane, warp = w.thread % WARP, w.thread // WARP
            for n in T.unroll(plan.block_M // 16):
                place = w.tile[tile_stage(plan, w), n * 16 + lane // 16 * 8 + lane % 8, warp * 16 + lane % 16 // 8 * 8]
                ends = [T.access_ptr(place, "r", extent=8), T.access_ptr(w.eight_of_tile[0], "w", extent=8)]
                T.evaluate(T.call_intrin("handle", _LDMATRIX, 1, 4, *ends))
                for e in T.unroll(8):
                    key, query = warp * 16 + lane // 4 + e // 2 % 2 * 8, n * 16 + lane % 4 * 2 + e // 4 * 8 + e % 2
                    w.tile_registers[key, query] = w.eight_of_tile[e]


def tile_stage(plan, w):
    return w.at[STAGE] if plan.config.tile_stages > 1 else 0


def tile_parity(plan, w):
    """With one stage it flips with every tile, as that of dQ's buffer does, which begins with the other one."""
    return w.at[PARITY] if plan.config.tile_stages > 1 else w.at[DQ_PARITY] ^ 1


@T.macro
def release_tile(plan, w, used=True):
    T.sync_warp()  # one lane answers for all
    if T.shuffle_elect(WARP) & used:
        T.barrier_arrive(w.tile_free[tile_stage(plan, w)])


def have_read(w, columns):
    """A condition that needs all reads of a tile, although it always holds: the last probability is not negative.

    An arrival at a barrier does not wait for reads that are in flight, and the next tile, by TMA, would overtake them:
    beside two products ldmatrix takes long enough for that. (The sign bit: a NaN must not keep the tile for ever.)
    """
    lane, warp = w.thread % WARP, w.thread // WARP
    return T.reinterpret(w.acc_s[warp * 16 + 8 + lane // 4, columns - 7 + lane % 4 * 2], "int32") >= 0


@T.macro
def scores_to_probabilities(plan, arg, w, h, row):
    q_lo = row + arg.seqlen_k - arg.seqlen_q
    c = arg.scale * softmax.LOG2E if plan.slopes is None else 1.0
    if plan.slopes is not None:
        tile.modify(
            w.acc_s, w.early, plan.slopes, w.uniforms, w.emit, arg.scale, w.task[BATCH], h, q_lo, w.task[KEY],
            plan.block_N, plan.block_M, True,
        )  # fmt: skip
    if (row < w.rows[2]) | (row + plan.block_M > w.rows[3]):
        tile.hide(w.acc_s, w.visible, w.task[BATCH], h, q_lo, w.task[KEY], plan.block_N, plan.block_M, True)
    tile.probabilities(w.acc_s, Row(w.lse2, w.at[STAGE]), c, plan.block_N, plan.block_M, True)
    if plan.copied is not None and (plan.tile_in_registers or not plan.tile_is_late):
        release_tile(plan, w, have_read(w, plan.block_M))
    tile.mark_dropped(w.acc_s, w.pattern, row, w.task[KEY], plan.block_N, plan.block_M, True, True)
    tile.copy_kept(w.acc_s, w.p, w.pattern, plan.block_N, plan.block_M, True)
    for index in plan.early:
        tile.weigh(w.early[index], w.acc_s, plan.block_N, plan.block_M)


@T.macro
def times_late(plan, arg, w, gradient, late, h, row):
    """The gradient times a derivative that is computed only now, in the place of dP, which has served."""
    tile.times_late(
        w.acc_dp, gradient, late, plan.slopes, w.uniforms, w.emit, arg.scale, w.task[BATCH], h,
        row + arg.seqlen_k - arg.seqlen_q, w.task[KEY], plan.block_N, plan.block_M, True,
    )  # fmt: skip


@T.macro
def tensor_gradients(plan, arg, w, h, row):
    """Of the tensors that the modification reads."""
    b, k_lo, q_lo = w.task[BATCH], w.task[KEY], row + arg.seqlen_k - arg.seqlen_q
    for index, path in enumerate(plan.paths):
        if index == plan.leaving:
            continue
        factor = plan.slopes.program.loads[index]
        if factor.late is not None:
            times_late(plan, arg, w, tile.kept(factor, w.early, w.acc_s), factor.late, h, row)
        gradient = w.acc_dp if factor.late is not None else tile.kept(factor, w.early, w.acc_s)
        if path.way == BY_KEY:
            add_to_sums(gradient, w.tile_sum, w.sums[plan.sums_by_key[index]], plan.block_N)
        if path.way == ADDED:
            add_to_elements(
                gradient, arg.handed_over[index], path, w.emit, b, h, q_lo, k_lo, plan.block_N, plan.block_M
            )
        if path.way == STORED:
            store_elements(gradient, arg.handed_over[index], path, w.emit, b, h, q_lo, k_lo, plan.block_N, plan.block_M)
        if path.way == SPREAD:
            spread(gradient, arg.handed_over[index], b, h, row, k_lo, plan.block_N, plan.block_M)


@T.macro
def gradients_of_scores(plan, arg, w, h, row):
    """dS, of the scaled scores, in 16 bits."""
    delta = Row(w.delta, w.at[STAGE])
    tile.drop_gradients(w.acc_s, w.acc_dp, w.pattern, plan.block_N, plan.block_M, True)
    if plan.slopes is None:
        for i, j in T.Parallel(plan.block_N, plan.block_M):
            w.ds[i, j] = w.acc_s[i, j] * (w.acc_dp[i, j] - delta[j])
    else:
        if plan.slopes.probability_is_kept():
            tile.score_gradients(w.acc_s, w.acc_dp, delta, plan.block_N, plan.block_M, True)
        for index in plan.early:
            tile.score_gradients(w.early[index], w.acc_dp, delta, plan.block_N, plan.block_M, True)
        tensor_gradients(plan, arg, w, h, row)
        slope = plan.slopes.program.slope
        if slope.late is not None:
            times_late(plan, arg, w, tile.kept(slope, w.early, w.acc_s), slope.late, h, row)
        T.copy(w.acc_dp if slope.late is not None else tile.kept(slope, w.early, w.acc_s), w.ds)
    if plan.tile_is_late and not plan.tile_in_registers and plan.leaving is None:
        release_tile(plan, w)


@T.macro
def hand_over_gradient(plan, arg, w, h, row):
    """A tile of the copied tensor's gradient, queries in rows, to the adding warp, once it has taken the last one.

    Behind dV's product, which would wait for these stores as it does for those of dS.
    """
    factor = plan.slopes.program.loads[plan.leaving]
    if factor.late is not None:
        times_late(plan, arg, w, tile.kept(factor, w.early, w.acc_s), factor.late, h, row)
    gradient = w.acc_dp if factor.late is not None else tile.kept(factor, w.early, w.acc_s)
    group = w.thread // WARPGROUP
    T.barrier_wait(w.gradient_free[group], w.at[DQ_PARITY])
    if plan.leaving_dtype.itemsize == 2:
        lane, warp = w.thread % WARP, w.thread // WARP
        for n in T.unroll(plan.block_M // 16):
            for e in T.unroll(8):
                w.eight_of_gradient[e] = gradient[
                    warp * 16 + lane // 4 + e // 2 % 2 * 8, n * 16 + lane % 4 * 2 + e // 4 * 8 + e % 2
                ]
            place = w.gradient_tile[n * 16 + lane // 16 * 8 + lane % 8, warp * 16 + lane % 16 // 8 * 8]
            pairs = [
                T.call_intrin("int32", _PACK, w.eight_of_gradient[e], w.eight_of_gradient[e + 1]) for e in (0, 2, 4, 6)
            ]
            T.evaluate(T.call_intrin("handle", _STMATRIX, 1, 4, T.access_ptr(place, "w", extent=8), *pairs, "m8n8"))
    else:
        for i, j in T.Parallel(plan.block_N, plan.block_M):
            w.gradient_tile[j, i] = gradient[i, j]
    T.fence_proxy_async()
    T.barrier_arrive(w.gradient_ready[group])
    if plan.tile_is_late and not plan.tile_in_registers:
        release_tile(plan, w)


@T.macro
def share_ds(plan, w):
    """dS of this warpgroup's keys to shared memory: queries in rows, as dQ's product takes it without conflicts.

    A thread holds elements in rows i, i + 8 and columns j, j + 1, j + 8, j + 9 of each 16 columns: four matrices of
    8 x 8, which stmatrix stores transposed. (TileLang 0.1.15 uses it by itself for whole buffers only, not for one of
    several stages.)
    """
    lane, warp = w.thread % WARP, w.thread // WARP
    for n in T.unroll(plan.block_M // 16):
        for e in T.unroll(8):
            w.eight[e] = w.ds[warp * 16 + lane // 4 + e // 2 % 2 * 8, n * 16 + lane % 4 * 2 + e // 4 * 8 + e % 2]
        place = w.shared_ds[w.at[DS], n * 16 + lane // 16 * 8 + lane % 8, warp * 16 + lane % 16 // 8 * 8]
        pairs = [T.call_intrin("int32", _PACK, w.eight[e], w.eight[e + 1]) for e in (0, 2, 4, 6)]
        T.evaluate(T.call_intrin("handle", _STMATRIX, 1, 4, T.access_ptr(place, "w", extent=8), *pairs, "m8n8"))


@T.macro
def multiply_dv(plan, w):
    T.wgmma_gemm(w.p, w.do[w.at[STAGE], :, :], w.acc_dv, policy=ROWS)


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
def hand_over_dq(plan, w):
    """To the adding warp, once it has taken the last tile's."""
    group = w.thread // WARPGROUP
    T.barrier_wait(w.dq_free[group], w.at[DQ_PARITY])
    for i, j in T.Parallel(*plan.order.shape):
        w.dq_sum[plan.order.place(i, j)[0], plan.order.place(i, j)[1]] = w.acc_dq[i, j]
    T.fence_proxy_async()
    T.barrier_arrive(w.dq_ready[group])


@T.macro
def next_stage(plan, w):
    last = w.at[STAGE] == plan.stages - 1
    w.at[PARITY] = T.if_then_else(last, w.at[PARITY] ^ 1, w.at[PARITY])
    w.at[STAGE] = T.if_then_else(last, 0, w.at[STAGE] + 1)
    if plan.config.ds_buffers > 1:
        w.at[DS] = w.at[DS] ^ 1
    w.at[DQ_PARITY] = w.at[DQ_PARITY] ^ 1


@T.macro
def advance(plan, arg, w, h, row):
    """One tile of queries."""
    multiply_scores(plan, w)
    if plan.config.late_dp:
        take_tile(plan, w)
        await_product(plan, w.acc_s, 0, plan.block_M)
        scores_to_probabilities(plan, arg, w, h, row)
        multiply_dp(plan, w)
    else:
        multiply_dp(plan, w)
        take_tile(plan, w)
        await_product(plan, w.acc_s, 1, plan.block_M)
        scores_to_probabilities(plan, arg, w, h, row)
    await_product(plan, w.acc_dp, 0, plan.block_M)
    gradients_of_scores(plan, arg, w, h, row)
    multiply_dv(plan, w)
    if plan.leaving is not None:
        hand_over_gradient(plan, arg, w, h, row)
    if plan.adds_dq:
        if plan.config.ds_buffers == 1:
            T.sync_threads(DS_READ, CONSUMERS)
        share_ds(plan, w)
        T.fence_proxy_async()
        T.sync_threads(DS_WRITTEN, CONSUMERS)
        multiply_dq(plan, w)
        await_product(plan, w.acc_dv, 1, plan.head_dim_v)
        release(w, w.do_free, w.at[STAGE])
        T.wgmma_gemm(w.ds, w.q[w.at[STAGE], :, :], w.acc_dk, policy=ROWS)
        T.wait_wgmma(1)
        T.warpgroup_fence_operand(w.acc_dq, num_regs=plan.order.size // CONSUMERS)
        hand_over_dq(plan, w)
    else:
        T.wgmma_gemm(w.ds, w.q[w.at[STAGE], :, :], w.acc_dk, policy=ROWS)
        await_product(plan, w.acc_dv, 1, plan.head_dim_v)
        release(w, w.do_free, w.at[STAGE])
    await_product(plan, w.acc_dk, 0, plan.head_dim)
    release(w, w.q_free, w.at[STAGE])
    next_stage(plan, w)


@T.macro
def store(plan, arg, w):
    """dK and dV by way of shared memory, where K and V were."""
    for i, d in T.Parallel(plan.block_N, plan.head_dim):
        w.acc_dk[i, d] *= arg.scale
    if plan.call.dropout:
        for i, d in T.Parallel(plan.block_N, plan.head_dim_v):
            w.acc_dv[i, d] *= arg.weight
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
def find_rows(plan, w, h):
    """The head's tiles of queries, begin and end, and the rows that see all keys of the block, which need no mask."""
    first, end = tiles_of_head(plan, w, h)
    full_lo, full_hi = w.visible.full_rows(w.task[BATCH], h, w.task[KEY], w.task[KEY] + plan.block_N - 1)
    if plan.call.packed:
        T.sync_threads(DS_WRITTEN, CONSUMERS)  # nobody looks at the last head's any more
    w.rows[0] = w.uniform(first)
    w.rows[1] = w.uniform(T.max(end, first))
    w.rows[2] = w.uniform(full_lo)
    w.rows[3] = w.uniform(full_hi)
    if plan.call.packed:
        T.fence_proxy_async()  # or TileLang puts one into the loop: they are in shared memory


@T.macro
def consume(plan, arg, w):
    T.fill(w.acc_dv, 0)
    T.fill(w.acc_dk, 0)
    for i in T.unroll(3):
        w.at[i] = 0
    w.at[DQ_PARITY] = 1  # a fresh barrier lets this parity pass
    T.barrier_wait(w.kv_ready[0], 0)
    for g in T.serial(arg.heads_per_kv_head):
        h = w.task[KV_HEAD] * arg.heads_per_kv_head + g
        find_rows(plan, w, h)
        if plan.slopes is not None:
            keep_uniforms(plan.slopes, w.uniforms, w.emit, arg.scale, w.task[BATCH], h)
        if plan.call.dropout:
            dropout.enter_head(w.pattern.words, arg, w.task[BATCH], h)
        for number in plan.sums_by_key.values():
            T.fill(w.sums[number], 0)
        for number in T.serial(w.rows[0], w.rows[1]):
            advance(plan, arg, w, h, number * plan.block_M)
        for index, number in plan.sums_by_key.items():
            hand_over_sums(w.sums[number], arg.handed_over[index], w.task[BATCH], h, w.task[KEY], plan.block_N)
    store(plan, arg, w)


@T.macro
def take_part(plan, arg, w):
    """Each warp in its role."""
    if w.thread >= CONSUMERS:
        T.set_max_nreg(PRODUCER_REGISTERS, 0)
        if w.thread < CONSUMERS + WARP:
            load_keys(plan, arg, w)
            load(plan, arg, w, arg.q, w.q, plan.head_dim, arg.lse2, w.lse2, w.q_ready, w.q_free)
        elif w.thread < CONSUMERS + 2 * WARP:
            load(plan, arg, w, arg.do, w.do, plan.head_dim_v, arg.delta, w.delta, w.do_ready, w.do_free)
        elif w.thread < CONSUMERS + 3 * WARP:
            if plan.adds_dq:
                add_dq(plan, arg, w)
            elif plan.leaving is not None:
                take_gradients(plan, arg, w)
        elif plan.copied is not None:
            load_tiles(plan, arg, w)
    else:
        T.set_max_nreg(CONSUMER_REGISTERS, 1)
        consume(plan, arg, w)


def body(
    call: AttentionCall, config: HopperBackwardConfig, traced: Program, paths: tuple[Path, ...], adds_dq: bool
) -> Any:
    """The macro that emits the kernel, given its parameters (see signature.py).

    Args: as :func:`generic.body`.
    """
    plan = Plan(call, config, traced, paths, adds_dq)

    @T.macro
    def kernel(arg):
        grid = places.blocks(arg, "seqlen_k", plan.block_N, arg.kv_heads)
        with T.Kernel(grid, threads=CONSUMERS + WARPGROUP) as block:
            assume_filled(arg.operands)
            assume_aligned(arg.q.strides, arg.k.strides, arg.v.strides, arg.do.strides)
            at = places.find(arg, block, arg.kv_heads, places.BY_TMA)
            arg = at.arg
            key_tiles, side = T.ceildiv(arg.seqlen_k, plan.block_N), arg.side_by_side
            # `side` kv heads side by side, each beginning with its first keys.
            turn, place = T.truncdiv(at.block, side * key_tiles), T.truncmod(at.block, side * key_tiles)
            pair = T.alloc_var("int32", init=turn * side + T.truncmod(place, side))
            emit = tile.TileEmitter(arg.operands)
            thread = T.get_thread_binding()
            score_tile = [plan.block_N, plan.block_M]
            w = SimpleNamespace(
                task=T.alloc_local([3], "int32"),
                emit=emit,
                # Behind a sequence's last row lse2 is +inf, and Q is 0; but a modification may be NaN there.
                visible=Viewers(traced, emit, arg.seqlen_q, arg.seqlen_k, call.packed and plan.slopes is None),
                k=T.alloc_shared([plan.block_N, plan.head_dim], plan.dtype),
                v=T.alloc_shared([plan.block_N, plan.head_dim_v], plan.dtype),
                q=T.alloc_shared([plan.stages, plan.block_M, plan.head_dim], plan.dtype),
                do=T.alloc_shared([plan.stages, plan.block_M, plan.head_dim_v], plan.dtype),
                lse2=T.alloc_shared([plan.stages, config.rows_apart], "float32"),
                delta=T.alloc_shared([plan.stages, config.rows_apart], "float32"),
                shared_ds=T.alloc_shared([config.ds_buffers, plan.block_M, plan.block_N], plan.dtype)
                if adds_dq
                else None,
                dq_sum=T.alloc_shared([plan.sum_rows, COLUMNS], "float32") if adds_dq else None,
                acc_s=T.alloc_fragment(score_tile, "float32"),
                acc_dp=T.alloc_fragment(score_tile, "float32"),
                early=[T.alloc_fragment(score_tile, "float32") for _ in plan.early],
                p=T.alloc_fragment(score_tile, plan.dtype),
                ds=T.alloc_fragment(score_tile, plan.dtype),
                acc_dv=T.alloc_fragment([plan.block_N, plan.head_dim_v], "float32"),
                acc_dk=T.alloc_fragment([plan.block_N, plan.head_dim], "float32"),
                acc_dq=T.alloc_fragment(list(plan.order.shape), "float32") if adds_dq else None,
                sums=[T.alloc_fragment([plan.block_N], "float32") for _ in plan.sums_by_key],
                tile_sum=T.alloc_fragment([plan.block_N], "float32"),
                uniforms=plan.slopes.allocate() if plan.slopes is not None else None,
                pattern=tile.Pattern(arg, plan.early) if call.dropout else None,
                eight=T.alloc_local([8], plan.dtype),
                at=T.alloc_local([4], "int32"),
                rows=RowsOfHead() if call.packed else T.alloc_local([4], "int32"),
                thread=thread,
                uniform=at.uniform,
                **plan.alloc_barriers(),
            )
            if plan.copied is not None:
                alloc_tile(plan, arg, w)
            if plan.batch_first:
                w.task[BATCH] = T.truncmod(pair, arg.batch)
                w.task[KV_HEAD] = T.truncdiv(pair, arg.batch)
            else:
                w.task[BATCH] = at.uniform(at.number(pair))
                w.task[KV_HEAD] = at.uniform(T.truncmod(pair, arg.kv_heads))
            w.task[KEY] = at.uniform(T.truncdiv(place, side) * plan.block_N)
            T.annotate_layout({w.ds: accumulator_layout(plan.block_N, plan.block_M)})
            if adds_dq:
                T.annotate_layout({w.dq_sum: tilelang.layout.make_linear_layout(w.dq_sum)})
            if at.exists:
                take_part(plan, arg, w)

    return kernel
