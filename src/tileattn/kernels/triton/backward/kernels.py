"""The backward kernels: FlashAttention-2's (Dao 2023, arXiv 2307.08691, algorithm 2).

With P = exp2(S - lse2), delta = rowsum(dO * O) - dlse and, of a score modification, its derivative f':

    dV = P^T dO,   dS = P * (dO V^T - delta) * f',   dK = scale * dS^T Q,   dQ = scale * dS K

One kernel has a tile of queries and walks over keys, for dq; another has a tile of keys and walks over queries, for dk
and dv. Scores are computed in both; no two programs add to the same element, so that results do not depend on the order
in which programs run. In 16 bits the kernel for dq is the first, and leaves lse2 and delta for the other. A kernel of
its own prepares them where dq is not wanted, and in float32, in which the sum over o made the kernel for dq spill.

Adding up dq in the kernel for dk and dv, by atomic operations, saves two products of seven, yet took 15 to 26 % longer
than both kernels on an H200 (benchmarks/results/triton/bwd-tiles-h200.txt).

Kernels have more than ten arguments: Triton launches a kernel with each pointer and each size by itself.
"""

import triton
import triton.language as tl

from ..tile.tiles import (
    LOG2E,
    add_product,
    last_tile_and_head,
    load_rows,
    load_tile,
    phases,
    product,
    store_rows,
    store_tile,
    tile_and_head,
    visible,
)

# Bits by which probabilities are larger while float32's gradients are summed, and the factors there and back.
LIFT_BITS, LIFT, DROP = tl.constexpr(24.0), tl.constexpr(2.0**24), tl.constexpr(2.0**-24)


@triton.jit(do_not_specialize=["seqlen_q", "heads", "all_heads"])
def prepare_kernel(
    o, do, lse, dlse, lse2, delta, seqlen_q, heads, all_heads, folds, o_strides, do_strides,
    rows: tl.constexpr, head_dim_v: tl.constexpr, padded_v: tl.constexpr,
):  # fmt: skip
    """Writes lse2 and delta; one program for each tile of queries of each head."""
    first, bh = tile_and_head(rows, folds)
    if first >= seqlen_q or bh >= all_heads:
        return
    b, h = bh // heads, bh % heads
    do_tile = load_tile(do, do_strides, b, h, first, seqlen_q, rows, head_dim_v, padded_v, False, True)
    prepared = o, o_strides, lse, dlse, lse2, delta
    prepare(do_tile, prepared, b, h, bh, first, seqlen_q, rows, head_dim_v, padded_v)


@triton.jit
def prepare(
    do_tile, prepared, b, h, bh, first, seqlen_q, rows: tl.constexpr, head_dim_v: tl.constexpr, padded_v: tl.constexpr
):
    """lse2, which is lse in units of log2(e), and delta of a tile of queries: stored, and returned. dlse may be None.

    A row that sees no key gets lse2 = inf, and so does one beyond the last: exponentials are 0 then.
    """
    o, o_strides, lse, dlse, lse2, delta = prepared
    o_tile = load_tile(o, o_strides, b, h, first, seqlen_q, rows, head_dim_v, padded_v, False, True)
    total = tl.sum(o_tile.to(tl.float32) * do_tile.to(tl.float32), 1)
    if dlse is not None:
        total -= load_rows(dlse, bh, seqlen_q, first, rows, 0.0).to(tl.float32)
    values = load_rows(lse, bh, seqlen_q, first, rows, -float("inf"))
    values = tl.where(values == -float("inf"), float("inf"), values * LOG2E)
    store_rows(lse2, values, bh, seqlen_q, first, rows)
    store_rows(delta, total, bh, seqlen_q, first, rows)
    return values, total


@triton.jit
def probabilities(exponent, precision: tl.constexpr):
    """2^exponent; in float32 LIFT times that.

    All probabilities of a key may be next to float32's smallest numbers: of one far away, under ALiBi. A GPU's exp2 has
    nothing below 2^-126, and the least of the three parts of a factor (plan.py) is 2^-24 of it. What is added to an
    exponent near 0 would cost it digits, so larger probabilities are multiplied.
    """
    if precision == "bf16x6" or precision == "ieee":
        small = exponent < -32.0
        p = tl.exp2(tl.where(small, exponent + LIFT_BITS, exponent))
        return tl.where(small, p, p * LIFT)
    else:
        return tl.exp2(exponent)


@triton.jit
def dropped(x, precision: tl.constexpr):
    """What has been summed, or computed, from :func:`probabilities`, in its own size."""
    if precision == "bf16x6" or precision == "ieee":
        return x * DROP
    else:
        return x


@triton.jit(do_not_specialize=["numbers", "seqlen_q", "seqlen_k", "heads", "kv_heads", "all_heads"])
def keys_kernel(
    q,
    k,
    v,
    do,
    lse2,
    delta,
    dk,
    dv,
    parts,
    tensors,
    numbers,
    scale,
    seqlen_q,
    seqlen_k,
    heads,
    kv_heads,
    heads_per_kv_head,
    all_heads,
    folds,
    q_strides,
    k_strides,
    v_strides,
    do_strides,
    plan: tl.constexpr,
):
    """Writes dk and dv; one program for each tile of keys of each kv head.

    It adds up over the query heads that share the keys. parts: the workspaces of operand_gradients.py.
    """
    first, bh_kv = tile_and_head(plan.block_N, folds)
    if first >= seqlen_k or bh_kv >= all_heads:
        return
    b, h_kv = bh_kv // kv_heads, bh_kv % kv_heads
    k_tile = load_tile(k, k_strides, b, h_kv, first, seqlen_k, plan.block_N, plan.head_dim, plan.padded, False, True)
    v_tile = load_tile(
        v, v_strides, b, h_kv, first, seqlen_k, plan.block_N, plan.head_dim_v, plan.padded_v, False, True
    )
    at = first + tl.arange(0, plan.block_N)[:, None]
    k_hi = tl.minimum(first + plan.block_N, seqlen_k) - 1
    offset = seqlen_k - seqlen_q
    dk_sum = tl.full([plan.block_N, plan.padded], 0.0, tl.float32)
    dv_sum = tl.full([plan.block_N, plan.padded_v], 0.0, tl.float32)
    for member in range(heads_per_kv_head):
        h = h_kv * heads_per_kv_head + member
        # In tiles that are seen as a whole keys beyond the last have probabilities, which reach nothing that is stored.
        start, full_start, full_end, end = phases(
            plan.any_range(b, h, first, k_hi, seqlen_k, tensors, numbers),
            plan.full_range(b, h, first, k_hi, seqlen_k, tensors, numbers),
            offset,
            seqlen_q,
            plan.block_M,
        )
        queries = (q, do, lse2, delta, q_strides, do_strides, scale)
        facts = (b, h, heads, seqlen_q, seqlen_k, parts, tensors, numbers)
        tiles = (k_tile, v_tile, at)
        if plan.before:
            dk_sum, dv_sum = from_queries(dk_sum, dv_sum, tiles, start, full_start, queries, facts, plan, True)
        if plan.within:
            dk_sum, dv_sum = from_queries(dk_sum, dv_sum, tiles, full_start, full_end, queries, facts, plan, False)
        if plan.behind:
            dk_sum, dv_sum = from_queries(dk_sum, dv_sum, tiles, full_end, end, queries, facts, plan, True)
    dk_sum, dv_sum = dropped(dk_sum, plan.precision), dropped(dv_sum, plan.precision)
    store_tile(dk, dk_sum * scale, seqlen_k, kv_heads, b, h_kv, first, plan.block_N, plan.head_dim, plan.padded)
    store_tile(dv, dv_sum, seqlen_k, kv_heads, b, h_kv, first, plan.block_N, plan.head_dim_v, plan.padded_v)


@triton.jit
def from_queries(dk, dv, tiles, start, end, queries, facts, plan: tl.constexpr, masked: tl.constexpr):
    """What the rows of queries from start to end add to dk and dv. Scores are transposed: [block_N, block_M]."""
    k_tile, v_tile, at = tiles
    q, do, lse2, delta, q_strides, do_strides, scale = queries
    b, h, heads, seqlen_q, seqlen_k, _parts, tensors, numbers = facts
    bh = b * heads + h
    unit = scale * LOG2E
    if plan.score is not None:
        unit = LOG2E
    for first in tl.range(start, end, plan.block_M, warp_specialize=plan.warp_specialize):
        first = tl.multiple_of(first, plan.block_M)
        q_tile = load_tile(
            q, q_strides, b, h, first, seqlen_q, plan.block_M, plan.head_dim, plan.padded, plan.tma, masked
        )
        row = first + tl.arange(0, plan.block_M)[None, :]
        positions = row + (seqlen_k - seqlen_q)
        raw = product(k_tile, q_tile.T, plan.precision)
        s = raw
        if plan.score is not None:
            s = plan.score(raw * scale, b, h, positions, at, tensors, numbers)
        seen = row < seqlen_q
        if masked:
            seen = seen & visible(plan, b, h, positions, at, seqlen_k, tensors, numbers)
            s = tl.where(seen, s, -float("inf"))
        p = probabilities(
            s * unit - load_rows(lse2, bh, seqlen_q, first, plan.block_M, float("inf"))[None, :], plan.precision
        )
        do_tile = load_tile(
            do, do_strides, b, h, first, seqlen_q, plan.block_M, plan.head_dim_v, plan.padded_v, plan.tma, masked
        )
        dv = add_product(p, do_tile, dv, plan.precision)
        dp = product(v_tile, do_tile.T, plan.precision)
        ds = p * (dp - load_rows(delta, bh, seqlen_q, first, plan.block_M, 0.0)[None, :])
        if plan.score is not None:
            hand_over(dropped(ds, plan.precision), raw * scale, seen, row, at, facts, plan)
            ds = ds * plan.slope(raw * scale, b, h, positions, at, tensors, numbers)
            if masked:
                ds = tl.where(seen, ds, 0.0)  # as it was, but a slope may be infinite
        dk = add_product(ds, q_tile, dk, plan.precision)
    return dk, dv


@triton.jit
def hand_over(ds, score, seen, row, at, facts, plan: tl.constexpr):
    """Gradients of what the modification reads from tensors, to the workspaces of operand_gradients.py."""
    b, h, heads, seqlen_q, seqlen_k, parts, tensors, numbers = facts
    positions = row + (seqlen_k - seqlen_q)
    bh = (b * heads + h).to(tl.int64)
    within = at < seqlen_k
    for index in tl.static_range(plan.wanted):
        gradient = tl.where(seen & within, ds * plan.slopes[index](score, b, h, positions, at, tensors, numbers), 0.0)
        if plan.spread[index]:
            place = (bh * seqlen_q + row) * seqlen_k + at
            tl.store(parts[index] + place, gradient, mask=within & (row < seqlen_q))
        else:
            # No other program adds to these keys of this head: the order of additions is always the same.
            place = bh * seqlen_k + at
            total = tl.sum(gradient, 1)[:, None]
            tl.atomic_add(parts[index] + place, total, mask=within, sem="relaxed")


@triton.jit(do_not_specialize=["numbers", "seqlen_q", "seqlen_k", "heads", "all_heads"])
def queries_kernel(
    q,
    k,
    v,
    do,
    o,
    lse,
    dlse,
    lse2,
    delta,
    dq,
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
    do_strides,
    o_strides,
    plan: tl.constexpr,
):
    """Writes dq; one program for each tile of queries of each head.

    lse2 and delta are read where o is None; otherwise they are written, from o, lse and dlse, which may be None.
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

    q_tile = load_tile(q, q_strides, b, h, first, seqlen_q, plan.block_M, plan.head_dim, plan.padded, False, True)
    do_tile = load_tile(
        do, do_strides, b, h, first, seqlen_q, plan.block_M, plan.head_dim_v, plan.padded_v, False, True
    )
    if o is None:
        lse2_rows = load_rows(lse2, bh, seqlen_q, first, plan.block_M, float("inf"))
        delta_rows = load_rows(delta, bh, seqlen_q, first, plan.block_M, 0.0)
    else:
        lse2_rows, delta_rows = prepare(
            do_tile, (o, o_strides, lse, dlse, lse2, delta), b, h, bh, first, seqlen_q, plan.block_M, plan.head_dim_v,
            plan.padded_v,
        )  # fmt: skip
    positions = q_lo + tl.arange(0, plan.block_M)[:, None]
    of_rows = (q_tile, do_tile, lse2_rows[:, None], delta_rows[:, None], positions)
    keys = (k, v, k_strides, v_strides, b, h, h_kv, seqlen_k, scale, tensors, numbers)
    dq_sum = tl.full([plan.block_M, plan.padded], 0.0, tl.float32)
    if plan.before:
        dq_sum = from_keys(dq_sum, of_rows, start, full_start, keys, plan, True)
    if plan.within:
        dq_sum = from_keys(dq_sum, of_rows, full_start, full_end, keys, plan, False)
    if plan.behind:
        dq_sum = from_keys(dq_sum, of_rows, full_end, end, keys, plan, True)
    dq_sum = dropped(dq_sum, plan.precision)
    store_tile(dq, dq_sum * scale, seqlen_q, heads, b, h, first, plan.block_M, plan.head_dim, plan.padded)


@triton.jit
def from_keys(dq, of_rows, start, end, keys, plan: tl.constexpr, masked: tl.constexpr):
    """What the tiles of keys from start to end add to dq."""
    q_tile, do_tile, lse2, delta, positions = of_rows
    k, v, k_strides, v_strides, b, h, h_kv, seqlen_k, scale, tensors, numbers = keys
    unit = scale * LOG2E
    if plan.score is not None:
        unit = LOG2E
    for first in tl.range(start, end, plan.block_N, warp_specialize=plan.warp_specialize):
        first = tl.multiple_of(first, plan.block_N)
        k_tile = load_tile(
            k, k_strides, b, h_kv, first, seqlen_k, plan.block_N, plan.head_dim, plan.padded, plan.tma, masked
        )
        v_tile = load_tile(
            v, v_strides, b, h_kv, first, seqlen_k, plan.block_N, plan.head_dim_v, plan.padded_v, plan.tma, masked
        )
        at = first + tl.arange(0, plan.block_N)[None, :]
        raw = product(q_tile, k_tile.T, plan.precision)
        dp = product(do_tile, v_tile.T, plan.precision)
        s = raw
        if plan.score is not None:
            s = plan.score(raw * scale, b, h, positions, at, tensors, numbers)
        if masked:
            seen = visible(plan, b, h, positions, at, seqlen_k, tensors, numbers)
            s = tl.where(seen, s, -float("inf"))
        p = probabilities(s * unit - lse2, plan.precision)
        ds = p * (dp - delta)
        if plan.score is not None:
            ds = ds * plan.slope(raw * scale, b, h, positions, at, tensors, numbers)
            if masked:
                ds = tl.where(seen, ds, 0.0)  # as it was, but a slope may be infinite
        dq = add_product(ds, k_tile, dq, plan.precision)
    return dq
