"""The decode phase, Hopper schedule: split keys and packed query rows, at the speed of the memory.

Few queries read all keys and values once, so bytes in flight decide. Persistent blocks, one or two per multiprocessor,
walk over the parts of jobs that the plan deals to them (walk.py). In a block

    the producer      loads K and V tile by tile into `num_stages` stages: one warp by TMA, in boxes (the tile of a
                      contiguous cache, or what is sure to lie in one page), or some warps row by row (gather.py);
    one warpgroup     loads Q of a job, the 64 packed rows of one kv head, multiplies (wgmma), keeps the softmax, and
                      stores O; of a job that is cut, its part, which the last block to arrive merges (combine.py).

Producer and consumers read the plan by themselves, so that no message passes between them. The producer runs ahead,
also into the next job, as far as stages are free.

A stage of K, and one of V, has two mbarriers. ``ready``: the 32 lanes of the producer have arrived, and the bytes of
the boxes that they have announced; or, row by row, all threads of the producer, each with its copies
(cp.async.mbarrier.arrive.noinc). ``free``: one thread of the consumers has arrived, after the product that read the
stage. The n-th use of a stage waits for ``ready`` with parity ``n % 2``, and for ``free`` with parity ``(n + 1) % 2``,
which a fresh barrier lets pass. Both sides count stage and parity along (stages.py), over all parts of all jobs:

    producer    wait k_free | copy K -> k_ready | wait v_free | copy V -> v_ready
    consumers   wait k_ready | S = Q K^T, wait | k_free | softmax | wait v_ready | O += P V, wait | v_free

Within the consumers one named barrier, 128 threads: around the writing of Q, of cleared rows of V, and in the combine.

Rows of a tile without a key that the job sees may hold anything. Boxes without such keys are not loaded, and their
entries of the page table not followed; what the stage held remains. The scores there are replaced by -inf. Rows of V
are cleared before the product, for 0 * NaN is NaN: in shared memory by the consumers, in the first and the last tile of
a job's keys; row by row the producer copies zeros.

Programmatic dependent launch: a kernel's blocks start as those of the kernel before end, and wait before they read.

Bits: tiles lie at absolute multiples of block_N and are taken in ascending order, whatever the pages are; each row's
result depends on its own scores only. So with FixedSplit neither page size nor batch nor q_len change a bit, as long as
block_N is the same, which config.default decides by head dims alone.

Layouts: q, o (., ., heads, .), k, v (rows, tokens, kv_heads, .), strides of 16 bytes. All sizes and strides are
run-time values. Limits: sm_90a, head dims up to 256, 16-byte alignment.
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
        assume_aligned(arg.q.strides, arg.k.strides, arg.v.strides, arg.o.strides)
        thread = T.get_thread_binding()
        q_shared = T.alloc_shared([plan.block_M, plan.head_dim], plan.dtype)
        k_shared = T.alloc_shared([plan.stages, plan.block_N, plan.head_dim], plan.dtype)
        v_shared = T.alloc_shared([plan.stages, plan.block_N, plan.head_dim_v], plan.dtype)
        per_page = T.alloc_var("float32", init=1.0 / T.cast(T.max(arg.page_size, 1), "float32"))
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
            per_page=per_page,
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
