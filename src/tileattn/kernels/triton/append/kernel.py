"""The kernel of append_kv: rotates new keys and queries, and writes keys and values into the cache.

A program has one head of one row: of k, of v or of q, in this order. It finds the row's sequence, position and page by
itself. Places that do not exist are left out, so that nothing outside of the cache is written, and are recorded in the
device's status (:mod:`tileattn.call.cache_status`).

The kernel has more than ten arguments: Triton launches a kernel with each pointer and each size by itself.
"""

import triton
import triton.language as tl

from ....call import cache_fields

SEQLENS_K = tl.constexpr(cache_fields.SEQLENS_K)
PAGE_TABLE = tl.constexpr(cache_fields.PAGE_TABLE)
CU_SEQLENS_Q = tl.constexpr(cache_fields.CU_SEQLENS_Q)
POSITIONS = tl.constexpr(cache_fields.POSITIONS)
NOWHERE = tl.constexpr(-1)
BOUNDS = tl.constexpr(128)  # cumulative lengths that are checked at a time


# Elements of tuples are specialised on, whatever is said here: so each size is an argument.
@triton.jit(
    do_not_specialize=[
        *("k_rows", "q_rows", "rows", "kv_heads", "heads", "sequences", "steps", "capacity", "pages", "tokens"),
        *("angles", "table_b", "table_page", "positions_b", "positions_i", "q_positions_b", "q_positions_i"),
    ]
)
def append_kernel(
    k,
    v,
    k_cache,
    v_cache,
    seqlens_k,
    status,
    page_table,
    cu_seqlens_q,
    cos,
    sin,
    positions,
    q,
    rotated,
    q_positions,
    k_rows,
    q_rows,
    rows,
    kv_heads,
    heads,
    sequences,
    steps,
    capacity,
    pages,
    tokens,
    angles,
    table_b,
    table_page,
    positions_b,
    positions_i,
    q_positions_b,
    q_positions_i,
    strides,
    facts: tl.constexpr,
):
    """Writes to the caches and, with q, to `rotated`; one program for each head of each row.

    Args:
        k_rows, q_rows, rows: of k and of q in each batch element, and the larger one of them.
        steps: of the search for a row's sequence: 2**steps is at least the number of sequences.
        tokens: of a page, or of a row of a contiguous cache.
        angles: rows of cos and sin.
        table_b, table_page, positions_b, ...: strides of page_table, positions and q_positions.
        strides: those of all dimensions but the last of k, v, k_cache, v_cache and q; those of cos and sin.
        facts: head_dim, head_dim_v and rotary_dim, powers of two that are at least head_dim, head_dim_v and rotary_dim
            / 2, and whether pairs are neighbours.
    """
    k_strides, v_strides, k_cache_strides, v_cache_strides, q_strides, tables = strides
    b, i = tl.program_id(0) // rows, tl.program_id(0) % rows
    head = tl.program_id(1)
    if cu_seqlens_q is None:
        number = b
        seqlen = tl.maximum(tl.load(seqlens_k + b), 0)
        position, position_of_q = seqlen - k_rows + i, seqlen - q_rows + i
    else:
        number, position = find_sequence(cu_seqlens_q, seqlens_k, i, sequences, steps)
        position_of_q = position
        if (tl.program_id(0) == 0) & (head == 0):
            check_bounds(cu_seqlens_q, status, sequences, k_rows)
    if head < 2 * kv_heads:
        if i < k_rows:
            cache = (capacity, pages, tokens)
            of_table = (page_table, table_b, table_page)
            page, token = find_page(of_table, seqlens_k, status, number, position, cache, head == 0)
            if head < kv_heads:
                x = k + b.to(tl.int64) * k_strides[0] + i.to(tl.int64) * k_strides[1] + head.to(tl.int64) * k_strides[2]
                to = k_cache + page.to(tl.int64) * k_cache_strides[0] + token.to(tl.int64) * k_cache_strides[1]
                to += head.to(tl.int64) * k_cache_strides[2]
                if positions is not None:
                    position = tl.load(positions + b.to(tl.int64) * positions_b + i.to(tl.int64) * positions_i)
                move(x, to, page != NOWHERE, position, cos, sin, angles, tables, facts)
                report_position(status, number, position, cos, angles, head == 0)
            else:
                h = (head - kv_heads).to(tl.int64)
                x = v + b.to(tl.int64) * v_strides[0] + i.to(tl.int64) * v_strides[1] + h * v_strides[2]
                to = v_cache + page.to(tl.int64) * v_cache_strides[0] + token.to(tl.int64) * v_cache_strides[1]
                to += h * v_cache_strides[2]
                copy(x, to, page != NOWHERE, 0, facts[1], facts[4])
    elif q is not None:
        if i < q_rows:
            h = head - 2 * kv_heads
            x = q + b.to(tl.int64) * q_strides[0] + i.to(tl.int64) * q_strides[1] + h.to(tl.int64) * q_strides[2]
            to = rotated + ((b.to(tl.int64) * q_rows + i) * heads + h) * facts[0]
            if q_positions is not None:
                position_of_q = tl.load(q_positions + b.to(tl.int64) * q_positions_b + i.to(tl.int64) * q_positions_i)
            elif positions is not None:
                position_of_q = tl.load(positions + b.to(tl.int64) * positions_b + i.to(tl.int64) * positions_i)
            move(x, to, True, position_of_q, cos, sin, angles, tables, facts)
            report_position(status, number, position_of_q, cos, angles, h == 0)


@triton.jit
def find_sequence(cu_seqlens_q, seqlens_k, row, sequences, steps):
    """The sequence of a packed row, and the row's position there: negative for a row of no sequence."""
    # cu_seqlens_q[low] <= row < cu_seqlens_q[high]: halved in each step. Wrong bounds lead to some sequence.
    low, high = row * 0, row * 0 + sequences
    for _ in range(steps):
        middle = (low + high) // 2
        before = tl.load(cu_seqlens_q + middle) <= row
        low, high = tl.where(before, middle, low), tl.where(before, high, middle)
    start, end = tl.load(cu_seqlens_q + low), tl.load(cu_seqlens_q + low + 1)
    position = tl.maximum(tl.load(seqlens_k + low), 0) - (end - row)
    return low, tl.where((start <= row) & (row < end), position, -1)


@triton.jit
def check_bounds(cu_seqlens_q, status, sequences, total):
    """Records sequences whose bounds are wrong."""
    for first in range(0, sequences, BOUNDS):
        b = first + tl.arange(0, BOUNDS)
        start = tl.load(cu_seqlens_q + b, mask=b < sequences, other=0)
        end = tl.load(cu_seqlens_q + b + 1, mask=b < sequences, other=0)
        wrong = ((b == 0) & (start != 0)) | (end < start) | ((b == sequences - 1) & (end > total))
        tl.store(status + CU_SEQLENS_Q + b * 0, b + 1, mask=wrong & (b < sequences))


@triton.jit
def find_page(of_table, seqlens_k, status, number, position, cache, reports):
    """The row of the cache and the token there of a new token; the row is NOWHERE if the token is not written."""
    capacity, pages, tokens = cache
    page_table, table_b, table_page = of_table
    seqlen = tl.load(seqlens_k + number)
    tl.store(status + SEQLENS_K, number + 1, mask=reports & ((seqlen < 0) | (seqlen > capacity)))
    exists = (position >= 0) & (position < capacity)
    page, token = tl.where(exists, number, NOWHERE), position
    if page_table is not None:
        column = tl.where(exists, position, 0) // tl.maximum(tokens, 1)
        token = position - column * tokens
        entry = page_table + number.to(tl.int64) * table_b + column.to(tl.int64) * table_page
        page = tl.load(entry, mask=exists, other=NOWHERE)
        wrong = (page < 0) | (page >= pages)
        tl.store(status + PAGE_TABLE, number + 1, mask=reports & exists & wrong)
        page = tl.where(wrong, NOWHERE, page)
    return page, token


@triton.jit
def report_position(status, number, position, cos, angles, reports):
    """Records a rotary position that has no row in cos and sin."""
    if cos is not None:
        tl.store(status + POSITIONS, number + 1, mask=reports & (position >= angles))


@triton.jit
def move(x, to, written, position, cos, sin, angles, tables, facts: tl.constexpr):
    """Copies a head, with its pairs rotated where there is a row of cos and sin for the position."""
    head_dim: tl.constexpr = facts[0]
    rotary_dim: tl.constexpr = facts[2]
    if cos is not None:
        # [padded half]
        j = tl.arange(0, facts[5])
        in_half = j < rotary_dim // 2
        has_row = (position >= 0) & (position < angles)
        row = tl.where(has_row, position, 0).to(tl.int64)
        c = tl.load(cos + row * tables[0] + j, mask=in_half, other=0.0).to(tl.float32)
        s = tl.load(sin + row * tables[1] + j, mask=in_half, other=0.0).to(tl.float32)
        if facts[6]:
            first, second = 2 * j, 2 * j + 1
        else:
            first, second = j, j + rotary_dim // 2
        a = tl.load(x + first, mask=in_half, other=0.0)
        b = tl.load(x + second, mask=in_half, other=0.0)
        # (a, b) -> (a cos - b sin, a sin + b cos)
        turned_a = (a.to(tl.float32) * c - b.to(tl.float32) * s).to(a.dtype)
        turned_b = (a.to(tl.float32) * s + b.to(tl.float32) * c).to(b.dtype)
        tl.store(to + first, tl.where(has_row, turned_a, a), mask=in_half & written)
        tl.store(to + second, tl.where(has_row, turned_b, b), mask=in_half & written)
    if rotary_dim < head_dim:
        copy(x, to, written, rotary_dim, head_dim, facts[3])


@triton.jit
def copy(x, to, written, first: tl.constexpr, end: tl.constexpr, padded: tl.constexpr):
    """Copies elements `first` to `end` - 1 of a head."""
    # [padded]
    e = tl.arange(0, padded)
    inside = (e >= first) & (e < end)
    tl.store(to + e, tl.load(x + e, mask=inside, other=0.0), mask=inside & written)
