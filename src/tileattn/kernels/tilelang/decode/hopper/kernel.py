"""Decoding, Hopper schedule: what the memory's bandwidth allows, by keeping loads in flight at all times.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import tilelang.language as T
from tilelang.language.eager.builder import Builder

from .....call.decoding import DecodeCall
from .....variant.program import program
from ...build.compile import OWN_BARRIERS, OWN_BOUNDS
from ...packed.dependent_launch import let_next_start, wait_for_previous
from ...tile import softmax
from ...tile.assume import assume_aligned, assume_filled
from ...tile.hopper import tile_layout
from ..signature import declare
from .config import HopperDecodeConfig
from .consumer import consume
from .plan import HopperDecodePlan
from .producer import produce


def hopper_kernel(call: DecodeCall, config: HopperDecodeConfig) -> Any:
    """The TileLang function ``decode``; its parameters are those of :func:`signature.declare`."""
    traced = program(call.variant)
    builder = Builder()
    with builder.prim_func("decode"):
        _kernel(HopperDecodePlan(call, config, traced), declare(builder, call, traced))
    # The barriers are placed by hand. No element outside of a tensor is accessed; proving so to TileLang took 30 s.
    return builder.get().with_attr(OWN_BARRIERS, True).with_attr(OWN_BOUNDS, True)


@T.macro
def _kernel(plan, arg):
    with T.Kernel(arg.workers, threads=plan.threads) as block:
        if plan.config.blocks > 1:
            T.annotate_min_blocks_per_sm(plan.config.blocks)
        assume_filled(arg.operands)
        assume_aligned(arg.q.strides, arg.k.strides, arg.v.strides)
        thread = T.get_thread_binding()
        q_shared = T.alloc_shared([plan.block_M, plan.head_dim], plan.dtype)
        k_shared = T.alloc_shared([plan.stages, plan.block_N, plan.head_dim], plan.dtype)
        v_shared = T.alloc_shared([plan.stages, plan.block_N, plan.head_dim_v], plan.dtype)
        w = SimpleNamespace(
            block=block,
            thread=thread,
            producer=thread - plan.consumers,
            lane=thread % 32,
            q=q_shared,
            k=k_shared,
            v=v_shared,
            at=T.alloc_local([2], "int32"),
            flag=T.alloc_shared([1], "int32", scope="shared"),
            entry=T.alloc_local([4], "int32"),
            pages=T.alloc_local([max(plan.boxes, 1)], "int32"),
            rows=T.alloc_local([max(plan.boxes, 1)], "int32"),
            **plan.alloc_barriers(),
            acc_s=T.alloc_fragment([plan.block_M, plan.block_N], "float32"),
            weights=T.alloc_fragment([plan.block_M, plan.block_N], plan.dtype),
            acc_o=T.alloc_fragment([plan.block_M, plan.head_dim_v], "float32"),
            m=T.alloc_fragment([plan.block_M], "float32"),
            l=T.alloc_fragment([plan.block_M], "float32"),
            alpha=T.alloc_fragment([plan.block_M], "float32"),
            base=T.alloc_fragment([plan.block_M], "float32"),
            sums=T.alloc_fragment([plan.block_M, 4], "float32"),
            min_alpha=T.alloc_fragment([plan.consumers], "float32"),
            sinks=T.alloc_fragment([plan.block_M], "float32") if plan.call.sink else None,
            row_head=T.alloc_fragment([plan.block_M], "int32"),
            row_pos=T.alloc_fragment([plan.block_M], "int32"),
            uniforms=plan.score.allocate() if plan.score is not None else None,
            row_uniforms=plan.score.allocate_rows(plan.block_M) if plan.score is not None else None,
        )
        T.annotate_layout(
            {
                w.q: tile_layout(w.q, plan.head_dim * 2),
                w.k: tile_layout(w.k, plan.head_dim * 2),
                w.v: tile_layout(w.v, plan.head_dim_v * 2),
                w.sums: softmax.own_columns_layout(plan.block_M),
                w.min_alpha: softmax.per_thread_layout(plan.consumers),
            }
        )
        wait_for_previous(plan.call.arch)
        let_next_start(plan.call.arch)
        if thread >= plan.consumers:
            produce(plan, arg, w)
        else:
            consume(plan, arg, w)
