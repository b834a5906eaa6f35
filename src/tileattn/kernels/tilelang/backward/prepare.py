"""The first kernel: two numbers for each row of queries, which the main kernel reads, and zeros in dq's sums.

    delta = rowsum(do * o) - dlse      0 in padding
    lse2 = lse * log2(e)               +inf in padding, and for a row that sees no key, whose lse is -inf
    dq_sum = 0

With lse2 = +inf all probabilities of a row, ``exp2(s - lse2)``, are 0, and so are the gradients computed from them.

Each block of threads takes about 64 rows of one head of one batch element, or of one packed sequence.
"""

from __future__ import annotations

from typing import Any

import tilelang.language as T

from ....call.facts import AttentionCall
from ..architecture import padded_finely
from ..tile import softmax
from ..tile.assume import assume_aligned
from . import places
from .config import Part

THREADS = 256


def body(call: AttentionCall, has_dlse: bool, clears: bool, part: Part) -> Any:
    """The macro that emits the kernel, given its parameters (see ``signature.declare_prepare``).

    Args:
        call: the forward call; its ``aligned`` is that of o and do.
        has_dlse: whether lse has a gradient.
        clears: whether the main kernel adds to dq's sums, which are set to 0 here.
        part: the part of a tile that a block takes.
    """
    rows = part.rows
    dtype = str(call.dtype).removeprefix("torch.")
    head_dim = padded_finely(call.head_dim)
    # A power of two, so that the threads share the rows evenly; the copy fills the other columns with zeros.
    columns = 1 << (call.head_dim_v - 1).bit_length()
    copy = {"disable_tma": True} | ({"coalesced_width": 4} if call.arch.startswith("gfx") else {})

    @T.macro
    def work(arg, at):
        seqlen_q, heads = arg.seqlen_q, arg.heads
        tiles = T.truncdiv(arg.padded_q, rows)
        if call.packed:
            tiles = T.ceildiv(seqlen_q, part.tile) * part.parts
        # [rows, columns]
        o = T.alloc_fragment([rows, columns], dtype)
        do = T.alloc_fragment([rows, columns], dtype)
        products = T.alloc_fragment([rows, columns], "float32")
        # [rows]
        delta = T.alloc_fragment([rows], "float32")
        lse2 = T.alloc_fragment([rows], "float32")
        if call.aligned:
            assume_aligned(arg.o.strides, arg.do.strides)
        row = T.alloc_var("int32", init=T.truncmod(at.block, tiles) * rows)
        h = T.alloc_var("int32", init=T.truncmod(T.truncdiv(at.block, tiles), heads))
        b = T.alloc_var("int32", init=at.number(T.truncdiv(at.block, tiles)))
        o_b, do_b = (T.alloc_var("int32", init=T.min(b, x.shape[0] - 1)) for x in (arg.o, arg.do))
        T.copy(arg.o[o_b, row : row + rows, h, 0:columns], o, **copy)
        T.copy(arg.do[do_b, row : row + rows, h, 0:columns], do, **copy)
        for i, d in T.Parallel(rows, columns):
            products[i, d] = T.cast(o[i, d], "float32") * T.cast(do[i, d], "float32")
        T.reduce_sum(products, delta, dim=1)
        if has_dlse:
            for i in T.Parallel(rows):
                if row + i < seqlen_q:
                    delta[i] -= arg.dlse[b, h, row + i]
        T.copy(delta, arg.delta[b, h, row : row + rows])
        for i in T.Parallel(rows):
            lse2[i] = T.infinity("float32")
            if row + i < seqlen_q:
                if arg.lse[b, h, row + i] != -T.infinity("float32"):
                    lse2[i] = arg.lse[b, h, row + i] * softmax.LOG2E
        T.copy(lse2, arg.lse2[b, h, row : row + rows])
        if clears:
            for i, d in T.Parallel(rows, head_dim):
                arg.dq_sum[b, h, row + i, d] = 0.0

    @T.macro
    def kernel(arg):
        with T.Kernel(places.blocks(arg, "padded_q", rows, arg.heads * part.parts), threads=THREADS) as block:
            at = places.find(arg, block, arg.heads * part.parts)
            if at.exists:
                work(at.arg, at)

    return kernel
