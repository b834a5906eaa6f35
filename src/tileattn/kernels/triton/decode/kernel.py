"""The decode kernel: FlashAttention-2's loop over a part of the keys, for the query heads that share them.

A program has one tile of rows of one kv head of one sequence (sequences.py), and one part of the keys that these rows
may see. If the keys of a sequence are not split, its output is written at once. Else each part stores O, m and l, and
merge_kernel merges them (merge.py). The host decides by sizes how many parts there are (splits.py). This kernel decides
by the sequence's own length where they are:

- free: the tiles from the first to the last visible key, in equal parts;
- fixed: cuts at the multiples of `plan.fixed` keys. A program either has one such part or walks over all of them and
  merges each; the bits are the same. So that no other row can change them, all tiles are computed by one loop, with the
  mask: a tile that only other rows see adds exactly nothing.

Where the mask may hide tiles between others, loops walk over the tiles of the program's line (lists.py). Free parts
are equal parts of these: of the mixed tiles, which have a mask, and then of the whole ones.

The kernel has more than ten arguments: Triton launches a kernel with each pointer and each size by itself.
"""

import triton
import triton.language as tl

from ..tile.lines import step_of, tile_of
from ..tile.softmax import LOG2E, weights
from ..tile.tiles import add_product, phases, product, visible
from .cache import load_keys, locate, page_of
from .lines import fixed_part, line_of
from .merge import merged, store_part, write
from .sequences import SEQLENS_K, check_queries, keys_of, rows_of, sink_of

RUN_TIME = [
    *("numbers", "pages", "batch", "q_rows", "kv_heads", "group", "capacity", "page_size", "table_stride"),
    *("tiles", "splits", "slot_rows", "max_seqlen_q", "line_size", "line_counts", "planes"),
]


@triton.jit(do_not_specialize=RUN_TIME)
def decode_kernel(
    q, k, v, o, lse, sink, parts, sums, seqlens_k, page_table, cu_seqlens_q, status, lines, tensors, pages, numbers,
    scale, batch, q_rows, kv_heads, group, capacity, page_size, table_stride,
    tiles, splits, slot_rows, max_seqlen_q, line_size, line_counts, planes,
    q_strides, k_strides, v_strides, o_strides, plan: tl.constexpr,
):  # fmt: skip
    """Writes o and lse, or a part of them; one program for each tile of rows, kv head and part.

    q, k, v and o are pointers with the strides of their first three dimensions. lse is contiguous, or None. parts and
    sums have `splits` places for each of slot_rows rows of each sequence and kv head. tiles: of each sequence, if
    queries are not packed. lines: of lists.py, and the three sizes that `Lines.arguments` names, or None. tensors and
    numbers are the variant's operands (tile/expressions.py).
    """
    program = tl.program_id(0)
    split, job = program % splits, program // splits
    h_kv, tile = job % kv_heads, job // kv_heads
    if cu_seqlens_q is not None:
        if program == 0:
            check_queries(cu_seqlens_q, status, batch, q_rows, max_seqlen_q)
    b, qb, begin, q_len, first_row = rows_of(tile, tiles, cu_seqlens_q, (batch, q_rows, group), plan.block_M)
    is_split = (splits > 1) & (q_len * group <= slot_rows) & (b < batch)
    if (first_row >= q_len * group) | ((split > 0) & (is_split == 0)):
        return
    seqlen_k, wrong = keys_of(b, seqlens_k, batch, capacity)
    tl.store(status + SEQLENS_K, b + 1, mask=wrong & (h_kv == 0) & (split == 0) & (first_row == 0))

    # [block_M]
    row = first_row + tl.arange(0, plan.block_M)
    exists = row < q_len * group
    token, head = begin + row // group, h_kv * group + row % group
    # Q: [block_M, padded]
    q_tile = load_queries(q, q_strides, qb, token, head, exists, plan)
    q_positions = (seqlen_k - q_len + row // group)[:, None]

    q_lo = seqlen_k - q_len + first_row // group
    q_hi = seqlen_k - q_len + tl.minimum((first_row + plan.block_M - 1) // group, q_len - 1)
    any_range = plan.any_range(b, h_kv * group, q_lo, q_hi, seqlen_k, tensors, numbers)
    full_range = plan.full_range(b, h_kv * group, q_lo, q_hi, seqlen_k, tensors, numbers)
    tiles_of_keys = phases(any_range, full_range, 0, seqlen_k, plan.block_N)
    bounds = (tl.maximum(any_range[0], 0), tiles_of_keys[3], seqlen_k)
    of_lines = (line_size, line_counts, planes)
    counts, line, ends = line_of(lines, of_lines, tile, h_kv, tiles_of_keys, seqlen_k, plan)

    rows = (q_tile, head[:, None], q_positions, h_kv, scale, tensors, numbers)
    cache = (b, page_size, pages, table_stride, status)
    keys = (k, v, k_strides, v_strides, bounds, cache, line)
    parts_of = tl.where(is_split, splits, 1)
    if plan.fixed:
        acc, m, l = attend_fixed(rows, keys, page_table, ends, (counts, line_size), split, parts_of, plan)
    else:
        acc, m, l = attend_free(rows, keys, page_table, ends, split, parts_of, plan)

    if is_split:
        slots = (batch * kv_heads).to(tl.int64) * slot_rows * splits
        slot = ((b * kv_heads + h_kv).to(tl.int64) * slot_rows + row) * splits + split
        store_part(acc, m, l, parts, sums, slot, slots, exists, plan.head_dim_v, plan.padded_v)
    else:
        logit = None
        if sink is not None:
            logit = sink_of(sink, head, b, batch)
        place = (qb, token, head, q_rows, kv_heads * group)
        write(acc, m, l, logit, o, lse, o_strides, place, exists, plan.head_dim_v, plan.padded_v)


@triton.jit
def attend_free(rows, keys, page_table, ends, split, splits, plan: tl.constexpr):
    """O, m and l of one of `splits` equal parts of the keys, or of a line's tiles; ends: of the loops over all."""
    start, full_start, full_end, end = ends
    share = tl.cdiv(tl.cdiv(tl.maximum(end - start, 0), plan.step_N), splits) * plan.step_N
    start = start + split * share
    end = tl.minimum(end, start + share)
    full_start = tl.minimum(tl.maximum(full_start, start), tl.maximum(end, start))
    full_end = tl.minimum(tl.maximum(full_end, full_start), tl.maximum(end, start))
    acc, m, l = nothing(plan)
    if plan.before:
        acc, m, l = attend(acc, m, l, rows, keys, page_table, start, full_start, plan, True)
    if plan.within:
        acc, m, l = attend(acc, m, l, rows, keys, page_table, full_start, full_end, plan, False)
    if plan.behind:
        acc, m, l = attend(acc, m, l, rows, keys, page_table, full_end, end, plan, True)
    return acc, m, l


@triton.jit
def attend_fixed(rows, keys, page_table, ends, counted, split, splits, plan: tl.constexpr):
    """O, m and l of the fixed part of this number; of all fixed parts if one program has them.

    counted: the counts of a line, and its size.
    """
    start, _, _, end = ends
    counts, line_size = counted
    first, last = start // plan.fixed, tl.cdiv(end, plan.fixed)
    first = tl.where(splits > 1, tl.maximum(first, split), first)
    last = tl.where(splits > 1, tl.minimum(last, split + 1), last)
    acc, m, l = nothing(plan)
    if plan.behind:
        for number in tl.range(first, last):
            lo, hi = fixed_part(number, start, end, counts, line_size, plan)
            part, part_m, part_l = nothing(plan)
            part, part_m, part_l = attend(part, part_m, part_l, rows, keys, page_table, lo, hi, plan, True)
            acc, m, l = merged(acc, m, l, part, part_m, part_l)
    return acc, m, l


@triton.jit
def nothing(plan: tl.constexpr):
    """O [block_M, padded_v], m and l [block_M] before the first key."""
    acc = tl.full([plan.block_M, plan.padded_v], 0.0, tl.float32)
    m = tl.full([plan.block_M], -float("inf"), tl.float32)
    l = tl.full([plan.block_M], 0.0, tl.float32)
    return acc, m, l


@triton.jit
def load_queries(q, strides, qb, token, head, exists, plan: tl.constexpr):
    """The tile [block_M, padded]; rows that do not exist are zeros."""
    column = tl.arange(0, plan.padded)[None, :]
    row = qb.to(tl.int64) * strides[0] + token.to(tl.int64) * strides[1] + head.to(tl.int64) * strides[2]
    return tl.load(q + row[:, None] + column, mask=exists[:, None] & (column < plan.head_dim), other=0.0)


@triton.jit
def attend(acc, m, l, rows, keys, page_table, start, end, plan: tl.constexpr, masked: tl.constexpr):
    """Adds the tiles of keys of the steps from start to end to the output, the maxima and the sums."""
    q_tile, heads, q_positions, h_kv, scale, tensors, numbers = rows
    k, v, k_strides, v_strides, bounds, cache, line = keys
    unit = scale * LOG2E  # of s
    if plan.score is not None:
        unit = LOG2E
    ahead = tile_of(start, end, line, plan.block_N, plan)
    for at in tl.range(start, end, plan.step_N):
        first, ahead = step_of(at, ahead, end, line, plan.block_N, plan)
        page = page_of(first, cache, page_table, plan)
        # [block_N]
        key = first + tl.arange(0, plan.block_N)
        readable = (key >= bounds[0]) & (key < bounds[1])
        cache_row, token = locate(first, page, readable, cache, page_table, plan)
        # K: [block_N, padded]
        k_tile = load_keys(k, k_strides, cache_row, token, h_kv, readable, plan.head_dim, plan.padded, masked)
        # S = Q K^T: [block_M, block_N]
        s = product(q_tile, k_tile.T, plan.precision)
        k_positions = key[None, :]
        if plan.score is not None:
            s = plan.score(s * scale, cache[0], heads, q_positions, k_positions, tensors, numbers)
        if masked:
            sees = visible(plan, cache[0], heads, q_positions, k_positions, bounds[2], tensors, numbers)
            s = tl.where(sees, s, -float("inf"))
        p, alpha, m, l = weights(s, m, l, unit)
        acc = acc * alpha[:, None]
        # V: [block_N, padded_v]
        v_tile = load_keys(v, v_strides, cache_row, token, h_kv, readable, plan.head_dim_v, plan.padded_v, masked)
        # O += P V: [block_M, padded_v]
        acc = add_product(p, v_tile, acc, plan.precision)
    return acc, m, l
