"""The backward kernels: FlashAttention-2's (Dao 2023, arXiv 2307.08691, algorithm 2).

With P = exp2(S - lse2), delta = rowsum(dO * O) - dlse and, of a score modification, its derivative f':

    dV = P^T dO,   dS = P * (dO V^T - delta) * f',   dK = scale * dS^T Q,   dQ = scale * dS K

`queries_kernel` computes dq: a program has one tile of queries and loops over keys. `keys_kernel` computes dk and dv: a
program has one tile of keys and loops over queries. Both compute the scores. No two programs add to the same element,
so that results do not depend on the order in which programs run. In 16 bits `queries_kernel` runs first and also writes
lse2 and delta, which `keys_kernel` reads. `prepare_kernel` computes them where dq is not wanted, and in float32, where
the sum over o would make `queries_kernel` spill.

lse2 is lse in units of log2(e); where scores are `natural` (tile/softmax.py), lse itself.

Adding up dq in `keys_kernel` by atomic operations would save two of seven products. On an H200 it took 15 to 26 %
longer than both kernels (benchmarks/results/triton/bwd-tiles-h200.txt).

Kernels have more than ten arguments: Triton launches a kernel with each pointer and each size by itself.
"""

import triton
import triton.language as tl

from ..tile.lines import line_of, over_keys, step_of, tile_of
from ..tile.softmax import LOG2E, unit_of
from ..tile.tiles import (
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

STEPS = ("batch_step", "head_step")  # of lists of tiles (tile/lines.py), which are None where loops go by ranges

# Bits by which probabilities are larger while float32's gradients are summed, and the factors there and back.
LIFT_BITS, LIFT, DROP = tl.constexpr(24.0), tl.constexpr(2.0**24), tl.constexpr(2.0**-24)


@triton.jit(do_not_specialize=["seqlen_q", "heads", "all_heads"])
def prepare_kernel(
    o, do, lse, dlse, lse2, delta, seqlen_q, heads, all_heads, folds, o_strides, do_strides,
    rows: tl.constexpr, head_dim_v: tl.constexpr, padded_v: tl.constexpr, natural: tl.constexpr,
):  # fmt: skip
    """Writes lse2 and delta; one program for each tile of queries of each head."""
    first, bh = tile_and_head(rows, folds)
    if first >= seqlen_q or bh >= all_heads:
        return
    b, h = bh // heads, bh % heads
    # dO: [rows, padded_v]
    do_tile = load_tile(do, do_strides, b, h, first, seqlen_q, rows, head_dim_v, padded_v, False, True)
    prepared = o, o_strides, lse, dlse, lse2, delta
    prepare(do_tile, prepared, b, h, bh, first, seqlen_q, rows, head_dim_v, padded_v, natural)


@triton.jit
def prepare(
    do_tile, prepared, b, h, bh, first, seqlen_q, rows: tl.constexpr, head_dim_v: tl.constexpr, padded_v: tl.constexpr,
    natural: tl.constexpr,
):  # fmt: skip
    """lse2 and delta of a tile of queries: stored, and returned. dlse may be None.

    Rows that see no key, and rows beyond the last, get lse2 = inf: their exponentials are then 0.
    """
    o, o_strides, lse, dlse, lse2, delta = prepared
    # O: [rows, padded_v]
    o_tile = load_tile(o, o_strides, b, h, first, seqlen_q, rows, head_dim_v, padded_v, False, True)
    # delta: [rows]
    total = tl.sum(o_tile.to(tl.float32) * do_tile.to(tl.float32), 1)
    if dlse is not None:
        total -= load_rows(dlse, bh, seqlen_q, first, rows, 0.0).to(tl.float32)
    # lse2: [rows]
    values = load_rows(lse, bh, seqlen_q, first, rows, -float("inf"))
    values = tl.where(values == -float("inf"), float("inf"), values * unit_of(1.0, natural))
    store_rows(lse2, values, bh, seqlen_q, first, rows)
    store_rows(delta, total, bh, seqlen_q, first, rows)
    return values, total


@triton.jit
def probabilities(difference, natural: tl.constexpr):
    """exp of the differences of scores and lse, in float32 LIFT times that.

    All probabilities of a key may be close to float32's smallest numbers, for instance those of a distant key under
    ALiBi. A GPU's exp2 returns nothing below 2^-126, and the smallest of the three parts of a factor (plan.py) is 2^-24
    of it. Small exponents are therefore raised before exp2. Larger probabilities are multiplied instead: adding to an
    exponent near 0 would cost it digits.
    """
    if natural:
        exponent = difference * LOG2E
        small = exponent < -32.0
        p = tl.exp2(tl.where(small, exponent + LIFT_BITS, exponent))
        return tl.where(small, p, p * LIFT)
    else:
        return tl.exp2(difference)


@triton.jit
def dropped(x, natural: tl.constexpr):
    """Divides by LIFT what was computed from :func:`probabilities`."""
    if natural:
        return x * DROP
    else:
        return x


@triton.jit(do_not_specialize=[*STEPS, "numbers", "seqlen_q", "seqlen_k", "heads", "kv_heads", "all_heads"])
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

    A program adds up over the query heads that share its keys. parts: the workspaces of operand_gradients.py. tiles,
    counts and steps are lists (tile/lines.py), or None.
    """
    first, bh_kv = tile_and_head(plan.block_N, folds)
    if first >= seqlen_k or bh_kv >= all_heads:
        return
    b, h_kv = bh_kv // kv_heads, bh_kv % kv_heads
    # K: [block_N, padded]
    k_tile = load_tile(k, k_strides, b, h_kv, first, seqlen_k, plan.block_N, plan.head_dim, plan.padded, False, True)
    # V: [block_N, padded_v]
    v_tile = load_tile(
        v, v_strides, b, h_kv, first, seqlen_k, plan.block_N, plan.head_dim_v, plan.padded_v, False, True
    )
    # [block_N, 1]
    k_positions = first + tl.arange(0, plan.block_N)[:, None]
    k_hi = tl.minimum(first + plan.block_N, seqlen_k) - 1
    offset = seqlen_k - seqlen_q
    # dK: [block_N, padded], dV: [block_N, padded_v]
    dk_sum = tl.full([plan.block_N, plan.padded], 0.0, tl.float32)
    dv_sum = tl.full([plan.block_N, plan.padded_v], 0.0, tl.float32)
    for member in range(heads_per_kv_head):
        h = h_kv * heads_per_kv_head + member
        # In fully visible tiles keys beyond the last have probabilities; these affect nothing that is stored.
        if plan.listed:
            lists = (tiles, counts, batch_step, head_step)
            line, full_start, full_end = line_of(lists, b, h, first, seqlen_q, plan.block_M, plan)
            start, end = 0, full_end
        else:
            line: tl.constexpr = None
            start, full_start, full_end, end = phases(
                plan.any_range(b, h, first, k_hi, seqlen_k, tensors, numbers),
                plan.full_range(b, h, first, k_hi, seqlen_k, tensors, numbers),
                offset,
                seqlen_q,
                plan.block_M,
            )
        queries = (q, do, lse2, delta, q_strides, do_strides, scale, line)
        facts = (b, h, heads, seqlen_q, seqlen_k, parts, tensors, numbers)
        of_keys = (k_tile, v_tile, k_positions)
        if plan.before:
            dk_sum, dv_sum = from_queries(dk_sum, dv_sum, of_keys, start, full_start, queries, facts, plan, True)
        if plan.within:
            dk_sum, dv_sum = from_queries(dk_sum, dv_sum, of_keys, full_start, full_end, queries, facts, plan, False)
        if plan.behind:
            dk_sum, dv_sum = from_queries(dk_sum, dv_sum, of_keys, full_end, end, queries, facts, plan, True)
    dk_sum, dv_sum = dropped(dk_sum, plan.natural), dropped(dv_sum, plan.natural)
    store_tile(dk, dk_sum * scale, seqlen_k, kv_heads, b, h_kv, first, plan.block_N, plan.head_dim, plan.padded)
    store_tile(dv, dv_sum, seqlen_k, kv_heads, b, h_kv, first, plan.block_N, plan.head_dim_v, plan.padded_v)


@triton.jit
def from_queries(dk, dv, of_keys, start, end, queries, facts, plan: tl.constexpr, masked: tl.constexpr):
    """Adds the part of the queries of the steps from start to end to dk and dv; scores are [block_N, block_M]."""
    k_tile, v_tile, k_positions = of_keys
    q, do, lse2, delta, q_strides, do_strides, scale, line = queries
    b, h, heads, seqlen_q, seqlen_k, _parts, tensors, numbers = facts
    bh = b * heads + h
    unit = unit_of(scale, plan.natural)
    if plan.score is not None:
        unit = unit_of(1.0, plan.natural)
    ahead = tile_of(start, end, line, plan.block_M, plan)
    for at in tl.range(start, end, plan.step_M, warp_specialize=plan.warp_specialize):
        first, ahead = step_of(at, ahead, end, line, plan.block_M, plan)
        # Q: [block_M, padded]
        q_tile = load_tile(
            q, q_strides, b, h, first, seqlen_q, plan.block_M, plan.head_dim, plan.padded, plan.tma, masked
        )
        # [1, block_M]
        row = first + tl.arange(0, plan.block_M)[None, :]
        q_positions = row + (seqlen_k - seqlen_q)
        # S^T = K Q^T: [block_N, block_M]
        raw = product(k_tile, q_tile.T, plan.precision)
        s = raw
        if plan.score is not None:
            s = plan.score(raw * scale, b, h, q_positions, k_positions, tensors, numbers)
        seen = row < seqlen_q
        if masked:
            seen = seen & visible(plan, b, h, q_positions, k_positions, seqlen_k, tensors, numbers)
            s = tl.where(seen, s, -float("inf"))
        lse2_rows = load_rows(lse2, bh, seqlen_q, first, plan.block_M, float("inf"))[None, :]
        p = probabilities(s * unit - lse2_rows, plan.natural)
        # dO: [block_M, padded_v]
        do_tile = load_tile(
            do, do_strides, b, h, first, seqlen_q, plan.block_M, plan.head_dim_v, plan.padded_v, plan.tma, masked
        )
        # dV += P^T dO: [block_N, padded_v]
        dv = add_product(p, do_tile, dv, plan.precision)
        # dP^T = V dO^T: [block_N, block_M]
        dp = product(v_tile, do_tile.T, plan.precision)
        ds = p * (dp - load_rows(delta, bh, seqlen_q, first, plan.block_M, 0.0)[None, :])
        if plan.score is not None:
            write_out(dropped(ds, plan.natural), raw * scale, seen, row, k_positions, facts, plan)
            ds = ds * plan.slope(raw * scale, b, h, q_positions, k_positions, tensors, numbers)
            if masked:
                ds = tl.where(seen, ds, 0.0)  # 0 already, unless the slope is infinite
        # dK += dS^T Q: [block_N, padded]
        dk = add_product(ds, q_tile, dk, plan.precision)
    return dk, dv


@triton.jit
def write_out(ds, score, seen, row, k_positions, facts, plan: tl.constexpr):
    """Writes the gradients of what the modification reads from tensors to the workspaces of operand_gradients.py."""
    b, h, heads, seqlen_q, seqlen_k, parts, tensors, numbers = facts
    q_positions = row + (seqlen_k - seqlen_q)
    bh = (b * heads + h).to(tl.int64)
    within = k_positions < seqlen_k
    for index in tl.static_range(plan.wanted):
        slope = plan.slopes[index](score, b, h, q_positions, k_positions, tensors, numbers)
        gradient = tl.where(seen & within, ds * slope, 0.0)
        if plan.spread[index]:
            place = (bh * seqlen_q + row) * seqlen_k + k_positions
            tl.store(parts[index] + place, gradient, mask=within & (row < seqlen_q))
        else:
            # No other program adds to these keys of this head: the order of additions is always the same.
            place = bh * seqlen_k + k_positions
            total = tl.sum(gradient, 1)[:, None]
            tl.atomic_add(parts[index] + place, total, mask=within, sem="relaxed")


@triton.jit(do_not_specialize=[*STEPS, "numbers", "seqlen_q", "seqlen_k", "heads", "all_heads"])
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
    lists, operands = (tiles, counts, batch_step, head_step), (tensors, numbers)
    line, start, full_start, full_end, end = over_keys(lists, operands, b, h, first, q_lo, q_hi, seqlen_k, plan)

    # Q: [block_M, padded]
    q_tile = load_tile(q, q_strides, b, h, first, seqlen_q, plan.block_M, plan.head_dim, plan.padded, False, True)
    # dO: [block_M, padded_v]
    do_tile = load_tile(
        do, do_strides, b, h, first, seqlen_q, plan.block_M, plan.head_dim_v, plan.padded_v, False, True
    )
    # lse2, delta: [block_M]
    if o is None:
        lse2_rows = load_rows(lse2, bh, seqlen_q, first, plan.block_M, float("inf"))
        delta_rows = load_rows(delta, bh, seqlen_q, first, plan.block_M, 0.0)
    else:
        lse2_rows, delta_rows = prepare(
            do_tile, (o, o_strides, lse, dlse, lse2, delta), b, h, bh, first, seqlen_q, plan.block_M, plan.head_dim_v,
            plan.padded_v, plan.natural,
        )  # fmt: skip
    # [block_M, 1]
    q_positions = q_lo + tl.arange(0, plan.block_M)[:, None]
    of_rows = (q_tile, do_tile, lse2_rows[:, None], delta_rows[:, None], q_positions)
    keys = (k, v, k_strides, v_strides, b, h, h_kv, seqlen_k, scale, tensors, numbers, line)
    # dQ: [block_M, padded]
    dq_sum = tl.full([plan.block_M, plan.padded], 0.0, tl.float32)
    if plan.before:
        dq_sum = from_keys(dq_sum, of_rows, start, full_start, keys, plan, True)
    if plan.within:
        dq_sum = from_keys(dq_sum, of_rows, full_start, full_end, keys, plan, False)
    if plan.behind:
        dq_sum = from_keys(dq_sum, of_rows, full_end, end, keys, plan, True)
    dq_sum = dropped(dq_sum, plan.natural)
    store_tile(dq, dq_sum * scale, seqlen_q, heads, b, h, first, plan.block_M, plan.head_dim, plan.padded)


@triton.jit
def from_keys(dq, of_rows, start, end, keys, plan: tl.constexpr, masked: tl.constexpr):
    """Adds the part of the keys of the steps from start to end to dq."""
    q_tile, do_tile, lse2, delta, q_positions = of_rows
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
        # V: [block_N, padded_v]
        v_tile = load_tile(
            v, v_strides, b, h_kv, first, seqlen_k, plan.block_N, plan.head_dim_v, plan.padded_v, plan.tma, masked
        )
        # [1, block_N]
        k_positions = first + tl.arange(0, plan.block_N)[None, :]
        # S = Q K^T: [block_M, block_N]
        raw = product(q_tile, k_tile.T, plan.precision)
        # dP = dO V^T: [block_M, block_N]
        dp = product(do_tile, v_tile.T, plan.precision)
        s = raw
        if plan.score is not None:
            s = plan.score(raw * scale, b, h, q_positions, k_positions, tensors, numbers)
        if masked:
            seen = visible(plan, b, h, q_positions, k_positions, seqlen_k, tensors, numbers)
            s = tl.where(seen, s, -float("inf"))
        p = probabilities(s * unit - lse2, plan.natural)
        ds = p * (dp - delta)
        if plan.score is not None:
            ds = ds * plan.slope(raw * scale, b, h, q_positions, k_positions, tensors, numbers)
            if masked:
                ds = tl.where(seen, ds, 0.0)  # 0 already, unless the slope is infinite
        # dQ += dS K: [block_M, padded]
        dq = add_product(ds, k_tile, dq, plan.precision)
    return dq
