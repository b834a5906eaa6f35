"""The last kernel: dq from its float32 sums, scaled, rounded, and in the order of q.

Each block of threads takes about 64 rows of one head of one batch element, or of one packed sequence. If the sums are
in the order of registers (hopper/dq_order.py), it takes one tile of the main kernel.
"""

from __future__ import annotations

from typing import Any

import tilelang.language as T

from ....call.facts import AttentionCall
from ..architecture import padded_finely
from . import places
from .config import Part, store_options
from .hopper.dq_order import COLUMNS, RegisterOrder
from .hopper.layouts import product_layout, rows_layout

THREADS = 256


def body(call: AttentionCall, order: RegisterOrder | None, part: Part) -> Any:
    """The macro that emits the kernel, given its parameters (see ``signature.declare_finish``).

    Args:
        call: the forward call.
        order: the order of a tile's sums in memory; None is row by row.
        part: the part of a tile that a block takes; with an order, the whole tile.
    """
    dtype = str(call.dtype).removeprefix("torch.")
    head_dim = padded_finely(call.head_dim)
    rows, store = part.rows, store_options(call)

    @T.macro
    def work(arg, at):
        tiles, heads = T.ceildiv(arg.seqlen_q, part.tile) * part.parts, arg.heads
        tile = T.alloc_var("int32", init=T.truncmod(at.block, tiles))
        h = T.alloc_var("int32", init=T.truncmod(T.truncdiv(at.block, tiles), heads))
        b = T.alloc_var("int32", init=at.number(T.truncdiv(at.block, tiles)))
        # [rows, head_dim]
        rounded = T.alloc_fragment([rows, head_dim], dtype)
        dq_shared = T.alloc_shared([rows, head_dim], dtype)
        if order is None:
            # [rows, head_dim]
            sums = T.alloc_fragment([rows, head_dim], "float32")
            T.copy(arg.dq_sum[b, h, tile * rows : tile * rows + rows, 0:head_dim], sums)
            for i, d in T.Parallel(rows, head_dim):
                rounded[i, d] = sums[i, d] * arg.scale
        else:
            # [block_M, head_dim], or transposed
            products = T.alloc_fragment(list(order.shape), "float32")
            T.annotate_layout({products: product_layout(order), rounded: rows_layout(order)})
            first = tile * (order.size // COLUMNS)
            for i, j in T.Parallel(*order.shape):
                products[i, j] = arg.dq_sum[b, h, first + order.place(i, j)[0], order.place(i, j)[1]]
            for i, j in T.Parallel(*order.shape):
                if order.transposed:
                    rounded[j, i] = products[i, j] * arg.scale
                else:
                    rounded[i, j] = products[i, j] * arg.scale
        T.copy(rounded, dq_shared)
        T.copy(dq_shared, arg.dq[b, tile * rows : tile * rows + rows, h, 0:head_dim], **store)

    @T.macro
    def kernel(arg):
        with T.Kernel(places.blocks(arg, "seqlen_q", rows, arg.heads * part.parts), threads=THREADS) as block:
            at = places.find(arg, block, arg.heads * part.parts)
            if at.exists:
                work(at.arg, at)

    return kernel
