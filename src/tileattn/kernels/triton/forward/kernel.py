"""The forward kernel: FlashAttention-2's loop (Dao 2023, arXiv 2307.08691, algorithm 1).

A program has one tile of queries of one head, and walks over tiles of keys. With S = scale * Q K^T in units of log2(e),
so that exp is exp2, it keeps for each row the maximum m, the sum l and the output, not yet divided by l:

    m' = max(m, max(S)),   P = exp2(S - m'),   l' = exp2(m - m') l + sum(P),   O' = exp2(m - m') O + P V

Tiles that all queries see run in a loop of their own, which computes no mask.

The kernel has more than ten arguments: Triton launches a kernel with each pointer and each size by itself.
"""

import triton
import triton.language as tl

from ..tile.tiles import (
    LOG2E,
    add_product,
    last_tile_and_head,
    load_tile,
    phases,
    product,
    store_rows,
    store_tile,
    visible,
)

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit(do_not_specialize=["numbers", "seqlen_q", "seqlen_k", "heads", "all_heads"])
def forward_kernel(
    q,
    k,
    v,
    o,
    lse,
    sink,
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
    operands (tile/expressions.py).
    """
    first, bh = last_tile_and_head(seqlen_q, plan.block_M, folds)
    if first < 0 or bh >= all_heads:
        return
    b, h = bh // heads, bh % heads
    h_kv = h // heads_per_kv_head
    offset = seqlen_k - seqlen_q
    q_lo, q_hi = offset + first, offset + tl.minimum(first + plan.block_M, seqlen_q) - 1
    start, full_start, full_end, end = phases(
        plan.any_range(b, h, q_lo, q_hi, seqlen_k, tensors, numbers),
        plan.full_range(b, h, q_lo, q_hi, seqlen_k, tensors, numbers),
        0,
        seqlen_k,
        plan.block_N,
    )

    q_tile = load_tile(q, q_strides, b, h, first, seqlen_q, plan.block_M, plan.head_dim, plan.padded, plan.tma_q, True)
    positions = q_lo + tl.arange(0, plan.block_M)[:, None]
    acc = tl.full([plan.block_M, plan.padded_v], 0.0, tl.float32)
    m = tl.full([plan.block_M], -float("inf"), tl.float32)
    l = tl.full([plan.block_M], 0.0, tl.float32)
    keys = (k, v, k_strides, v_strides, b, h, h_kv, seqlen_k, scale, tensors, numbers)
    if plan.before:
        acc, m, l = attend(acc, m, l, q_tile, positions, start, full_start, keys, plan, True)
    if plan.within:
        acc, m, l = attend(acc, m, l, q_tile, positions, full_start, full_end, keys, plan, False)
    if plan.behind:
        acc, m, l = attend(acc, m, l, q_tile, positions, full_end, end, keys, plan, True)

    if sink is not None:
        logit = tl.load(sink + h).to(tl.float32) * LOG2E
        m_new = finite(tl.maximum(m, logit))
        alpha = tl.exp2(m - m_new)
        l = l * alpha + tl.exp2(logit - m_new)
        acc = acc * alpha[:, None]
        m = m_new
    if lse is not None:
        store_rows(lse, (m + tl.log2(l)) * LN2, bh, seqlen_q, first, plan.block_M)
    # A sum of 0 is that of a row without keys; an infinite one makes o NaN, whatever an infinite sink has left of it.
    acc = acc / tl.where(l == 0, 1.0, tl.where(l == float("inf"), float("nan"), l))[:, None]
    if plan.tma_q:
        o.store([b, first, h * plan.padded_v], acc.to(o.dtype).reshape([1, plan.block_M, plan.padded_v]))
    else:
        store_tile(o, acc, seqlen_q, heads, b, h, first, plan.block_M, plan.head_dim_v, plan.padded_v)


@triton.jit
def attend(acc, m, l, q_tile, positions, start, end, keys, plan: tl.constexpr, masked: tl.constexpr):
    """The tiles of keys from start to end."""
    k, v, k_strides, v_strides, b, h, h_kv, seqlen_k, scale, tensors, numbers = keys
    unit = scale * LOG2E  # of s
    if plan.score is not None:
        unit = LOG2E
    for first in tl.range(start, end, plan.block_N, warp_specialize=plan.warp_specialize):
        first = tl.multiple_of(first, plan.block_N)
        k_tile = load_tile(
            k, k_strides, b, h_kv, first, seqlen_k, plan.block_N, plan.head_dim, plan.padded, plan.tma, masked
        )
        s = product(q_tile, k_tile.T, plan.precision)
        at = first + tl.arange(0, plan.block_N)[None, :]
        if plan.score is not None:
            s = plan.score(s * scale, b, h, positions, at, tensors, numbers)
        if masked:
            s = tl.where(visible(plan, b, h, positions, at, seqlen_k, tensors, numbers), s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, 1) * unit)
        shift = finite(m_new)
        p = tl.exp2(s * unit - shift[:, None])
        alpha = tl.exp2(m - shift)
        l = l * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        v_tile = load_tile(
            v, v_strides, b, h_kv, first, seqlen_k, plan.block_N, plan.head_dim_v, plan.padded_v, plan.tma, masked
        )
        acc = add_product(p, v_tile, acc, plan.precision)
        m = m_new
    return acc, m, l


@triton.jit
def finite(m):
    """The maximum, or 0 where it is infinite.

    A row that has seen no key yet has exponentials of 0 then, and one with a score of +inf has l = inf: not NaN.
    """
    return tl.where(tl.abs(m) == float("inf"), 0.0, m)
