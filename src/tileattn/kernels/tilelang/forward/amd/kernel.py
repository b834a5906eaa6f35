"""The forward pass for AMD's CDNA 3 (gfx942: MI300X), after TileLang's FlashAttention on MI300X (examples/amd).

The arithmetic, including softmax, mask and score modifications, is the generic schedule's (generic.py). The schedule
differs:

    persistent tiles   ``num_split_q`` blocks for each (batch, head) pair; each takes every num_split_q-th tile of
                       queries, so that a block starts once and its instructions stay in the cache
    renumbered blocks  ``panel_size`` pairs at a time, so that the blocks of a pair, which read the same keys, run
                       together on the dies that share an L2 cache
    packed products    ``k_pack`` steps along the head dim are read from shared memory at a time
    no tile of O       in shared memory, which is small on this GPU: O is stored from registers
    wide copies        8 elements of a row at a time, for aligned tensors (see tile/amd.py)

The k-th turn of a block takes tile ``tiles - 1 - (split + k * num_split_q)``. The last tiles come first: under a causal
mask they see the most keys.

The kernel has not run on an MI300X; see docs/mi300x.md. Tests also lower it for NVIDIA's GPUs.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import tilelang.language as T
from tilelang.language.eager.builder import Builder

from .....call.facts import AttentionCall
from .....variant.program import Program, program
from ...tile import softmax
from ...tile.amd import aligned_rows
from ...tile.assume import assume_filled
from ...tile.expressions import Emitter
from ...tile.mask import Score, Visibility
from ...tile.variables import variable
from ..generic import GenericPlan, add_keys, alloc_tiles, enter_head
from ..signature import declare
from .config import AmdConfig


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
    """Options of a copy: `width` elements at a time for aligned tensors, else one."""
    return {"disable_tma": True, "coalesced_width": width if call.aligned else 1}


def body(call: AttentionCall, config: AmdConfig, traced: Program) -> Any:
    """The macro that emits the kernel, given its parameters."""
    packed = {"annotations": {"k_pack": config.k_pack}} if call.arch.startswith("gfx") and config.k_pack > 1 else {}
    score = Score(call, traced) if traced.score is not None else None
    qk_copy, v_copy = _copy(call, config.qk_coalesced_width), _copy(call, config.v_coalesced_width)
    plan = GenericPlan(call, config, score, qk_copy, v_copy, packed)
    block_M, block_N, head_dim, head_dim_v = config.block_M, config.block_N, plan.head_dim, plan.head_dim_v

    @T.macro
    def kernel(arg):
        seqlen_q, seqlen_k, heads, batch = arg.seqlen_q, arg.seqlen_k, arg.heads, arg.batch
        tiles = T.ceildiv(seqlen_q, block_M)
        side, splits = arg.side_by_side, arg.num_split_q
        # Pairs are in the second dimension of the grid; the third is for more pairs than the second can hold.
        with T.Kernel(splits, side, T.truncdiv(batch * heads, side), threads=config.threads) as (split, by, bz):
            T.use_swizzle(config.panel_size, enable=config.enable_rasterization)
            w = alloc_tiles(plan, False)
            assume_filled(arg.operands)
            h = variable(T.truncmod(bz * side + by, heads))
            b = variable(T.truncdiv(bz * side + by, heads))
            kv_h = variable(T.truncdiv(h, arg.heads_per_kv_head))
            q_b, k_b, v_b = (variable(T.min(b, tensor.shape[0] - 1)) for tensor in (arg.q, arg.k, arg.v))
            emit = Emitter(arg.operands)
            visible = Visibility(traced, emit, seqlen_k)
            head = enter_head(plan, arg, SimpleNamespace(b=b, h=h, emit=emit))

            turns = variable(T.truncdiv(tiles - split + splits - 1, splits))
            for turn in T.serial(turns):
                row = variable((tiles - 1 - split - turn * splits) * block_M)
                q_lo = row + seqlen_k - seqlen_q
                q_hi = T.min(q_lo + block_M, seqlen_k) - 1
                kv_lo, kv_hi = visible.kv_range(b, h, q_lo, q_hi)
                full_lo, full_hi = visible.full_range(b, h, q_lo, q_hi)
                first = variable(T.truncdiv(kv_lo, block_N))
                count = variable(T.max(T.ceildiv(kv_hi, block_N) - first, 0))
                # Q: [block_M, head_dim]
                T.copy(arg.q[q_b, row : row + block_M, h, 0:head_dim], w.q, **qk_copy)
                softmax.reset(w.m, w.l, w.acc_o)
                keys = SimpleNamespace(
                    b=b, h=h, row=row, q_lo=q_lo, visible=visible, k_b=k_b, v_b=v_b, kv_h=kv_h,
                    first=first, count=count, full_lo=full_lo, full_hi=full_hi,
                )  # fmt: skip
                add_keys(plan, arg, w, head, keys)

                if call.sink:
                    softmax.add_sink(w.m, w.l, w.alpha, w.base, arg.sink[h] * softmax.LOG2E, head.c, block_M)
                else:
                    T.fill(w.alpha, 1)
                softmax.finish(w.l, w.base, w.alpha, w.acc_o, block_M, head_dim_v, arg.weight)
                # Each thread holds four neighbouring columns of the product, and stores them directly.
                # O: [block_M, head_dim_v]
                T.copy(w.acc_o, arg.o[b, row : row + block_M, h, 0:head_dim_v], disable_tma=True)
                if call.return_lse:
                    # lse: [block_M]
                    T.copy(w.l, arg.lse[b, h, row : row + block_M])

    return kernel
