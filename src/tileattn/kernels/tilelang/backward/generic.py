"""dk, dv and dq's sums, generic schedule: FlashAttention-2's backward pass (Dao 2023, arXiv 2307.08691, algorithm 2).

Each block of threads owns one tile of ``block_N`` keys and values of one kv head. It loops over the query heads of the
group and, for each, over the tiles of ``block_M`` queries that may see its keys. Tiles of scores are transposed, with
keys in rows: P^T and dS^T can then be first operands straight from registers.

    S = K Q^T, P = exp2(..)        see tile.py
    dV += P dO
    dP = V dO^T, dS = P * (dP - delta) * slope
    dK += dS Q
    dQ += dS^T K                   added to float32 sums in memory, by atomic operations

The scale is applied at the end: to dk when it is stored, to dq in finish.py. dk and dv of a group of heads are summed
in registers. Where there are more warps than groups of 16 keys (wide heads), P and dS go through shared memory.

The tiles of all heads of a group are one loop, because a pipelined inner loop would be drained at each end. Every head
therefore has the same tiles: all of them where the mask's ranges depend on the head.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import tilelang.language as T
from tilelang.language.eager.builder import Builder

from ....call.facts import AttentionCall
from ....variant.program import Program
from ..architecture import padded_finely
from ..tile import dropout, softmax
from ..tile.assume import assume_aligned, assume_filled
from ..tile.mask import keep_uniforms
from ..tile.softmax import ROWS
from ..tile.variables import address_holder, holder
from . import places, tile
from .config import BackwardConfig, copy_options, store_options, value_columns
from .operand_gradients import BY_KEY, Path
from .operand_stores import add_to_sums, to_elements, write_out_sums
from .places import all_heads, heads_of_block, store_part
from .plan import BackwardPlan
from .visible import Viewers


class GenericKeysPlan(BackwardPlan):
    """The static facts of one kernel, from which its macros choose what they emit.

    Attributes:
        paths: the paths to the tensors whose gradients are wanted.
        sums_by_key: numbers the paths whose gradients are summed by key.
        adds_dq: whether this kernel adds up dq.
        copy, store: options of copies of tiles, from and to the caller's tensors.
        shared, policy: whether P and dS go through shared memory, and how the warps share their products.
        held, held_address: store a number in a variable.
    """

    def __init__(
        self, call: AttentionCall, config: BackwardConfig, traced: Program, paths: tuple[Path, ...], adds_dq: bool
    ) -> None:
        super().__init__(call, config, traced, paths)
        self.paths, self.adds_dq, self.split = paths, adds_dq, config.split
        self.block_M, self.block_N = config.block_M, config.block_N
        self.head_dim, self.head_dim_v = padded_finely(call.head_dim), value_columns(call, config)
        self.copy, self.store = copy_options(call), store_options(call)
        by_key = [index for index, path in enumerate(paths) if path.way == BY_KEY]
        self.sums_by_key = {index: number for number, index in enumerate(by_key)}
        self.shared = config.weights_shared(call)
        self.policy = T.GemmWarpPolicy.Square if self.shared else ROWS
        self.held, self.held_address = holder(call), address_holder(call)


@T.macro
def allocate(plan):
    """The tiles. Names that end in `_shared` are in shared memory, the others in registers."""
    # [block_N, head_dim]
    k_shared = T.alloc_shared([plan.block_N, plan.head_dim], plan.dtype)
    # [block_N, head_dim_v]
    v_shared = T.alloc_shared([plan.block_N, plan.head_dim_v], plan.dtype)
    # [block_M, head_dim]
    q_shared = T.alloc_shared([plan.block_M, plan.head_dim], plan.dtype)
    # [block_M, head_dim_v]
    do_shared = T.alloc_shared([plan.block_M, plan.head_dim_v], plan.dtype)
    # [block_M]
    lse2_shared = T.alloc_shared([plan.block_M], "float32")
    delta_shared = T.alloc_shared([plan.block_M], "float32")
    # [block_N, block_M]
    ds_shared = T.alloc_shared([plan.block_N, plan.block_M], plan.dtype)
    # [block_N, head_dim]
    dk_shared = T.alloc_shared([plan.block_N, plan.head_dim], plan.dtype)
    # [block_N, head_dim_v]
    dv_shared = T.alloc_shared([plan.block_N, plan.head_dim_v], plan.dtype)
    # [block_N, block_M]
    acc_s = T.alloc_fragment([plan.block_N, plan.block_M], "float32")
    acc_dp = T.alloc_fragment([plan.block_N, plan.block_M], "float32")
    kept = [T.alloc_fragment([plan.block_N, plan.block_M], "float32") for _ in plan.kept]
    # [block_N, head_dim]
    acc_dk = T.alloc_fragment([plan.block_N, plan.head_dim], "float32")
    # [block_N, head_dim_v]
    acc_dv = T.alloc_fragment([plan.block_N, plan.head_dim_v], "float32")
    # [block_M, head_dim]
    acc_dq = T.alloc_fragment([plan.block_M, plan.head_dim], "float32")
    # [block_N]
    sums = [T.alloc_fragment([plan.block_N], "float32") for _ in plan.sums_by_key]
    tile_sum = T.alloc_fragment([plan.block_N], "float32")
    # [block_N, block_M]
    if plan.shared:
        p = T.alloc_shared([plan.block_N, plan.block_M], plan.dtype)
        ds = ds_shared
    else:
        p = T.alloc_fragment([plan.block_N, plan.block_M], plan.dtype)
        ds = T.alloc_fragment([plan.block_N, plan.block_M], plan.dtype)
    return SimpleNamespace(
        k_shared=k_shared, v_shared=v_shared, q_shared=q_shared, do_shared=do_shared, lse2_shared=lse2_shared,
        delta_shared=delta_shared, ds_shared=ds_shared, dk_shared=dk_shared, dv_shared=dv_shared, acc_s=acc_s,
        acc_dp=acc_dp, kept=kept, acc_dk=acc_dk, acc_dv=acc_dv, acc_dq=acc_dq, sums=sums, tile_sum=tile_sum, p=p,
        ds=ds,
    )  # fmt: skip


@T.macro
def find_task(plan, arg, at):
    """The block's tile of keys, and the tiles of queries that it loops over."""
    seqlen_q, seqlen_k = arg.seqlen_q, arg.seqlen_k
    key_tiles = T.ceildiv(seqlen_k, plan.block_N)
    assume_filled(arg.operands)
    if plan.call.aligned:
        assume_aligned(arg.q.strides, arg.k.strides, arg.v.strides, arg.do.strides)
    # Stored in variables: divisions that are inlined at each use would take most of the compilation time.
    k_lo = T.alloc_var("int32", init=T.truncmod(at.block, key_tiles) * plan.block_N)
    kv_h = T.alloc_var("int32", init=T.truncmod(T.truncdiv(at.block, key_tiles), arg.share_heads))
    b = T.alloc_var("int32", init=at.number(T.truncdiv(at.block, key_tiles)))
    q_b, k_b, v_b, do_b = (plan.held_address(T.min(b, tensor.shape[0] - 1)) for tensor in (arg.q, arg.k, arg.v, arg.do))
    emit = tile.TileEmitter(arg.operands)
    visible = Viewers(plan.traced, emit, seqlen_q, seqlen_k)
    k_hi = k_lo + plan.block_N - 1
    walked = heads_of_block(arg, kv_h, plan.held) if plan.split else all_heads(arg, kv_h)
    first_head = walked.first_head
    row_lo, row_hi = visible.rows(b, first_head, k_lo, k_hi)
    if visible.differ_by_head:
        # One loop for all heads of the group: their tiles must be the same.
        alone = arg.heads_per_kv_head == 1
        row_lo, row_hi = T.if_then_else(alone, row_lo, 0), T.if_then_else(alone, row_hi, seqlen_q)
    # With TMA at least one tile, masked as a whole if no query sees the keys: the wait for K and V is in the loop.
    first = plan.held(T.truncdiv(T.min(row_lo, seqlen_q - 1), plan.block_M))
    tiles = plan.held(T.max(T.ceildiv(row_hi, plan.block_M) - first, at.least_tiles))
    first_position = seqlen_k - seqlen_q
    full_rows = None
    if not visible.differ_by_head:
        full_lo, full_hi = (plan.held(bound) for bound in visible.full_rows(b, first_head, k_lo, k_hi))
        full_rows = (full_lo, full_hi)
    return SimpleNamespace(
        b=b, kv_h=walked.kv_head, heads=walked.heads, number=kv_h, k_lo=k_lo, k_hi=k_hi, q_b=q_b, k_b=k_b, v_b=v_b,
        do_b=do_b, first_head=first_head, first=first, tiles=tiles, first_position=first_position, full_rows=full_rows,
        emit=emit, visible=visible,
    )  # fmt: skip


def is_masked(plan: GenericKeysPlan, task: Any, scores: tile.ScoreTile) -> Any:
    """Whether some query of a tile does not see all keys of the block."""
    full_lo, full_hi = task.full_rows or (
        Builder.current().bind(name, bound)
        for name, bound in zip(
            ("full_lo", "full_hi"), scores.visible.full_rows(scores.b, scores.h, scores.k_lo, task.k_hi), strict=True
        )
    )
    return (scores.row < full_lo) | (scores.row + plan.block_M > full_hi)


@T.macro
def compute_probabilities(plan, arg, w, task, c, scores):
    """S and P of a tile, and its part of dV."""
    # --- S, P
    T.copy(
        arg.q[task.q_b, scores.row : scores.row + plan.block_M, scores.h, 0 : plan.head_dim], w.q_shared, **plan.copy
    )
    T.gemm(w.k_shared, w.q_shared, w.acc_s, transpose_B=True, clear_accum=True, policy=plan.policy)
    T.copy(arg.lse2[scores.b, scores.h, scores.row : scores.row + plan.block_M], w.lse2_shared, **plan.copy)
    if plan.slopes is not None:
        keep_uniforms(plan.slopes, scores.registers, scores.emit, arg.scale, scores.b, scores.h)
        tile.modify(w.acc_s, w.kept, scores)
    if is_masked(plan, task, scores):
        tile.hide(w.acc_s, scores)
    tile.probabilities(w.acc_s, w.lse2_shared, c if plan.slopes is None else softmax.LOG2E, scores)
    # --- dV
    if plan.call.dropout:
        dropout.enter_head(scores.pattern.words, arg, scores.b, scores.h)
    tile.mark_dropped(w.acc_s, scores, False)
    tile.copy_kept(w.acc_s, w.p, scores)
    for index in plan.kept:
        tile.weigh(w.kept[index], w.acc_s, scores)
    T.copy(
        arg.do[task.do_b, scores.row : scores.row + plan.block_M, scores.h, 0 : plan.head_dim_v],
        w.do_shared,
        **plan.copy,
    )
    T.gemm(w.p, w.do_shared, w.acc_dv, policy=plan.policy)


@T.macro
def compute_gradients(plan, arg, w, scores, is_last):
    """dP and dS of a tile. acc_dp is reused for intermediate results when dP is no longer needed."""
    # --- dP, dS
    T.gemm(w.v_shared, w.do_shared, w.acc_dp, transpose_B=True, clear_accum=True, policy=plan.policy)
    T.copy(arg.delta[scores.b, scores.h, scores.row : scores.row + plan.block_M], w.delta_shared, **plan.copy)
    tile.drop_gradients(w.acc_s, w.acc_dp, scores)
    if plan.slopes is None or plan.slopes.probability_is_kept():
        tile.score_gradients(w.acc_s, w.acc_dp, w.delta_shared, scores)
    for index in plan.kept:
        tile.score_gradients(w.kept[index], w.acc_dp, w.delta_shared, scores)
    for index, path in enumerate(plan.paths):
        tensor_gradient(plan, arg, w, index, path, scores, is_last)
    if plan.slopes is None:
        T.copy(w.acc_s, w.ds)
    else:
        gradient = tile.kept_product(plan.slopes.program.slope, w.kept, w.acc_s)
        if plan.slopes.program.slope.recomputed is not None:
            tile.times_recomputed(w.acc_dp, gradient, plan.slopes.program.slope.recomputed, scores)
            gradient = w.acc_dp
        T.copy(gradient, w.ds)
    if not plan.shared:
        T.copy(w.ds, w.ds_shared)


@T.macro
def tensor_gradient(plan, arg, w, index, path, scores, is_last):
    """The gradient of a tensor that the modification reads. `is_last()`: whether this is the head's last tile."""
    factor = plan.slopes.program.loads[index]
    if factor.recomputed is not None:
        tile.times_recomputed(w.acc_dp, tile.kept_product(factor, w.kept, w.acc_s), factor.recomputed, scores)
    gradient = w.acc_dp if factor.recomputed is not None else tile.kept_product(factor, w.kept, w.acc_s)
    if path.way == BY_KEY:
        add_to_sums(gradient, w.tile_sum, w.sums[plan.sums_by_key[index]], plan.block_N)
        if is_last():
            write_out_sums(
                w.sums[plan.sums_by_key[index]], arg.written_out[index], scores.b, scores.h, scores.k_lo, plan.block_N
            )
    else:
        to_elements(gradient, arg.written_out[index], path, scores)


@T.macro
def add_products(plan, arg, w, scores):
    """A tile's parts of dK and dQ."""
    # --- dK, dQ
    T.gemm(w.ds, w.q_shared, w.acc_dk, policy=plan.policy)
    if plan.adds_dq:
        T.gemm(w.ds_shared, w.k_shared, w.acc_dq, transpose_A=True, clear_accum=True)
        for i, d in T.Parallel(plan.block_M, plan.head_dim):
            T.atomic_add(arg.dq_sum[scores.b, scores.h, scores.row + i, d], w.acc_dq[i, d])


@T.macro
def store(plan, arg, w, task):
    """Stores dK and dV; of a share of the heads, its float32 parts."""
    for i, d in T.Parallel(plan.block_N, plan.head_dim):
        w.acc_dk[i, d] *= arg.scale
    if plan.call.dropout:
        for i, d in T.Parallel(plan.block_N, plan.head_dim_v):
            w.acc_dv[i, d] *= arg.weight
    if plan.split:
        store_part(w.acc_dv, arg.dv, plan.call.head_dim_v, task.b, task.k_lo, task.number, arg.seqlen_k)
        store_part(w.acc_dk, arg.dk, plan.call.head_dim, task.b, task.k_lo, task.number, arg.seqlen_k)
    else:
        store_sums(plan, arg, w, task)


@T.macro
def store_sums(plan, arg, w, task):
    """Stores dK and dV, through shared memory."""
    T.copy(w.acc_dk, w.dk_shared)
    T.copy(
        w.dk_shared,
        arg.dk[task.b, task.k_lo : task.k_lo + plan.block_N, task.kv_h, 0 : plan.head_dim],
        **plan.store,
    )
    T.copy(w.acc_dv, w.dv_shared)
    T.copy(
        w.dv_shared,
        arg.dv[task.b, task.k_lo : task.k_lo + plan.block_N, task.kv_h, 0 : plan.head_dim_v],
        **plan.store,
    )


@T.macro
def work(plan, arg, at):
    """The work of one block."""
    w = allocate(plan)
    task = find_task(plan, arg, at)
    keys = slice(task.k_lo, task.k_lo + plan.block_N)
    T.copy(arg.k[task.k_b, keys, task.kv_h, 0 : plan.head_dim], w.k_shared, **plan.copy)
    T.copy(arg.v[task.v_b, keys, task.kv_h, 0 : plan.head_dim_v], w.v_shared, **plan.copy)
    T.fill(w.acc_dk, 0)
    T.fill(w.acc_dv, 0)
    for number in plan.sums_by_key.values():
        T.fill(w.sums[number], 0)
    c = arg.scale * softmax.LOG2E
    shape = [plan.block_N, plan.block_M]
    kernel_scores = tile.score_tile(plan, arg, task.emit, task.visible, shape, keys_first=True)
    for step in T.Pipelined(task.tiles * task.heads, num_stages=plan.config.num_stages):
        h = task.first_head + T.truncdiv(step, task.tiles)
        row = (task.first + T.truncmod(step, task.tiles)) * plan.block_M
        q_lo = row + task.first_position
        scores = kernel_scores.at(b=task.b, h=h, row=row, q_lo=q_lo, k_lo=task.k_lo)
        compute_probabilities(plan, arg, w, task, c, scores)
        compute_gradients(plan, arg, w, scores, lambda: T.truncmod(step, task.tiles) == task.tiles - 1)
        add_products(plan, arg, w, scores)
    store(plan, arg, w, task)


def body(call: AttentionCall, config: BackwardConfig, traced: Program, paths: tuple[Path, ...], adds_dq: bool) -> Any:
    """The macro that emits the kernel, given its parameters (see ``signature.declare_main``).

    Args:
        call: the forward call.
        config: the tile sizes.
        traced: the variant.
        paths: the paths to the tensors whose gradients are wanted.
        adds_dq: whether this kernel adds up dq.
    """
    plan = GenericKeysPlan(call, config, traced, paths, adds_dq)

    @T.macro
    def kernel(arg):
        with T.Kernel(places.blocks(arg, "seqlen_k", plan.block_N, arg.share_heads), threads=config.threads) as block:
            at = places.find(arg, block, arg.share_heads)
            if at.exists:
                work(plan, at.arg, at)

    return kernel
