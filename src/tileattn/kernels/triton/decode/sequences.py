"""Which sequence, and which of its rows, a program has.

The rows of a sequence and a kv head are the queries of the head's group, head fastest: row r is query r // group of
head h_kv * group + r % group. A tile has block_M of them.

**Packed queries.** A sequence b has the tiles from cu[b] * group // block_M + b up to those of b + 1. That is as many
as its rows need, or one more, which has no rows. So the number of tiles depends on sizes alone. Rows behind
cu[batch] are a last sequence without keys, number `batch`.
"""

import triton
import triton.language as tl

from ....call import cache_fields
from ..tile.softmax import LOG2E

SEQLENS_K = tl.constexpr(cache_fields.SEQLENS_K)
CU_SEQLENS_Q = tl.constexpr(cache_fields.CU_SEQLENS_Q)
MAX_SEQLEN_Q = tl.constexpr(cache_fields.MAX_SEQLEN_Q)
LOOKED_AT = tl.constexpr(256)  # entries of cu_seqlens_q at a time


@triton.jit
def sequence_of(tile, cu_seqlens_q, sizes, rows: tl.constexpr):
    """The sequence of a packed tile, and the tile's first row within it: the last one whose tiles begin at or before.

    Entries that are wrong give any sequence, and a row that may be beyond it.
    """
    batch, group = sizes
    at = tl.arange(0, LOOKED_AT)
    b = 0
    for start in range(1, batch + 1, LOOKED_AT):
        number = start + at
        begin = tl.load(cu_seqlens_q + number, mask=number <= batch, other=0)
        b += tl.sum(((number <= batch) & (begin * group // rows + number <= tile)).to(tl.int32), 0)
    first_tile = tl.load(cu_seqlens_q + b) * group // rows + b
    return b, tl.maximum(tile - first_tile, 0) * rows


@triton.jit
def rows_of(tile, tiles, cu_seqlens_q, sizes, rows: tl.constexpr):
    """Of a tile of rows: sequence, batch element of q, its first query there, number of queries, and first row.

    tiles: of each sequence, if queries are not packed.
    """
    batch, q_rows, group = sizes
    if cu_seqlens_q is None:
        b = tile // tiles
        return b, b, b * 0, q_rows, tile % tiles * rows
    else:
        b, first_row = sequence_of(tile, cu_seqlens_q, (batch, group), rows)
        begin, q_len = queries_of(b, cu_seqlens_q, batch, q_rows)
        return b, b * 0, begin, q_len, first_row


@triton.jit
def queries_of(b, cu_seqlens_q, batch, q_rows):
    """Where the packed queries of sequences b begin, and how many they are; nothing outside of the tensor."""
    begin = tl.load(cu_seqlens_q + b)
    end = tl.load(cu_seqlens_q + b + 1, mask=b < batch, other=0)
    begin = tl.minimum(tl.maximum(begin, 0), q_rows)
    end = tl.where(b < batch, tl.minimum(tl.maximum(end, begin), q_rows), q_rows)
    return begin, end - begin


@triton.jit
def check_queries(cu_seqlens_q, status, batch, q_rows, max_seqlen_q):
    """Records what is wrong with cu_seqlens_q; one program does."""
    for start in range(0, batch, LOOKED_AT):
        b = start + tl.arange(0, LOOKED_AT)
        begin = tl.load(cu_seqlens_q + b, mask=b < batch, other=0)
        end = tl.load(cu_seqlens_q + b + 1, mask=b < batch, other=0)
        wrong = (end < begin) | (end > q_rows) | ((b == 0) & (begin != 0))
        tl.store(status + CU_SEQLENS_Q + b * 0, b + 1, mask=(b < batch) & wrong)
        tl.store(status + MAX_SEQLEN_Q + b * 0, b + 1, mask=(b < batch) & (end - begin > max_seqlen_q))


@triton.jit
def keys_of(b, seqlens_k, batch, capacity):
    """How many keys sequences b have, and whether seqlens_k is wrong; no more than there is room for."""
    given = tl.load(seqlens_k + b, mask=b < batch, other=0)
    seqlen = tl.minimum(tl.maximum(given, 0), capacity)
    return seqlen, seqlen != given


@triton.jit
def sink_of(sink, head, b, batch):
    """The sink's logits, in units of log2(e); none for rows of no sequence."""
    return tl.where(b < batch, tl.load(sink + head).to(tl.float32) * LOG2E, -float("inf"))
