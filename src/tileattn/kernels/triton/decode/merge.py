"""Merging of parts: attention over the keys of several parts, from O (not divided), m and l of each.

Parts are merged in their order, in float32, by one formula, so that the bits are the same wherever it is computed:

    m' = max(m, m_part),   l' = exp2(m - m') l + exp2(m_part - m') l_part,   O' likewise

An empty part (l = 0) changes no bit: its weight is exactly 0, the factor of the others exactly 1.

Source: FlashDecoding (Dao, Haziza, Massa and Sizov 2023), which splits the keys of a decode call in this way.

Kernels have more than ten arguments: Triton launches a kernel with each pointer and each size by itself.
"""

import triton
import triton.language as tl

from ..tile.softmax import add_sink, divisor, finite, natural_lse
from .sequences import keys_of, queries_of, sink_of

UNROLLED = tl.constexpr(8)  # parts whose loads are under way at a time


@triton.jit
def merged(acc, m, l, part, part_m, part_l):
    """Adds a part to what has been merged; acc and part [rows, padded_v], the others [rows].

    fma is explicit: the compiler might contract either product, and not the same one in each kernel.
    """
    m_new = tl.maximum(m, part_m)
    shift = finite(m_new)
    alpha, weight = tl.exp2(m - shift), tl.exp2(part_m - shift)
    # What an empty part's output is, nobody has written.
    part = tl.where(part_l[:, None] == 0, 0.0, part)
    acc = tl.fma(part, weight[:, None], acc * alpha[:, None])
    return acc, m_new, tl.fma(part_l, weight, l * alpha)


@triton.jit
def write(acc, m, l, logit, o, lse, o_strides, place, exists, columns: tl.constexpr, padded: tl.constexpr):
    """Writes o and, unless it is None, lse; logit: of the sink, [rows], or None. acc [rows, padded], m and l [rows].

    place: batch element, query and head of each row; then the queries of a batch element, and the heads.
    """
    qb, token, head, q_rows, heads = place
    if logit is not None:
        acc, m, l = add_sink(acc, m, l, logit)
    if lse is not None:
        tl.store(lse + ((qb * heads + head).to(tl.int64) * q_rows + token), natural_lse(m, l), mask=exists)
    acc = tl.where(l[:, None] == 0, 0.0, acc / divisor(l)[:, None])
    column = tl.arange(0, padded)[None, :]
    row = qb.to(tl.int64) * o_strides[0] + token.to(tl.int64) * o_strides[1] + head.to(tl.int64) * o_strides[2]
    tl.store(o + row[:, None] + column, acc.to(o.dtype.element_ty), mask=exists[:, None] & (column < columns))


@triton.jit
def store_part(acc, m, l, parts, sums, slot, slots, exists, columns: tl.constexpr, padded: tl.constexpr):
    """Stores a part; of an empty one only l = 0 and m = -inf. parts (slots, columns), sums (2, slots)."""
    column = tl.arange(0, padded)[None, :]
    tl.store(sums + slot, m, mask=exists)
    tl.store(sums + slots + slot, l, mask=exists)
    filled = (exists & (l != 0))[:, None] & (column < columns)
    tl.store(parts + slot[:, None] * columns + column, acc, mask=filled)


@triton.jit(do_not_specialize=["batch", "q_rows", "kv_heads", "group", "capacity", "splits", "slot_rows"])
def merge_kernel(
    o, lse, sink, parts, sums, seqlens_k, cu_seqlens_q,
    batch, q_rows, kv_heads, group, capacity, splits, slot_rows, o_strides,
    rows: tl.constexpr, columns: tl.constexpr, padded: tl.constexpr, fixed: tl.constexpr,
):  # fmt: skip
    """Writes o and lse of the sequences whose keys were split; one program for some rows."""
    # [rows]
    at = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    all_rows = (batch * kv_heads).to(tl.int64) * slot_rows
    row, job = (at % slot_rows).to(tl.int32), (at // slot_rows).to(tl.int32)
    h_kv, b = job % kv_heads, tl.minimum(job // kv_heads, batch - 1)
    if cu_seqlens_q is None:
        qb, begin, q_len = b, b * 0, b * 0 + q_rows
    else:
        begin, q_len = queries_of(b, cu_seqlens_q, batch, q_rows)
        qb = b * 0
    exists = (at < all_rows) & (row < q_len * group) & (q_len * group <= slot_rows)
    last = splits
    if fixed:
        seqlen, _ = keys_of(b, seqlens_k, batch, capacity)
        last = tl.minimum(tl.cdiv(tl.max(tl.where(exists, seqlen, 0), 0), fixed), splits)

    # O: [rows, padded], m, l: [rows]
    acc = tl.full([rows, padded], 0.0, tl.float32)
    m = tl.full([rows], -float("inf"), tl.float32)
    l = tl.full([rows], 0.0, tl.float32)
    column = tl.arange(0, padded)[None, :]
    slots = all_rows * splits
    for part in tl.range(0, last, loop_unroll_factor=UNROLLED):
        slot = at * splits + part
        part_m = tl.load(sums + slot, mask=exists, other=-float("inf"))
        part_l = tl.load(sums + slots + slot, mask=exists, other=0.0)
        output = tl.load(parts + slot[:, None] * columns + column, mask=exists[:, None] & (column < columns), other=0.0)
        acc, m, l = merged(acc, m, l, output, part_m, part_l)

    head = h_kv * group + row % group
    logit = None
    if sink is not None:
        logit = sink_of(sink, head, b, batch)
    place = (qb, begin + row // group, head, q_rows, kv_heads * group)
    write(acc, m, l, logit, o, lse, o_strides, place, exists, columns, padded)
