"""The forward kernel: FlashAttention-2's loop (Dao 2023, arXiv 2307.08691, algorithm 1).

A program has one tile of queries of one head and loops over tiles of keys. S = scale * Q K^T is in units of log2(e), so
that exp is exp2. For each row the program keeps the maximum m, the sum l, and the output O before division by l:

    m' = max(m, max(S)),   P = exp2(S - m'),   l' = exp2(m - m') l + sum(P),   O' = exp2(m - m') O + P V

Fully visible tiles have a loop of their own, which evaluates no mask. With lists of tiles (lists.py) the loops read the
number of each tile from the program's line, in which the tiles with a mask come first.

The kernel has more than ten arguments: Triton launches a kernel with each pointer and each size by itself.
"""

import triton
import triton.language as tl

from ..tile.lines import over_keys, step_of, tile_of
from ..tile.softmax import add_sink, divisor, natural_lse, unit_of, weights
from ..tile.tiles import (
    add_product,
    last_tile_and_head,
    load_tile,
    product,
    store_rows,
    store_tile,
    visible,
)


@triton.jit(do_not_specialize=["batch_step", "head_step", "numbers", "seqlen_q", "seqlen_k", "heads", "all_heads"])
def forward_kernel(
    q,
    k,
    v,
    o,
    lse,
    sink,
    tiles,
    counts,
    batch_step,
    head_step,
    tensors,
    numbers,
    scale,
    seqlen_q,
    seqlen_k,
    heads,
    heads_per_kv_head,
    all_heads,
    folds,
    q_strides,
    k_strides,
    v_strides,
    plan: tl.constexpr,
):
    """Writes o and, unless it is None, lse; one program for each tile of queries of each head.

    q, k and v are pointers with the strides of their first three dimensions, or descriptors: k and v where ``plan.tma``
    is not 0, q and o where ``plan.tma_q`` is not. o, lse and sink are contiguous; tensors and numbers are the variant's
    operands (tile/expressions.py). tiles, counts and steps are lists (tile/lines.py), or None.
    """
    first, bh = last_tile_and_head(seqlen_q, plan.block_M, folds)
    if first < 0 or bh >= all_heads:
        return
    b, h = bh // heads, bh % heads
    h_kv = h // heads_per_kv_head
    offset = seqlen_k - seqlen_q
    q_lo, q_hi = offset + first, offset + tl.minimum(first + plan.block_M, seqlen_q) - 1
    lists, operands = (tiles, counts, batch_step, head_step), (tensors, numbers)
    line, start, full_start, full_end, end = over_keys(lists, operands, b, h, first, q_lo, q_hi, seqlen_k, plan)

    # Q: [block_M, padded]
    q_tile = load_tile(q, q_strides, b, h, first, seqlen_q, plan.block_M, plan.head_dim, plan.padded, plan.tma_q, True)
    # [block_M, 1]
    q_positions = q_lo + tl.arange(0, plan.block_M)[:, None]
    # O: [block_M, padded_v], m, l: [block_M]
    acc = tl.full([plan.block_M, plan.padded_v], 0.0, tl.float32)
    m = tl.full([plan.block_M], -float("inf"), tl.float32)
    l = tl.full([plan.block_M], 0.0, tl.float32)
    keys = (k, v, k_strides, v_strides, b, h, h_kv, seqlen_k, scale, tensors, numbers, line)
    if plan.before:
        acc, m, l = attend(acc, m, l, q_tile, q_positions, start, full_start, keys, plan, True)
    if plan.within:
        acc, m, l = attend(acc, m, l, q_tile, q_positions, full_start, full_end, keys, plan, False)
    if plan.behind:
        acc, m, l = attend(acc, m, l, q_tile, q_positions, full_end, end, keys, plan, True)

    if sink is not None:
        acc, m, l = add_sink(acc, m, l, tl.load(sink + h).to(tl.float32) * unit_of(1.0, plan.natural), plan.natural)
    if lse is not None:
        store_rows(lse, natural_lse(m, l, plan.natural), bh, seqlen_q, first, plan.block_M)
    acc = acc / divisor(l)[:, None]
    if plan.tma_q:
        o.store([b, first, h * plan.padded_v], acc.to(o.dtype).reshape([1, plan.block_M, plan.padded_v]))
    else:
        store_tile(o, acc, seqlen_q, heads, b, h, first, plan.block_M, plan.head_dim_v, plan.padded_v)


@triton.jit
def attend(acc, m, l, q_tile, q_positions, start, end, keys, plan: tl.constexpr, masked: tl.constexpr):
    """Adds the tiles of keys of the steps from start to end to the output, the maxima and the sums."""
    k, v, k_strides, v_strides, b, h, h_kv, seqlen_k, scale, tensors, numbers, line = keys
    unit = unit_of(scale, plan.natural)
    if plan.score is not None:
        unit = unit_of(1.0, plan.natural)
    ahead = tile_of(start, end, line, plan.block_N, plan)
    for at in tl.range(start, end, plan.step_N, warp_specialize=plan.warp_specialize):
        first, ahead = step_of(at, ahead, end, line, plan.block_N, plan)
        # K: [block_N, padded]
        k_tile = load_tile(
            k, k_strides, b, h_kv, first, seqlen_k, plan.block_N, plan.head_dim, plan.padded, plan.tma, masked
        )
        # S = Q K^T: [block_M, block_N]
        s = product(q_tile, k_tile.T, plan.precision)
        # [1, block_N]
        k_positions = first + tl.arange(0, plan.block_N)[None, :]
        if plan.score is not None:
            s = plan.score(s * scale, b, h, q_positions, k_positions, tensors, numbers)
        if masked:
            s = tl.where(visible(plan, b, h, q_positions, k_positions, seqlen_k, tensors, numbers), s, -float("inf"))
        p, alpha, m, l = weights(s, m, l, unit, plan.natural)
        acc = acc * alpha[:, None]
        # V: [block_N, padded_v]
        v_tile = load_tile(
            v, v_strides, b, h_kv, first, seqlen_k, plan.block_N, plan.head_dim_v, plan.padded_v, plan.tma, masked
        )
        # O += P V: [block_M, padded_v]
        acc = add_product(p, v_tile, acc, plan.precision)
    return acc, m, l
