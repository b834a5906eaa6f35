"""The forward pass, generic schedule: FlashAttention-2 (Dao 2023, arXiv 2307.08691) as one pipelined loop.

Each block of threads owns one tile of ``block_M`` queries of one head and walks over the tiles of ``block_N`` keys and
values that the mask lets it see:

    S = Q K^T                      tile of scores, in registers
    S = mask(score_mod(S))         the mask only where the tile is not wholly visible
    P, alpha = online softmax      see softmax.py
    P = drop(P)                    with dropout; see dropout.py
    O = alpha O + P V

``T.Pipelined`` loads the next tiles under the arithmetic: by TMA and a producer warp on sm_90 and later, by cp.async
before, by plain loads on AMD. Q stays in shared memory, which O reuses at the end.

Packed sequences: a block looks its tile up in the work list (packed/tasks.py), and sees its sequence's rows as
tensors of their own. There are as many blocks as the list may be long; those beyond its end have a tile without rows.

Layouts: q, o (batch, seqlen_q, heads, .), k, v (batch, seqlen_k, kv_heads, .), strided; lse (batch, heads, seqlen_q).
All sizes and strides are run-time values. Limits: head dims up to 256; see ``backend.refusal``.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import tilelang.language as T

from ....call.facts import AttentionCall
from ....variant.program import Program
from ..architecture import PRODUCER_REGISTERS, padded
from ..packed.dependent_launch import wait_for_previous
from ..packed.tasks import find_task, of_sequence, sink_of, task_count
from ..tile import dropout, softmax
from ..tile.assume import assume_aligned, assume_filled
from ..tile.expressions import Emitter
from ..tile.mask import Score, Visibility, apply_mask, apply_score, keep_uniforms
from ..tile.softmax import ROWS
from ..tile.variables import address_holder
from .config import ForwardConfig

if TYPE_CHECKING:
    from .amd.config import AmdConfig


@dataclass(frozen=True)
class GenericPlan:
    """The static facts of one kernel, from which its macros choose what they emit.

    Attributes:
        score: the score modification, or None.
        qk_copy, v_copy: options of the copies of Q and K, and of V, to shared memory.
        qk_product: options of Q K^T.
        head_dim, head_dim_v: as tiles hold them.
    """

    call: AttentionCall
    config: ForwardConfig | AmdConfig
    score: Score | None
    qk_copy: dict[str, Any]
    v_copy: dict[str, Any]
    qk_product: dict[str, Any]

    @property
    def head_dim(self) -> int:
        return padded(self.call.head_dim)

    @property
    def head_dim_v(self) -> int:
        return padded(self.call.head_dim_v)


def plan_of(call: AttentionCall, config: ForwardConfig, traced: Program) -> GenericPlan:
    """The generic schedule's."""
    # TileLang 0.1.15 cannot generate a guarded copy of more than four elements at once for AMD.
    width = {"coalesced_width": 4} if call.arch.startswith("gfx") else {}
    # Tensor maps are made by the host, which does not know where sequences end.
    copy = {"disable_tma": not call.aligned or call.packed} | width
    return GenericPlan(call, config, Score(call, traced) if traced.score is not None else None, copy, copy, {})


def body(call: AttentionCall, config: ForwardConfig, traced: Program) -> Any:
    """The macro that emits the kernel, given its parameters (see signature.py)."""
    plan = plan_of(call, config, traced)
    block_M, block_N, head_dim, head_dim_v = config.block_M, config.block_N, plan.head_dim, plan.head_dim_v
    held = address_holder(call)

    def element(b, tensor=None):
        """Of o and lse, or of a tensor that may be expanded. A sequence's rows are a batch of one."""
        if call.packed:
            return 0
        return b if tensor is None else held(T.min(b, tensor.shape[0] - 1))

    @T.macro
    def kernel(arg):
        seqlen_q, seqlen_k, heads, batch = arg.seqlen_q, arg.seqlen_k, arg.heads, arg.batch
        # Blocks start in the order of the first grid dimension, then the second: `side_by_side` heads, whose keys and
        # values fit into the L2 cache together, begin with their last query tiles, which a causal mask makes longest.
        tiles = T.ceildiv(seqlen_q, block_M)
        side = arg.side_by_side
        grid = (side, tiles, T.truncdiv(batch * heads, side))
        if call.packed:
            grid = ((arg.work.shape[0] - 1) * heads,)  # of the longest list that there can be
        with T.Kernel(*grid, threads=config.threads) as block:
            w = alloc_tiles(plan, True)
            if config.blocks_per_sm > 1:
                T.annotate_min_blocks_per_sm(config.blocks_per_sm)
                T.annotate_producer_reg_dealloc(PRODUCER_REGISTERS)
                T.annotate_consumer_reg_alloc(config.consumer_registers())
            assume_filled(arg.operands)
            if call.aligned:
                assume_aligned(arg.q.strides, arg.k.strides, arg.v.strides)
            # Held in variables: inlined wherever they are used, divisions would take the compiler most of its time.
            if call.packed:
                wait_for_previous(call.arch)
                b, h, row, q_start, seqlen_q, k_start, seqlen_k, _ = find_task(
                    arg, block, block_M, block < task_count(arg)
                )
                arg = of_sequence(arg, q_start, seqlen_q, k_start, seqlen_k)
            else:
                bx, by, bz = block
                h = T.alloc_var("int32", init=T.truncmod(bz * side + bx, heads))
                b = T.alloc_var("int32", init=T.truncdiv(bz * side + bx, heads))
                row = T.alloc_var("int32", init=(tiles - 1 - by) * block_M)
            kv_h = held(T.truncdiv(h, arg.heads_per_kv_head))
            q_lo = row + seqlen_k - seqlen_q
            q_hi = T.min(q_lo + block_M, seqlen_k) - 1

            emit = Emitter(arg.operands)
            visible = Visibility(traced, emit, seqlen_k)
            kv_lo, kv_hi = visible.kv_range(b, h, q_lo, q_hi)
            full_lo, full_hi = visible.full_range(b, h, q_lo, q_hi)
            first = held(T.truncdiv(kv_lo, block_N))
            # At least one tile, all masked where nothing is visible: the loads of Q are waited for inside the loop.
            count = T.max(T.ceildiv(kv_hi, block_N) - first, 1)

            q_b, k_b, v_b = (element(b, tensor) for tensor in (arg.q, arg.k, arg.v))
            # Q: [block_M, head_dim]
            T.copy(arg.q[q_b, row : row + block_M, h, 0:head_dim], w.q, **plan.qk_copy)
            softmax.reset(w.m, w.l, w.acc_o)
            head = enter_head(plan, arg, SimpleNamespace(b=b, h=h, emit=emit))
            keys = SimpleNamespace(
                b=b, h=h, row=row, q_lo=q_lo, visible=visible, k_b=k_b, v_b=v_b, kv_h=kv_h,
                first=first, count=count, full_lo=full_lo, full_hi=full_hi,
            )  # fmt: skip
            add_keys(plan, arg, w, head, keys)

            if call.sink:
                sink = sink_of(arg, h, k_start + seqlen_k) if call.packed else arg.sink[h]
                softmax.add_sink(w.m, w.l, w.alpha, w.base, sink * softmax.LOG2E, head.c, block_M)
            else:
                T.fill(w.alpha, 1)
            softmax.finish(w.l, w.base, w.alpha, w.acc_o, block_M, head_dim_v, arg.weight)
            # O: [block_M, head_dim_v]
            T.copy(w.acc_o, w.o)
            store = {"disable_tma": True} if call.packed else {}
            T.copy(w.o, arg.o[element(b), row : row + block_M, h, 0:head_dim_v], **store)
            if call.return_lse:
                # lse: [block_M]
                T.copy(w.l, arg.lse[element(b), h, row : row + block_M])

    return kernel


@T.macro
def alloc_tiles(plan, o_in_shared):
    """A block's tiles, and a number for each of its rows of queries."""
    block_M, block_N = plan.config.block_M, plan.config.block_N
    head_dim, head_dim_v = plan.head_dim, plan.head_dim_v
    dtype = str(plan.call.dtype).removeprefix("torch.")
    q_shared = T.alloc_shared([block_M, head_dim], dtype)
    k_shared = T.alloc_shared([block_N, head_dim], dtype)
    v_shared = T.alloc_shared([block_N, head_dim_v], dtype)
    o_shared = None
    if o_in_shared:
        o_shared = T.alloc_shared([block_M, head_dim_v], dtype)
    acc_s = T.alloc_fragment([block_M, block_N], "float32")
    weights = T.alloc_fragment([block_M, block_N], dtype)
    acc_o = T.alloc_fragment([block_M, head_dim_v], "float32")
    m = T.alloc_fragment([block_M], "float32")
    l = T.alloc_fragment([block_M], "float32")
    alpha = T.alloc_fragment([block_M], "float32")
    base = T.alloc_fragment([block_M], "float32")
    row_sum = T.alloc_fragment([block_M], "float32")
    return SimpleNamespace(
        q=q_shared, k=k_shared, v=v_shared, o=o_shared, acc_s=acc_s, weights=weights, acc_o=acc_o,
        m=m, l=l, alpha=alpha, base=base, row_sum=row_sum,
    )  # fmt: skip


@T.macro
def enter_head(plan, arg, task):
    """What the scores of a head share: uniform values of a modification, and the words of dropout.

    c: what the softmax multiplies scores by, within its exponent, to have powers of two.
    """
    c = arg.scale * softmax.LOG2E
    uniforms = None
    if plan.score is not None:
        uniforms = plan.score.allocate()
        keep_uniforms(plan.score, uniforms, task.emit, arg.scale, task.b, task.h)
        c = plan.score.log2_unit(uniforms)
    words = dropout.of_call(plan.call)
    if plan.call.dropout:
        dropout.enter_head(words, arg, task.b, task.h)
    return SimpleNamespace(emit=task.emit, uniforms=uniforms, words=words, c=c)


@T.macro
def add_keys(plan, arg, w, head, keys):
    """Adds the values of all tiles of keys that a tile of queries may see to O, and their weights to l.

    ``keys``: where both lie (b, h, row, q_lo; k_b, v_b, kv_h), the tiles [first, first + count), and the keys
    [full_lo, full_hi) that all queries see.
    """
    call, block_M, block_N = plan.call, plan.config.block_M, plan.config.block_N
    for step in T.Pipelined(keys.count, num_stages=plan.config.num_stages):
        k_lo = (keys.first + step) * block_N
        # K: [block_N, head_dim]
        T.copy(arg.k[keys.k_b, k_lo : k_lo + block_N, keys.kv_h, 0 : plan.head_dim], w.k, **plan.qk_copy)
        # S = Q K^T: [block_M, block_N]
        T.gemm(w.q, w.k, w.acc_s, transpose_B=True, clear_accum=True, policy=ROWS, **plan.qk_product)
        if plan.score is not None:
            apply_score(w.acc_s, plan.score, head.uniforms, head.emit, arg.scale, keys.b, keys.h, keys.q_lo, k_lo)
        if (k_lo < keys.full_lo) | (k_lo + block_N > keys.full_hi):
            apply_mask(w.acc_s, keys.visible, keys.b, keys.h, keys.q_lo, k_lo)
        softmax.update(w.acc_s, w.m, w.l, w.alpha, w.base, w.row_sum, head.c, block_M, block_N)
        if call.dropout:
            dropout.enter_tile(head.words, arg, keys.row, k_lo)
            dropout.drop(w.acc_s, w.acc_s, head.words, block_M, block_N)
        # P: [block_M, block_N]
        T.copy(w.acc_s, w.weights)
        softmax.rescale(w.acc_o, w.alpha, block_M, plan.head_dim_v)
        # V: [block_N, head_dim_v]
        T.copy(arg.v[keys.v_b, k_lo : k_lo + block_N, keys.kv_h, 0 : plan.head_dim_v], w.v, **plan.v_copy)
        # O += P V: [block_M, head_dim_v]
        T.gemm(w.weights, w.v, w.acc_o, policy=ROWS)
