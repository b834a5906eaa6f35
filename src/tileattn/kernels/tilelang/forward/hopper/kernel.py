"""The forward pass, Hopper schedule: FlashAttention-3's warp specialisation (Shah et al. 2024, arXiv 2407.08608).

Persistent blocks, one per multiprocessor, draw tiles of ``block_M`` queries of one head from a common queue. In a block

    one producer warp    draws the next tile, computes which keys it may see, and writes both into a *message*, which
                         all warps read; it loads Q, then K and V tile by tile, by TMA;
    consumer warpgroups  own 64 query rows each; they multiply (wgmma), keep the softmax, and store O by TMA.

A bias, or another tensor that a score modification reads tile by tile, is loaded with K and signalled by K's barrier.
The consumers copy each tile to registers under S = Q K^T and then free it.

All warps run ahead as far as the barriers let them: while the consumers still finish one tile, Q and the first K and V
of the next are on their way, and O is stored under the next tile's arithmetic.

Every shared buffer has two mbarriers, ``ready`` (filled: the producer's 32 lanes and the bytes have arrived; for a
message its writer) and ``free`` (read: its readers have arrived). A barrier's phase flips each time it completes. The
n-th use of a buffer (n = 0, 1, ...) waits for ``ready`` with parity ``n % 2`` and for ``free`` with parity
``(n + 1) % 2``, which a fresh barrier lets pass. K and V have ``num_stages`` buffers each, so their use number n is
that of stage ``n % num_stages``, turn ``n // num_stages``.

One iteration of a consumer warpgroup, j being the tile of keys before; the tensor cores work under the softmax:

    tensor cores    |  S = Q K_j+1^T  |      O += P V_j       |                     |  S = Q K_j+2^T ...
    other units     |                 |  softmax of S(j+1)    |  O *= alpha, P = S  |
    K barriers      ^ready                 ^free, once the maximum is known
    V barriers          ^ready                                ^free

Tiles of visible keys are taken from the last to the first. Tiles that need the mask come before all others, in a loop
of their own, so that the main loop holds no mask.

With lists of tiles (tile_lists.py) a message names a line, from which all warps read the number of each tile. Lines are
sorted, so that long rows of tiles begin first (sorted_lists.py).

With ``cluster`` = 2, two blocks on neighbouring multiprocessors take neighbouring tiles of queries and share the keys:
the *leader*'s producer draws the tiles, sends the message to the *follower* too, and loads K and V into the shared
memory of both (TMA multicast), once both blocks' consumers have freed the stage. Half the bytes leave the L2 cache.

With ``ping_pong`` the warpgroups take turns in issuing their products, by named barriers, so that the softmax of one
runs under the products of another.

O is not rescaled while the row maximum has grown by at most ``rescale_threshold`` (in powers of two). Weights may then
exceed 1; the division by their sum at the end is exact all the same. Most rescaling is skipped this way.

Dropout: weights are added to the row's sum first and dropped then. The factor 1 / (1 - p) is applied when O is divided
by that sum. The pattern (dropout.py) is computed under P V, like the softmax; the words of a head are computed under a
tile's first product.

Packed sequences: the producer looks a ticket's task up in the work list (packed/tasks.py). The message says where the
task's sequence lies. Tensor maps (ragged.py) end loads and the store of O at the end of the sequence.

fp8: both products are taken in e4m3 and summed in float32. The matrix units read 8-bit operands only along the sum.
Therefore V comes transposed (transpose_fp8.py), with its keys in the order in which the threads hold the weights. The
descales of q and k join the scale; that of v joins the division by the row's sum. Weights are stored 2^4 times as
large, and the rescale threshold is at most 4: weights then stay within e4m3's 448, and those down to 2^-13 of a row's
largest are not lost.

Layouts: q, o (batch, seqlen_q, heads, .), k, v (batch, seqlen_k, kv_heads, .), strides of 16 bytes; lse (batch, heads,
seqlen_q). All sizes and strides are run-time values. Limits: sm_90a, head dims up to 256; see ``backend.refusal``.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import tilelang.language as T

from .....call.facts import AttentionCall
from .....variant.program import Program
from ...packed.dependent_launch import wait_for_previous
from ...packed.ragged import with_ragged_tensors
from ...tile import dropout, softmax
from ...tile.assume import assume_aligned, assume_filled
from ...tile.hopper import WARP, WARPGROUP, tile_layout
from ...tile.key_words import alloc_ranges, alloc_words, layouts
from ...tile.matrices import Words
from ..config import HopperConfig
from .consumer import consume
from .plan import HopperPlan
from .producer import produce


def body(call: AttentionCall, config: HopperConfig, traced: Program) -> Any:
    """The macro that emits the kernel, given its parameters (see signature.py)."""
    plan = HopperPlan(call, config, traced)
    alloc_weights = T.alloc_shared if config.weights_in_shared else T.alloc_fragment

    @T.macro
    def kernel(arg):
        with T.Kernel(
            arg.blocks, threads=plan.consumers + WARPGROUP, cluster_dims=plan.cluster if plan.cluster > 1 else None
        ) as block:
            assume_filled(arg.operands)
            assume_aligned(arg.q.strides, arg.k.strides, arg.v.strides, itemsize=plan.size)
            if plan.packed:
                wait_for_previous(call.arch)
                arg = with_ragged_tensors(arg)
            tile_shared, tile_registers = None, None
            if plan.copied is not None:
                assume_aligned(arg.operands[plan.copied.name].strides, itemsize=plan.copied_dtype.itemsize)
                kind = str(plan.copied_dtype).removeprefix("torch.")
                tile_shared = T.alloc_shared([plan.stages, plan.block_M, plan.block_N], kind)
                at = (plan.block_M, plan.block_N)
                tile_registers = Words(*at) if plan.tile_in_words else T.alloc_fragment([*at], kind)
            q_shared = T.alloc_shared([plan.block_M, plan.head_dim], plan.dtype)
            k_shared = T.alloc_shared([plan.stages, plan.block_N, plan.head_dim], plan.dtype)
            v_shared = T.alloc_shared([plan.stages, *plan.v_tile], plan.dtype)
            if plan.output_apart:
                o_shared = T.alloc_shared([plan.block_M, plan.head_dim_v], plan.out_dtype)
            else:
                o_shared = q_shared
            message = T.alloc_shared([plan.messages, plan.fields], "int32")
            thread = T.get_thread_binding()
            w = SimpleNamespace(
                q=q_shared,
                k=k_shared,
                v=v_shared,
                o=o_shared,
                message=message,
                task=T.alloc_local([plan.fields], "int32"),
                ticket=T.alloc_local([1], "int32"),
                total=T.alloc_local([1], "int32") if plan.packed else None,
                stage=T.alloc_local([4], "int32"),
                block=block,
                rank=T.block_rank_in_cluster() if plan.cluster > 1 else 0,
                thread=thread,
                **plan.alloc_barriers(),
                acc_s=T.alloc_fragment([plan.block_M, plan.block_N], "float32"),
                weights=alloc_weights([plan.block_M, plan.block_N], plan.dtype),
                acc_o=T.alloc_fragment([plan.block_M, plan.head_dim_v], "float32"),
                m=T.alloc_fragment([plan.block_M], "float32"),
                l=T.alloc_fragment([plan.block_M], "float32"),
                alpha=T.alloc_fragment([plan.block_M], "float32"),
                base=T.alloc_fragment([plan.block_M], "float32"),
                sums=T.alloc_fragment([plan.block_M, 4], "float32"),
                min_alpha=T.alloc_fragment([plan.consumers], "float32"),
                q_registers=T.alloc_fragment([plan.block_M, plan.head_dim], plan.dtype),
                tile=tile_shared,
                tile_registers=tile_registers,
                product=T.alloc_fragment([plan.block_M, plan.head_dim_v], "float32") if config.two_level else None,
                descaled=T.alloc_local([2], "float32") if plan.fp8 else None,
                uniforms=plan.score.allocate() if plan.score is not None else None,
                words=dropout.of_call(call),
                key_words=alloc_words(plan.block_M, plan.block_N) if config.mask_words or plan.bits else [],
                ranges=alloc_ranges(plan.block_M, plan.consumers) if plan.by_ranges else None,
            )
            _annotate_layouts(plan, config, w)
            if thread >= plan.consumers:
                T.set_max_nreg(config.producer_registers, 0)
                if thread < plan.consumers + WARP:
                    produce(plan, arg, w)
            else:
                T.set_max_nreg(config.consumer_registers(), 1)
                consume(plan, arg, w)
            if plan.cluster > 1:
                T.cluster_sync()  # a block must not leave while the other may still arrive on its barriers

    return kernel


def _annotate_layouts(plan: HopperPlan, config: HopperConfig, w: Any) -> None:
    """How the buffers lie in shared memory or over the threads, where the compiler would not choose it so."""
    if config.q_in_registers:
        T.annotate_layout({w.q: tile_layout(w.q, plan.head_dim * plan.size)})
    if config.weights_in_shared:
        T.annotate_layout({w.weights: tile_layout(w.weights, plan.block_N * plan.size)})
    if plan.copied is not None:
        T.annotate_layout({w.tile: tile_layout(w.tile, plan.block_N * plan.copied_dtype.itemsize)})
    if w.key_words:
        T.annotate_layout(layouts(w.key_words))
    if plan.by_ranges:
        T.annotate_layout(layouts([w.ranges.lows, w.ranges.highs, w.ranges.apart]))
        T.annotate_layout({w.ranges.any_apart: softmax.per_thread_layout(plan.consumers)})
    T.annotate_layout({w.sums: softmax.own_columns_layout(plan.block_M)})
    T.annotate_layout({w.min_alpha: softmax.per_thread_layout(plan.consumers)})
