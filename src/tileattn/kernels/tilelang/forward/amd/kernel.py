"""The forward pass for AMD's CDNA 3 (gfx942: MI300X), after TileLang's FlashAttention on MI300X (examples/amd).

The arithmetic is that of the generic schedule (generic.py), whose softmax, mask and modifications it shares. What
differs is how the work is laid out:

    persistent tiles   ``num_split_q`` blocks for each (batch, head) pair; each walks over every num_split_q-th tile of
                       queries, so that a block starts once and its instructions stay in the cache
    renumbered blocks  ``panel_size`` pairs at a time, so that the blocks of a pair, which read the same keys, run
                       together on the dies that share an L2 cache
    packed products    ``k_pack`` steps along the head dim are read from shared memory at a time
    no tile of O       in shared memory, which on this machine is small: it is stored from registers
    wide copies        8 elements of a row at a time, for aligned tensors (see tensors.py)

The k-th turn of a block takes tile ``tiles - 1 - (split + k * num_split_q)``: the last, which a causal mask makes
longest, come first.

It has not run on an MI300X; see docs/mi300x.md. The same kernel is lowered for NVIDIA's GPUs, too, to be checked there.
"""

from __future__ import annotations

from typing import Any

import tilelang.language as T
from tilelang.language.eager.builder import Builder

from .....call.facts import AttentionCall
from .....variant.key import Program, program
from ...tile import dropout, softmax
from ...tile.expressions import Emitter
from ...tile.mask import Score, Visibility, apply_mask, apply_score, keep_uniforms
from ..config import padded
from ..generic import ROWS
from ..signature import assume_filled, declare
from .config import AmdConfig
from .tensors import aligned_rows


def amd_kernel(call: AttentionCall, config: AmdConfig) -> Any:
    """The TileLang function ``forward``: the parameters of :func:`signature.declare`, then ``num_split_q``."""
    traced = program(call.variant)
    builder = Builder()
    with builder.prim_func("forward"):
        arguments = declare(builder, call, traced, persistent=False)
        arguments.num_split_q = builder.prim_func_arg("num_split_q", T.int32())
        if call.aligned:
            arguments.q, arguments.k, arguments.v = map(aligned_rows, (arguments.q, arguments.k, arguments.v))
        body(call, config, traced)(arguments)
    return builder.get()


def _copy(call: AttentionCall, width: int) -> dict[str, Any]:
    """Elements at a time. Of rows that are not aligned one by one; of padded ones four, each seen to be within."""
    return {"disable_tma": True, "coalesced_width": width if call.aligned else 1}


def _variable(value: Any) -> Any:
    """Held in a variable: addresses that contain divisions take the compiler's prover most of its time."""
    return T.alloc_var("int32", init=value)


def body(call: AttentionCall, config: AmdConfig, traced: Program) -> Any:
    """The macro that emits the kernel, given its parameters."""
    block_M, block_N = config.block_M, config.block_N
    dtype = str(call.dtype).removeprefix("torch.")
    head_dim, head_dim_v = padded(call.head_dim), padded(call.head_dim_v)
    qk_copy, v_copy = _copy(call, config.qk_coalesced_width), _copy(call, config.v_coalesced_width)
    packed = {"annotations": {"k_pack": config.k_pack}} if call.arch.startswith("gfx") and config.k_pack > 1 else {}
    score = Score(call, traced) if traced.score is not None else None

    @T.macro
    def kernel(arg):
        seqlen_q, seqlen_k, heads, batch = arg.seqlen_q, arg.seqlen_k, arg.heads, arg.batch
        tiles = T.ceildiv(seqlen_q, block_M)
        side, splits = arg.side_by_side, arg.num_split_q
        # The pairs fill the second dimension; the third takes over where there are more than it holds.
        with T.Kernel(splits, side, T.truncdiv(batch * heads, side), threads=config.threads) as (split, by, bz):
            T.use_swizzle(config.panel_size, enable=config.enable_rasterization)
            q_shared = T.alloc_shared([block_M, head_dim], dtype)
            k_shared = T.alloc_shared([block_N, head_dim], dtype)
            v_shared = T.alloc_shared([block_N, head_dim_v], dtype)
            acc_s = T.alloc_fragment([block_M, block_N], "float32")
            weights = T.alloc_fragment([block_M, block_N], dtype)
            acc_o = T.alloc_fragment([block_M, head_dim_v], "float32")
            m = T.alloc_fragment([block_M], "float32")
            l = T.alloc_fragment([block_M], "float32")
            alpha = T.alloc_fragment([block_M], "float32")
            base = T.alloc_fragment([block_M], "float32")
            row_sum = T.alloc_fragment([block_M], "float32")

            assume_filled(arg.operands)
            h = _variable(T.truncmod(bz * side + by, heads))
            b = _variable(T.truncdiv(bz * side + by, heads))
            kv_h = _variable(T.truncdiv(h, arg.heads_per_kv_head))
            q_b, k_b, v_b = (_variable(T.min(b, tensor.shape[0] - 1)) for tensor in (arg.q, arg.k, arg.v))
            emit = Emitter(arg.operands)
            visible = Visibility(traced, emit, seqlen_k)
            c = arg.scale * softmax.LOG2E  # scores are scaled within the softmax's exponent
            if traced.score is not None:
                uniforms = score.allocate()
                keep_uniforms(score, uniforms, emit, arg.scale, b, h)
                c = score.log2_unit(uniforms)

            words = dropout.of_call(call)
            if call.dropout:
                dropout.enter_head(words, arg, b, h)

            turns = _variable(T.truncdiv(tiles - split + splits - 1, splits))
            for turn in T.serial(turns):
                row = _variable((tiles - 1 - split - turn * splits) * block_M)
                q_lo = row + seqlen_k - seqlen_q
                q_hi = T.min(q_lo + block_M, seqlen_k) - 1
                kv_lo, kv_hi = visible.kv_range(b, h, q_lo, q_hi)
                full_lo, full_hi = visible.full_range(b, h, q_lo, q_hi)
                first = _variable(T.truncdiv(kv_lo, block_N))
                count = _variable(T.max(T.ceildiv(kv_hi, block_N) - first, 0))
                T.copy(arg.q[q_b, row : row + block_M, h, 0:head_dim], q_shared, **qk_copy)
                softmax.reset(m, l, acc_o)
                for step in T.Pipelined(count, num_stages=config.num_stages):
                    k_lo = (first + step) * block_N
                    T.copy(arg.k[k_b, k_lo : k_lo + block_N, kv_h, 0:head_dim], k_shared, **qk_copy)
                    T.gemm(q_shared, k_shared, acc_s, transpose_B=True, clear_accum=True, policy=ROWS, **packed)
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
                    T.copy(arg.v[v_b, k_lo : k_lo + block_N, kv_h, 0:head_dim_v], v_shared, **v_copy)
                    T.gemm(weights, v_shared, acc_o, policy=ROWS)

                if call.sink:
                    softmax.add_sink(m, l, alpha, base, arg.sink[h] * softmax.LOG2E, c, block_M)
                else:
                    T.fill(alpha, 1)
                softmax.finish(l, base, alpha, acc_o, block_M, head_dim_v, arg.weight)
                # A thread of the matrix cores holds four neighbouring columns: stored as they are.
                T.copy(acc_o, arg.o[b, row : row + block_M, h, 0:head_dim_v], disable_tma=True)
                if call.return_lse:
                    T.copy(l, arg.lse[b, h, row : row + block_M])

    return kernel
