"""dk and dv of wide heads, Hopper schedule: head dims above 128, whose gradients of 128 keys do not fit into registers.

Each block owns one tile of 64 keys and values of one kv head. It loops over the query heads of the group, or of a share
of them (shares/), and, for each, over the tiles of 64 queries that may see its keys. A block has

    two loading warps        one loads K and V, then Q with lse2 and delta tile by tile; the other dO; all by TMA
    two consumer warpgroups  take turns: one owns the even tiles of queries, the other the odd ones. The owner computes
                             P and dS and writes them to shared memory. The first warpgroup then adds P dO to dV, the
                             second dS Q to dK, for every tile. Each keeps one whole gradient in its registers.

Another kernel computes dq (queries.py): neither registers nor shared memory are left for it here.

The products on the tensor cores, tile after tile (A are even tiles, B odd ones):

    first warpgroup   |  S = Q K^T (A)  |  dP = dO V^T (A)  |  dV += P dO (A)  |                  |  dV (B)
    second warpgroup  |                 |                   |                  |  dK += dS Q (A)  |  S (B)  |  dP (B)
    other units       |                 |  P = exp2(S)      |  dS = P (dP - d) |                  |         |  P (B)
    barriers          ^q_ready          ^do_ready           ^p_ready           ^ds_ready, do_free ^q_free

A warpgroup computes S and dP of 64 rows and columns alone. This reads a third less shared memory than if both
warpgroups shared each tile. The tile after next has the time of four products to arrive.

S, P, dP and dS have queries in rows: every thread holds two numbers of lse2 and two of delta. P and dS are not
transposed in shared memory, [64 queries, P of 64 keys and dS of 64 keys]; the products that read them transpose them.

Every buffer has two mbarriers, ``ready`` and ``free``, as in the forward schedule (forward/hopper/kernel.py). A stage
belongs to the warpgroup that owns its tiles. P and dS need no ``free``: before the owner overwrites them, it has waited
for the next Q and dO of the stage, which are loaded when both warpgroups have read the last ones. Masked tiles, and
tiles at the ends of queries or keys, take a branch that is uniform across the threads of a warpgroup.

Blocks start with the tiles of keys that most queries see under a causal mask. All sizes and strides are run-time
values. Limits: sm_90a, equal head dims up to 256, tensors whose rows begin at multiples of 16 bytes, no gradients of a
modification's tensors.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import tilelang.language as T

from .....call.facts import AttentionCall
from .....variant.program import Program
from ...tile import dropout
from ...tile.assume import assume_aligned, assume_filled
from ...tile.hopper import WARPGROUP
from ...tile.lists import length_of_line, mixed_of_line, tile_of_line
from ...tile.mask import keep_uniforms
from ...tile.matrices import accumulator_layout, store_matrices
from ...tile.softmax import ROWS
from .. import places, tile
from ..places import store_part
from .config import CONSUMERS, HopperWideConfig
from .loads import first_head, head_count, line_of_head, load_keys, load_rows, take_share, tiles_of_head
from .plan import BATCH, KEY, KV_HEAD, PARTS
from .products import await_product, multiply_transposed
from .roles import load_in_two_warps, place_of, take_part
from .scores import gradients_of_scores, scores_to_probabilities, times_slope_in_place
from .stages import TwoStages, release
from .wide_loads import copy_keys, copy_rows, copy_sums
from .wide_plan import END, GROUP_HEAD, OF_K, OF_V, OTHER_PARITY, OWN_PARITY, PANEL, TILE, TILE_ROWS, WidePlan, allocate

# Named barriers; 0 is __syncthreads.
KEYS_READ = 1

# More than the other kernels' 24: with those, the copies panel by panel kept addresses in local memory.
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 32, 232


# --- The consumer warpgroups. `group` is the one that a macro is emitted for, and also the stage that it owns. ---


def written_out(w, group):
    """The barriers of the first operand of the warpgroup's gradient: P or dS."""
    return w.p_ready if group == OF_V else w.ds_ready


def loaded(w, group):
    """The barriers of the second operand, dO or Q, when it is loaded."""
    return w.do_ready if group == OF_V else w.q_ready


def weight_of_values(plan, arg):
    """The factor of dV at the end."""
    return arg.weight if plan.call.dropout else 1.0


def freed(w, group):
    return w.do_free if group == OF_V else w.q_free


def own_stage(w, group):
    """The stage of Q and dO that the warpgroup owns, and the parity to wait for."""
    return SimpleNamespace(stage=group, parity=w.at[OWN_PARITY])


@T.macro
def multiply(plan, w, ready, group, kind, result):
    """S = Q K^T or dP = dO V^T of the warpgroup's own tile: its stage's half of the 128 rows."""
    multiply_transposed(
        ready,
        own_stage(w, group),
        w.rows[2 * kind * TILE_ROWS : 2 * kind * TILE_ROWS + 2 * TILE_ROWS, 0 : plan.head_dim],
        w.keys[kind * TILE_ROWS : kind * TILE_ROWS + TILE_ROWS, 0 : plan.head_dim],
        result,
    )


@T.macro
def add_product(plan, w, group, stage, parity):
    """Adds a tile's product to the warpgroup's gradient, dV or dK, once P or dS of the tile is in shared memory."""
    T.barrier_wait(written_out(w, group)[stage], parity)
    T.barrier_wait(loaded(w, group)[stage], parity)
    first = (2 * group + stage) * TILE_ROWS
    T.wgmma_gemm(
        w.weights[stage, :, :],
        w.rows[first : first + TILE_ROWS, 0 : plan.head_dim],
        w.acc,
        transpose_A=True,
        policy=ROWS,
    )


def weights_of(w, group, kind):
    """The place of a thread's matrix row in P (OF_V) or dS (OF_K) of the warpgroup's stage."""
    columns = kind * TILE_ROWS
    return lambda lane, warp, n: w.weights[group, warp % 4 * 16 + lane % 16, columns + n * 16 + lane // 16 * 8]


@T.macro
def write_out(w, group, kind, ready):
    """Writes P or dS of the warpgroup's tile to shared memory, in 16 bits, as the first operand of a product."""
    store_matrices(w.narrow, w.eight, TILE_ROWS, weights_of(w, group, kind), False, w.thread)
    T.fence_proxy_async()
    T.barrier_arrive(ready[group])


def head_of(plan, arg, w):
    """The query head of the warpgroup's tile."""
    return first_head(plan, arg, w) + w.at[GROUP_HEAD]


def number_of_tile(plan, arg, w):
    """The number of the warpgroup's tile, w.at[TILE]; of a listed one, which that is the place of in its line."""
    return (
        tile_of_line(arg, line_of_head(plan, arg, w, head_of(plan, arg, w)), w.at[TILE]) if plan.listed else w.at[TILE]
    )


def needs_mask(plan, w, row):
    """Whether the warpgroup's tile, of the queries from `row` on, needs the mask."""
    return w.at[TILE] < w.full[0] if plan.listed else (row < w.full[0]) | (row + TILE_ROWS > w.full[1])


@T.macro
def probabilities(plan, arg, w, group):
    """P of a tile, and the operand of dV's product."""
    h, row = head_of(plan, arg, w), number_of_tile(plan, arg, w) * TILE_ROWS
    # The position of row 0 of the fragment, in which the second warpgroup's rows begin at 64.
    q_lo = row + arg.seqlen_k - arg.seqlen_q - group * TILE_ROWS
    scores = w.scores.at(
        b=w.task[BATCH],
        h=h,
        row=row - group * TILE_ROWS,
        q_lo=q_lo,
        k_lo=w.task[KEY],
        masked=needs_mask(plan, w, row),
    )
    scores_to_probabilities(plan, w, scores, w.lse2)
    for index in plan.kept:
        tile.weigh(w.kept[index], w.acc_s, scores)
    tile.mark_dropped(w.acc_s, scores, True)
    tile.copy_kept(w.acc_s, w.narrow, scores)


@T.macro
def times_slope(plan, arg, w, group):
    """dS of the scaled scores, from dS of the modified ones."""
    scores = w.scores
    if plan.slopes.program.slope.recomputed is not None:
        h = head_of(plan, arg, w)
        q_lo = number_of_tile(plan, arg, w) * TILE_ROWS + arg.seqlen_k - arg.seqlen_q - group * TILE_ROWS
        scores = w.scores.at(b=w.task[BATCH], h=h, q_lo=q_lo, k_lo=w.task[KEY])
    times_slope_in_place(plan, w, scores, w.narrow)


@T.macro
def own_tile(plan, arg, w, group, follows):
    """P and dS of one of the warpgroup's own tiles, and the product with one of them.

    Args:
        follows: whether the product of the other warpgroup's previous tile is still in flight.
    """
    multiply(plan, w, w.q_ready, group, OF_K, w.acc_s)
    if not plan.config.late_dp:
        multiply(plan, w, w.do_ready, group, OF_V, w.acc_dp)
    await_product(w.acc, 1 if plan.config.late_dp else 2)
    if follows:
        release(w, freed(w, group), 1 - group)
    await_product(w.acc_s, 0 if plan.config.late_dp else 1)
    probabilities(plan, arg, w, group)
    if plan.config.late_dp:
        T.barrier_wait(w.do_ready[group], w.at[OWN_PARITY])  # when dO is there, the stage's last P has been read
    write_out(w, group, OF_V, w.p_ready)
    if plan.config.late_dp:
        multiply(plan, w, w.do_ready, group, OF_V, w.acc_dp)
    if group == OF_V:
        add_product(plan, w, group, group, w.at[OWN_PARITY])
    await_product(w.acc_dp, 1 if group == OF_V else 0)
    if group == OF_K:
        release(w, w.do_free, group)
    gradients_of_scores(plan, w, w.scores, w.delta, w.narrow, lambda: times_slope(plan, arg, w, group))
    write_out(w, group, OF_K, w.ds_ready)
    if group == OF_K:
        add_product(plan, w, group, group, w.at[OWN_PARITY])
    await_product(w.acc, 0)
    release(w, freed(w, group), group)
    w.at[OWN_PARITY] = w.at[OWN_PARITY] ^ 1


@T.macro
def enter_head(plan, arg, w):
    """Computes the numbers that all tiles of a head share."""
    h = head_of(plan, arg, w)
    if plan.listed:
        line = T.alloc_var("int32", init=line_of_head(plan, arg, w, h))
        w.full[0] = mixed_of_line(arg, line)
        w.at[TILE] = 0
        w.at[END] = length_of_line(arg, line)
    else:
        full_lo, full_hi = w.visible.full_rows(w.task[BATCH], h, w.task[KEY], w.task[KEY] + TILE_ROWS - 1)
        w.full[0] = w.uniform(full_lo)
        w.full[1] = w.uniform(full_hi)
        w.at[TILE] = w.uniform(tiles_of_head(plan, w, h)[0])
        w.at[END] = w.uniform(tiles_of_head(plan, w, h)[1])
    if plan.slopes is not None:
        keep_uniforms(plan.slopes, w.scores.registers, w.emit, arg.scale, w.task[BATCH], h)
    if plan.call.dropout:
        dropout.enter_head(w.scores.pattern.words, arg, w.task[BATCH], h)


@T.macro
def to_next_tile(plan, arg, w):
    """Moves to the next tile of this head, or to the first of the next head that has one. There must be one."""
    w.at[TILE] = w.at[TILE] + 1
    while w.at[TILE] >= w.at[END]:
        w.at[GROUP_HEAD] = w.at[GROUP_HEAD] + 1
        enter_head(plan, arg, w)


@T.macro
def walk(plan, arg, w, group, count):
    """The loop of one warpgroup over all tiles of queries: its own and the other's both add to its gradient."""
    w.at[GROUP_HEAD] = -1
    w.at[TILE] = -1
    w.at[END] = -1
    w.at[OWN_PARITY] = 0
    w.at[OTHER_PARITY] = 0
    # The first tile is the first warpgroup's own: no tile of the other's comes before it.
    for turn in T.serial(T.truncdiv(count + 1 - group, 2)):
        if group + turn > 0:
            to_next_tile(plan, arg, w)
            add_product(plan, w, group, 1 - group, w.at[OTHER_PARITY])
            w.at[OTHER_PARITY] = w.at[OTHER_PARITY] ^ 1
        to_next_tile(plan, arg, w)
        own_tile(plan, arg, w, group, group + turn > 0)
    if (count > 0) & (T.truncmod(count + group, 2) == 0):
        # The last tile was the other warpgroup's.
        add_product(plan, w, group, 1 - group, w.at[OTHER_PARITY])
        await_product(w.acc, 0)


@T.macro
def store(plan, arg, w, gradient, group):
    """Stores dV or dK from the shared memory of V and K."""
    b, key, kv_h = w.task[BATCH], w.task[KEY], w.task[KV_HEAD]
    for p in T.unroll(plan.head_dim // PANEL):
        T.tma_copy(
            w.keys[group * TILE_ROWS : group * TILE_ROWS + TILE_ROWS, p * PANEL : p * PANEL + PANEL],
            gradient[b, key : key + TILE_ROWS, kv_h, p * PANEL : p * PANEL + PANEL],
            leader_scope_threads=WARPGROUP,
        )
    T.tma_store_wait(0)


@T.macro
def store_parts(plan, arg, w, parts, group, head_dim):
    """Stores a share's float32 part of dV or dK, straight from registers: the warpgroup's rows of the fragment."""
    b, key, first = w.task[BATCH], w.task[KEY], group * TILE_ROWS
    store_part(w.acc, parts, head_dim, b, key, w.share[PARTS], arg.seqlen_k, first, keeps_columns=True)


@T.macro
def consume(plan, arg, w):
    count = T.alloc_var("int32", init=0)
    for g in T.serial(head_count(plan, arg, w)):
        h = first_head(plan, arg, w) + g
        if plan.listed:
            count += length_of_line(arg, line_of_head(plan, arg, w, h))
        else:
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
    if plan.split:
        if w.group[0] == OF_V:
            store_parts(plan, arg, w, arg.dv, OF_V, plan.call.head_dim_v)
        else:
            store_parts(plan, arg, w, arg.dk, OF_K, plan.call.head_dim)
    else:
        T.sync_threads(KEYS_READ, CONSUMERS)
        T.copy(w.acc, w.keys)
        T.fence_proxy_async()
        T.sync_threads(KEYS_READ, CONSUMERS)
        if w.group[0] == OF_V:
            store(plan, arg, w, arg.dv, OF_V)
        else:
            store(plan, arg, w, arg.dk, OF_K)


def take_parts(plan: WidePlan, arg: Any, w: Any) -> None:
    """The roles of all warps."""

    def copy_queries(at: Any) -> None:
        copy_rows(plan, w, arg.q, OF_K, w.q_ready, at)
        copy_sums(arg, w, at)

    def copy_gradients(at: Any) -> None:
        copy_rows(plan, w, arg.do, OF_V, w.do_ready, at)

    def load_first() -> None:
        load_keys(arg, w, lambda k_b, v_b: copy_keys(plan, arg, w, k_b, v_b))
        load_rows(plan, arg, w, arg.q, w.q_ready, w.q_free, copy_queries, 2, TwoStages)

    def load_second() -> None:
        load_rows(plan, arg, w, arg.do, w.do_ready, w.do_free, copy_gradients, 2, TwoStages)

    def producers() -> None:
        load_in_two_warps(w, load_first, load_second)

    def consumers() -> None:
        consume(plan, arg, w)

    take_part(w, (PRODUCER_REGISTERS, CONSUMER_REGISTERS), producers, consumers)


def body(call: AttentionCall, config: HopperWideConfig, traced: Program) -> Any:
    """The macro that emits the kernel, given its parameters (see ``signature.declare_main``)."""
    plan = WidePlan(call, config, traced)

    @T.macro
    def kernel(arg):
        grid = places.blocks(arg, "seqlen_k", TILE_ROWS, arg.share_heads)
        with T.Kernel(grid, threads=CONSUMERS + WARPGROUP) as block:
            assume_filled(arg.operands)
            assume_aligned(arg.q.strides, arg.k.strides, arg.v.strides, arg.do.strides)
            at = places.find(arg, block, arg.share_heads, places.BY_TMA_BUT_PARTS if plan.split else places.BY_TMA)
            arg = at.arg
            mine = place_of(arg, at, "key_tiles", T.ceildiv(arg.seqlen_k, TILE_ROWS))
            thread = T.get_thread_binding()
            w = allocate(plan, arg, at, thread)
            w.task[BATCH] = at.uniform(at.number(mine.pair))
            w.task[KV_HEAD] = at.uniform(T.truncmod(mine.pair, arg.share_heads))
            if plan.split:
                take_share(arg, w)
            w.task[KEY] = at.uniform(T.truncdiv(mine.place, mine.side) * TILE_ROWS)
            T.annotate_layout({w.narrow: accumulator_layout(2 * TILE_ROWS, TILE_ROWS)})
            if at.exists:
                take_parts(plan, arg, w)

    return kernel
