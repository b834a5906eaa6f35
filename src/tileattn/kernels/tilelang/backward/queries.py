"""dq alone, generic schedule: without atomic operations, for ``deterministic=True``.

Each block of threads owns one tile of ``block_M`` queries. It loops over the tiles of keys that they may see, as the
forward pass does, and keeps dq in registers:

    S = Q K^T, P = exp2(..)        see tile.py
    dP = dO V^T, dS = P * (dP - delta) * slope
    dQ += dS K

The kernel for dk and dv has computed S and dP already; the backward pass has seven products instead of five this way.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import tilelang.language as T

from ....call.facts import AttentionCall
from ....variant.program import Program
from ..architecture import padded_finely
from ..tile import dropout, softmax
from ..tile.assume import assume_aligned, assume_filled
from ..tile.mask import keep_uniforms
from ..tile.softmax import ROWS
from ..tile.variables import address_holder, holder
from . import places, tile
from .config import BackwardConfig, copy_options, store_options
from .plan import BackwardPlan
from .visible import Viewers


class GenericQueriesPlan(BackwardPlan):
    """The static facts of one kernel, from which its macros choose what they emit.

    Attributes:
        copy, store: options of copies of tiles, from and to the caller's tensors.
        held, held_address: store a number in a variable.
    """

    def __init__(self, call: AttentionCall, config: BackwardConfig, traced: Program) -> None:
        super().__init__(call, config, traced)
        self.block_M, self.block_N = config.block_M, config.block_N
        self.head_dim, self.head_dim_v = padded_finely(call.head_dim), padded_finely(call.head_dim_v)
        self.copy, self.store = copy_options(call), store_options(call)
        self.held, self.held_address = holder(call), address_holder(call)


@T.macro
def allocate(plan):
    """The tiles. Names that end in `_shared` are in shared memory, the others in registers."""
    # [block_M, head_dim]
    q_shared = T.alloc_shared([plan.block_M, plan.head_dim], plan.dtype)
    # [block_M, head_dim_v]
    do_shared = T.alloc_shared([plan.block_M, plan.head_dim_v], plan.dtype)
    # [block_N, head_dim]
    k_shared = T.alloc_shared([plan.block_N, plan.head_dim], plan.dtype)
    # [block_N, head_dim_v]
    v_shared = T.alloc_shared([plan.block_N, plan.head_dim_v], plan.dtype)
    # [block_M, head_dim]
    dq_shared = T.alloc_shared([plan.block_M, plan.head_dim], plan.dtype)
    # [block_M, block_N]
    acc_s = T.alloc_fragment([plan.block_M, plan.block_N], "float32")
    acc_dp = T.alloc_fragment([plan.block_M, plan.block_N], "float32")
    kept = [T.alloc_fragment([plan.block_M, plan.block_N], "float32") for _ in plan.kept]
    ds = T.alloc_fragment([plan.block_M, plan.block_N], plan.dtype)
    # [block_M, head_dim]
    acc_dq = T.alloc_fragment([plan.block_M, plan.head_dim], "float32")
    # [block_M]
    lse2 = T.alloc_fragment([plan.block_M], "float32")
    delta = T.alloc_fragment([plan.block_M], "float32")
    return SimpleNamespace(
        q_shared=q_shared, do_shared=do_shared, k_shared=k_shared, v_shared=v_shared, dq_shared=dq_shared, acc_s=acc_s,
        acc_dp=acc_dp, kept=kept, ds=ds, acc_dq=acc_dq, lse2=lse2, delta=delta,
    )  # fmt: skip


@T.macro
def find_task(plan, arg, at):
    """The block's tile of queries, and the tiles of keys that it loops over."""
    seqlen_q, seqlen_k, heads = arg.seqlen_q, arg.seqlen_k, arg.heads
    query_tiles = T.ceildiv(seqlen_q, plan.block_M)
    assume_filled(arg.operands)
    if plan.call.aligned:
        assume_aligned(arg.q.strides, arg.k.strides, arg.v.strides, arg.do.strides)
    # Blocks start with the last tiles: under a causal mask they see the most keys.
    row = T.alloc_var("int32", init=(query_tiles - 1 - T.truncmod(at.block, query_tiles)) * plan.block_M)
    h = T.alloc_var("int32", init=T.truncmod(T.truncdiv(at.block, query_tiles), heads))
    b = T.alloc_var("int32", init=at.number(T.truncdiv(at.block, query_tiles)))
    kv_h = plan.held_address(T.truncdiv(h, arg.heads_per_kv_head))
    q_b, k_b, v_b, do_b = (plan.held_address(T.min(b, tensor.shape[0] - 1)) for tensor in (arg.q, arg.k, arg.v, arg.do))
    q_lo = row + seqlen_k - seqlen_q
    q_hi = T.min(q_lo + plan.block_M, seqlen_k) - 1
    emit = tile.TileEmitter(arg.operands)
    visible = Viewers(plan.traced, emit, seqlen_q, seqlen_k)
    kv_lo, kv_hi = visible.kv_range(b, h, q_lo, q_hi)
    full_lo, full_hi = (plan.held(bound) for bound in visible.full_range(b, h, q_lo, q_hi))
    first = plan.held(T.truncdiv(kv_lo, plan.block_N))
    # With TMA at least one tile, masked as a whole if no key is visible: the wait for Q is in the loop.
    count = plan.held(T.max(T.ceildiv(kv_hi, plan.block_N) - first, at.least_tiles))
    return SimpleNamespace(
        row=row, h=h, b=b, kv_h=kv_h, q_b=q_b, k_b=k_b, v_b=v_b, do_b=do_b, q_lo=q_lo, emit=emit, visible=visible,
        full_lo=full_lo, full_hi=full_hi, first=first, count=count,
    )  # fmt: skip


def is_masked(plan: GenericQueriesPlan, arg: Any, task: Any, k_lo: Any) -> Any:
    """Whether some row of the block does not see all keys of a tile, or is beyond the last query."""
    past_end = task.row + plan.block_M > arg.seqlen_q
    return (k_lo < task.full_lo) | (k_lo + plan.block_N > task.full_hi) | past_end


@T.macro
def compute_probabilities(plan, arg, w, task, c, scores):
    """S and P of a tile."""
    T.copy(
        arg.k[task.k_b, scores.k_lo : scores.k_lo + plan.block_N, task.kv_h, 0 : plan.head_dim],
        w.k_shared,
        **plan.copy,
    )
    T.gemm(w.q_shared, w.k_shared, w.acc_s, transpose_B=True, clear_accum=True, policy=ROWS)
    if plan.slopes is not None:
        tile.modify(w.acc_s, w.kept, scores)
    if scores.masked:
        tile.hide(w.acc_s, scores)
    tile.probabilities(w.acc_s, w.lse2, c if plan.slopes is None else softmax.LOG2E, scores)
    tile.mark_dropped(w.acc_s, scores, False)
    for index in plan.kept:
        tile.weigh(w.kept[index], w.acc_s, scores)


@T.macro
def add_dq(plan, arg, w, task, scores):
    """dP and dS of a tile, and its part of dQ."""
    T.copy(
        arg.v[task.v_b, scores.k_lo : scores.k_lo + plan.block_N, task.kv_h, 0 : plan.head_dim_v],
        w.v_shared,
        **plan.copy,
    )
    T.gemm(w.do_shared, w.v_shared, w.acc_dp, transpose_B=True, clear_accum=True, policy=ROWS)
    tile.drop_gradients(w.acc_s, w.acc_dp, scores)
    gradient = w.acc_s if plan.slopes is None else tile.kept_product(plan.slopes.program.slope, w.kept, w.acc_s)
    tile.score_gradients(gradient, w.acc_dp, w.delta, scores)
    if plan.slopes is not None and plan.slopes.program.slope.recomputed is not None:
        tile.times_recomputed(gradient, gradient, plan.slopes.program.slope.recomputed, scores)
    T.copy(gradient, w.ds)
    T.gemm(w.ds, w.k_shared, w.acc_dq, policy=ROWS)


@T.macro
def work(plan, arg, at):
    """The work of one block."""
    w = allocate(plan)
    task = find_task(plan, arg, at)
    rows = slice(task.row, task.row + plan.block_M)
    T.copy(arg.q[task.q_b, rows, task.h, 0 : plan.head_dim], w.q_shared, **plan.copy)
    T.copy(arg.do[task.do_b, rows, task.h, 0 : plan.head_dim_v], w.do_shared, **plan.copy)
    T.copy(arg.lse2[task.b, task.h, rows], w.lse2)
    T.copy(arg.delta[task.b, task.h, rows], w.delta)
    T.fill(w.acc_dq, 0)
    shape = [plan.block_M, plan.block_N]
    kernel_scores = tile.score_tile(plan, arg, task.emit, task.visible, shape, keys_first=False)
    if plan.slopes is not None:
        keep_uniforms(plan.slopes, kernel_scores.registers, task.emit, arg.scale, task.b, task.h)
    if plan.call.dropout:
        dropout.enter_head(kernel_scores.pattern.words, arg, task.b, task.h)
    c = arg.scale * softmax.LOG2E
    for step in T.Pipelined(task.count, num_stages=plan.config.num_stages):
        k_lo = (task.first + step) * plan.block_N
        scores = kernel_scores.at(
            b=task.b, h=task.h, row=task.row, q_lo=task.q_lo, k_lo=k_lo, masked=is_masked(plan, arg, task, k_lo)
        )
        compute_probabilities(plan, arg, w, task, c, scores)
        add_dq(plan, arg, w, task, scores)
    for i, d in T.Parallel(plan.block_M, plan.head_dim):
        w.acc_dq[i, d] *= arg.scale
    T.copy(w.acc_dq, w.dq_shared)
    T.copy(w.dq_shared, arg.dq[task.b, rows, task.h, 0 : plan.head_dim], **plan.store)


def body(call: AttentionCall, config: BackwardConfig, traced: Program) -> Any:
    """The macro that emits the kernel, given its parameters (see ``signature.declare_queries``)."""
    plan = GenericQueriesPlan(call, config, traced)

    @T.macro
    def kernel(arg):
        with T.Kernel(places.blocks(arg, "seqlen_q", plan.block_M, arg.heads), threads=config.threads) as block:
            at = places.find(arg, block, arg.heads)
            if at.exists:
                work(plan, at.arg, at)

    return kernel
