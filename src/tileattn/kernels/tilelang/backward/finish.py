"""dq from its float32 sums: scaled, rounded, and brought into the order of q.

Each block of threads takes ``SMALL_ROWS`` rows of one head of one batch element, or one tile of the main kernel's.
"""

from __future__ import annotations

from typing import Any

import tilelang.language as T

from ....call import AttentionCall
from ..config import padded
from .config import SMALL_ROWS
from .layouts import product_layout, rows_layout
from .order import COLUMNS, RegisterOrder

THREADS = 256


def body(call: AttentionCall, order: RegisterOrder | None) -> Any:
    """The macro that emits the kernel, given its parameters (see ``signature.declare_finish``).

    Args:
        call: of the forward pass.
        order: how the sums of a tile lie in memory; None is row by row.
    """
    dtype = str(call.dtype).removeprefix("torch.")
    head_dim = padded(call.head_dim)
    rows = SMALL_ROWS if order is None else order.block_M

    @T.macro
    def kernel(arg):
        tiles, heads = T.ceildiv(arg.seqlen_q, rows), arg.heads
        with T.Kernel(tiles * heads * arg.batch, threads=THREADS) as block:
            tile = T.alloc_var("int32", init=T.truncmod(block, tiles))
            h = T.alloc_var("int32", init=T.truncmod(T.truncdiv(block, tiles), heads))
            b = T.alloc_var("int32", init=T.truncdiv(T.truncdiv(block, tiles), heads))
            rounded = T.alloc_fragment([rows, head_dim], dtype)
            dq_shared = T.alloc_shared([rows, head_dim], dtype)
            if order is None:
                sums = T.alloc_fragment([rows, head_dim], "float32")
                T.copy(arg.dq_sum[b, h, tile * rows : tile * rows + rows, 0:head_dim], sums)
                for i, d in T.Parallel(rows, head_dim):
                    rounded[i, d] = sums[i, d] * arg.scale
            else:
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
            T.copy(dq_shared, arg.dq[b, tile * rows : tile * rows + rows, h, 0:head_dim])

    return kernel
