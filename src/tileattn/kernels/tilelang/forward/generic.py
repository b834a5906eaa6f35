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

from typing import Any

import tilelang.language as T

from ....call.facts import AttentionCall
from ....variant.key import Program
from ..packed.dependent_launch import wait_for_previous
from ..packed.tasks import find_task, of_sequence, sink_of, task_count
from ..tile import dropout, softmax
from ..tile.expressions import Emitter
from ..tile.mask import Score, Visibility, apply_mask, apply_score, keep_uniforms
from .config import PRODUCER_REGISTERS, ForwardConfig, padded
from .signature import assume_aligned, assume_filled

ROWS = T.GemmWarpPolicy.FullRow  # each warp keeps whole rows of a tile, so that the softmax stays within it


def _has_no_producer(call: AttentionCall) -> bool:
    """Whether all warps run the same code; else TileLang gives the copies by TMA to a warpgroup of their own."""
    no_tma = call.arch.startswith("gfx") or call.arch in ("sm_80", "sm_86", "sm_87", "sm_89")
    return not call.aligned or call.packed or no_tma


def _variable(value: Any) -> Any:
    """Holds an integer in a variable.

    The compiler inlines other values wherever they are used. Addresses that contain divisions take its prover most of
    the time, and the kernel registers.
    """
    return T.alloc_var("int32", init=value)


def body(call: AttentionCall, config: ForwardConfig, traced: Program) -> Any:
    """The macro that emits the kernel, given its parameters (see signature.py)."""
    block_M, block_N = config.block_M, config.block_N
    dtype = str(call.dtype).removeprefix("torch.")
    head_dim, head_dim_v = padded(call.head_dim), padded(call.head_dim_v)
    # TileLang 0.1.15 cannot generate a guarded copy of more than four elements at once for AMD.
    width = {"coalesced_width": 4} if call.arch.startswith("gfx") else {}
    # Tensor maps are made by the host, which does not know where sequences end.
    copy = {"disable_tma": not call.aligned or call.packed} | width
    store = {"disable_tma": True} if call.packed else {}

    score = Score(call, traced) if traced.score is not None else None
    held = _variable if _has_no_producer(call) else (lambda value: value)

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
            q_shared = T.alloc_shared([block_M, head_dim], dtype)
            k_shared = T.alloc_shared([block_N, head_dim], dtype)
            v_shared = T.alloc_shared([block_N, head_dim_v], dtype)
            o_shared = T.alloc_shared([block_M, head_dim_v], dtype)
            acc_s = T.alloc_fragment([block_M, block_N], "float32")
            weights = T.alloc_fragment([block_M, block_N], dtype)
            acc_o = T.alloc_fragment([block_M, head_dim_v], "float32")
            m = T.alloc_fragment([block_M], "float32")
            l = T.alloc_fragment([block_M], "float32")
            alpha = T.alloc_fragment([block_M], "float32")
            base = T.alloc_fragment([block_M], "float32")
            row_sum = T.alloc_fragment([block_M], "float32")

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
                b, h, row, q_start, seqlen_q, k_start, seqlen_k = find_task(
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
            T.copy(arg.q[q_b, row : row + block_M, h, 0:head_dim], q_shared, **copy)
            softmax.reset(m, l, acc_o)
            c = arg.scale * softmax.LOG2E  # scores are scaled within the softmax's exponent
            if traced.score is not None:
                uniforms = score.allocate()
                keep_uniforms(score, uniforms, emit, arg.scale, b, h)
                c = score.log2_unit(uniforms)
            words = dropout.of_call(call)
            if call.dropout:
                dropout.enter_head(words, arg, b, h)
            for step in T.Pipelined(count, num_stages=config.num_stages):
                k_lo = (first + step) * block_N
                T.copy(arg.k[k_b, k_lo : k_lo + block_N, kv_h, 0:head_dim], k_shared, **copy)
                T.gemm(q_shared, k_shared, acc_s, transpose_B=True, clear_accum=True, policy=ROWS)
                if traced.score is not None:
                    apply_score(acc_s, score, uniforms, emit, arg.scale, b, h, q_lo, k_lo, block_M, block_N)
                if (k_lo < full_lo) | (k_lo + block_N > full_hi):
                    apply_mask(acc_s, visible, b, h, q_lo, k_lo, block_M, block_N)
                softmax.update(acc_s, m, l, alpha, base, row_sum, c, block_M, block_N)
                if call.dropout:
                    dropout.enter_tile(words, row, k_lo)
                    dropout.drop(acc_s, acc_s, words, block_M, block_N)
                T.copy(acc_s, weights)
                softmax.rescale(acc_o, alpha, block_M, head_dim_v)
                T.copy(arg.v[v_b, k_lo : k_lo + block_N, kv_h, 0:head_dim_v], v_shared, **copy)
                T.gemm(weights, v_shared, acc_o, policy=ROWS)

            if call.sink:
                sink = sink_of(arg, h, k_start + seqlen_k) if call.packed else arg.sink[h]
                softmax.add_sink(m, l, alpha, base, sink * softmax.LOG2E, c, block_M)
            else:
                T.fill(alpha, 1)
            softmax.finish(l, base, alpha, acc_o, block_M, head_dim_v, arg.weight)
            T.copy(acc_o, o_shared)
            T.copy(o_shared, arg.o[element(b), row : row + block_M, h, 0:head_dim_v], **store)
            if call.return_lse:
                T.copy(l, arg.lse[element(b), h, row : row + block_M])

    return kernel
