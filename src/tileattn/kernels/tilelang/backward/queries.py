"""dq without atomic operations, for ``deterministic=True``: each block of threads owns a tile of queries.

It walks over the tiles of keys that the mask lets it see, as the forward pass does, and keeps dq in registers:

    S = Q K^T, P = exp2(..)        see tile.py
    dP = dO V^T, dS = P * (dP - delta) * slope
    dQ += dS K

S and dP are computed here once more: seven products instead of five in all.
"""

from __future__ import annotations

from typing import Any

import tilelang.language as T

from ....call.facts import AttentionCall
from ....variant.program import Program
from ..architecture import padded
from ..tile import dropout, softmax
from ..tile.assume import assume_aligned, assume_filled
from ..tile.mask import keep_uniforms
from ..tile.softmax import ROWS
from ..tile.variables import address_holder, holder
from . import places, tile
from .config import BackwardConfig, copy_options, store_options
from .visible import Viewers


def body(call: AttentionCall, config: BackwardConfig, traced: Program) -> Any:
    """The macro that emits the kernel, given its parameters (see ``signature.declare_queries``)."""
    block_M, block_N = config.block_M, config.block_N
    dtype = str(call.dtype).removeprefix("torch.")
    head_dim, head_dim_v = padded(call.head_dim), padded(call.head_dim_v)
    copy, store = copy_options(call), store_options(call)
    slopes = tile.Slopes(call, traced, ()) if traced.score is not None else None
    early_ones = tuple(range(len(slopes.program.early))) if slopes else ()
    held, held_address = holder(call), address_holder(call)

    @T.macro
    def work(arg, at):
        seqlen_q, seqlen_k, heads = arg.seqlen_q, arg.seqlen_k, arg.heads
        query_tiles = T.ceildiv(seqlen_q, block_M)
        q_shared = T.alloc_shared([block_M, head_dim], dtype)
        do_shared = T.alloc_shared([block_M, head_dim_v], dtype)
        k_shared = T.alloc_shared([block_N, head_dim], dtype)
        v_shared = T.alloc_shared([block_N, head_dim_v], dtype)
        dq_shared = T.alloc_shared([block_M, head_dim], dtype)
        acc_s = T.alloc_fragment([block_M, block_N], "float32")
        acc_dp = T.alloc_fragment([block_M, block_N], "float32")
        early = [T.alloc_fragment([block_M, block_N], "float32") for _ in early_ones]
        ds = T.alloc_fragment([block_M, block_N], dtype)
        acc_dq = T.alloc_fragment([block_M, head_dim], "float32")
        lse2 = T.alloc_fragment([block_M], "float32")
        delta = T.alloc_fragment([block_M], "float32")

        assume_filled(arg.operands)
        if call.aligned:
            assume_aligned(arg.q.strides, arg.k.strides, arg.v.strides, arg.do.strides)
        # The last tile, which a causal mask makes longest, first.
        row = T.alloc_var("int32", init=(query_tiles - 1 - T.truncmod(at.block, query_tiles)) * block_M)
        h = T.alloc_var("int32", init=T.truncmod(T.truncdiv(at.block, query_tiles), heads))
        b = T.alloc_var("int32", init=at.number(T.truncdiv(at.block, query_tiles)))
        kv_h = held_address(T.truncdiv(h, arg.heads_per_kv_head))
        q_b, k_b, v_b, do_b = (held_address(T.min(b, tensor.shape[0] - 1)) for tensor in (arg.q, arg.k, arg.v, arg.do))
        q_lo = row + seqlen_k - seqlen_q
        q_hi = T.min(q_lo + block_M, seqlen_k) - 1
        emit = tile.TileEmitter(arg.operands)
        visible = Viewers(traced, emit, seqlen_q, seqlen_k)
        kv_lo, kv_hi = visible.kv_range(b, h, q_lo, q_hi)
        full_lo, full_hi = (held(bound) for bound in visible.full_range(b, h, q_lo, q_hi))
        first = held(T.truncdiv(kv_lo, block_N))
        # By TMA at least one tile, all masked where nothing is visible: the loads of Q are waited for inside the loop.
        count = held(T.max(T.ceildiv(kv_hi, block_N) - first, at.least_tiles))

        T.copy(arg.q[q_b, row : row + block_M, h, 0:head_dim], q_shared, **copy)
        T.copy(arg.do[do_b, row : row + block_M, h, 0:head_dim_v], do_shared, **copy)
        T.copy(arg.lse2[b, h, row : row + block_M], lse2)
        T.copy(arg.delta[b, h, row : row + block_M], delta)
        T.fill(acc_dq, 0)
        registers = slopes.allocate() if slopes is not None else None
        if slopes is not None:
            keep_uniforms(slopes, registers, emit, arg.scale, b, h)
        pattern = tile.Pattern(arg, early_ones) if call.dropout else None
        if call.dropout:
            dropout.enter_head(pattern.words, arg, b, h)
        c = arg.scale * softmax.LOG2E
        for step in T.Pipelined(count, num_stages=config.num_stages):
            k_lo = (first + step) * block_N
            T.copy(arg.k[k_b, k_lo : k_lo + block_N, kv_h, 0:head_dim], k_shared, **copy)
            T.gemm(q_shared, k_shared, acc_s, transpose_B=True, clear_accum=True, policy=ROWS)
            if slopes is not None:
                tile.modify(acc_s, early, slopes, registers, emit, arg.scale, b, h, q_lo, k_lo, block_M, block_N, False)
            if (k_lo < full_lo) | (k_lo + block_N > full_hi) | (row + block_M > seqlen_q):
                tile.hide(acc_s, visible, b, h, q_lo, k_lo, block_M, block_N, False)
            tile.probabilities(acc_s, lse2, c if slopes is None else 1.0, block_M, block_N, False)
            tile.mark_dropped(acc_s, pattern, row, k_lo, block_M, block_N, False, False)
            for index in early_ones:
                tile.weigh(early[index], acc_s, block_M, block_N)
            T.copy(arg.v[v_b, k_lo : k_lo + block_N, kv_h, 0:head_dim_v], v_shared, **copy)
            T.gemm(do_shared, v_shared, acc_dp, transpose_B=True, clear_accum=True, policy=ROWS)
            tile.drop_gradients(acc_s, acc_dp, pattern, block_M, block_N, False)
            gradient = acc_s if slopes is None else tile.kept(slopes.program.slope, early, acc_s)
            tile.score_gradients(gradient, acc_dp, delta, block_M, block_N, False)
            if slopes is not None and slopes.program.slope.late is not None:
                tile.times_late(
                    gradient, gradient, slopes.program.slope.late, slopes, registers, emit, arg.scale, b, h,
                    q_lo, k_lo, block_M, block_N, False
                )  # fmt: skip
            T.copy(gradient, ds)
            T.gemm(ds, k_shared, acc_dq, policy=ROWS)

        for i, d in T.Parallel(block_M, head_dim):
            acc_dq[i, d] *= arg.scale
        T.copy(acc_dq, dq_shared)
        T.copy(dq_shared, arg.dq[b, row : row + block_M, h, 0:head_dim], **store)

    @T.macro
    def kernel(arg):
        with T.Kernel(places.blocks(arg, "seqlen_q", block_M, arg.heads), threads=config.threads) as block:
            at = places.find(arg, block, arg.heads)
            if at.exists:
                work(at.arg, at)

    return kernel
