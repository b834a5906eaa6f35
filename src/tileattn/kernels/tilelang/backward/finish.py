"""dq from its float32 sums: scaled, rounded, and brought into the order of q.

Each block of threads takes ``SMALL_ROWS`` rows of one head of one batch element.
"""

from __future__ import annotations

from typing import Any

import tilelang.language as T

from ....call import AttentionCall
from ..config import padded
from .config import SMALL_ROWS as ROWS

THREADS = 256
ROW_MAJOR = "row-major"  # the only order of the sums so far; a schedule may add its own


def body(call: AttentionCall, order: str) -> Any:
    """The macro that emits the kernel, given its parameters (see ``signature.declare_finish``).

    Args:
        call: of the forward pass.
        order: how the sums of a tile of rows lie in memory.
    """
    dtype = str(call.dtype).removeprefix("torch.")
    head_dim = padded(call.head_dim)
    if order != ROW_MAJOR:
        raise NotImplementedError(f"dq's sums in the order {order!r}")

    @T.macro
    def kernel(arg):
        tiles, heads = T.ceildiv(arg.seqlen_q, ROWS), arg.heads
        with T.Kernel(tiles * heads * arg.batch, threads=THREADS) as block:
            row = T.alloc_var("int32", init=T.truncmod(block, tiles) * ROWS)
            h = T.alloc_var("int32", init=T.truncmod(T.truncdiv(block, tiles), heads))
            b = T.alloc_var("int32", init=T.truncdiv(T.truncdiv(block, tiles), heads))
            sums = T.alloc_fragment([ROWS, head_dim], "float32")
            T.copy(arg.dq_sum[b, h, row : row + ROWS, 0:head_dim], sums)
            for i, d in T.Parallel(ROWS, head_dim):
                sums[i, d] *= arg.scale
            rounded = T.alloc_fragment([ROWS, head_dim], dtype)
            T.copy(sums, rounded)
            T.copy(rounded, arg.dq[b, row : row + ROWS, h, 0:head_dim])

    return kernel
