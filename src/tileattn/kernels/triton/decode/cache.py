"""Tiles of keys and values from a cache (rows, tokens, kv_heads, head_dim), contiguous or paged.

A contiguous cache has a row for each sequence; a row of a paged one is a page, and the page table has the pages of each
sequence. A tile lies within one page where the page size allows; then it takes one entry of the table. Else each key
takes its own.

Only keys from lo to hi are read, and entries of the table followed: what any row of the tile of queries may see. Others
are zeros, so that NaN in unused rows reaches nothing. An entry that names no page is clamped, and recorded.
"""

import triton
import triton.language as tl

from ....call import cache_fields

PAGE_TABLE = tl.constexpr(cache_fields.PAGE_TABLE)


@triton.jit
def page_of(first, cache, page_table, plan: tl.constexpr):
    """With lines the entry of the page table for a tile that lies within one page; else 0: `locate` loads it.

    It comes before anything else of a tile. Triton's pipeliner loads the number of a listed tile for the first of its
    uses, and where that was not the entry, it copied nothing ahead.
    """
    page = 0
    if plan.listed and plan.page_rows >= plan.block_N:
        b, page_size, _, table_stride, _ = cache
        page = tl.load(page_table + b.to(tl.int64) * table_stride + first // page_size)
    return page


@triton.jit
def locate(first, page, readable, cache, page_table, plan: tl.constexpr):
    """The row of each key of a tile, one number where it is the same for all, and the token in it; int64.

    page: as of :func:`page_of`.
    """
    b, page_size, pages, table_stride, status = cache
    # [block_N]
    key = first + tl.arange(0, plan.block_N)
    if plan.page_rows == 0:
        return b.to(tl.int64), key.to(tl.int64)
    else:
        entries = page_table + b.to(tl.int64) * table_stride
        if plan.page_rows >= plan.block_N:
            if plan.listed == 0:
                page = tl.load(entries + first // page_size)
            tl.store(status + PAGE_TABLE, b + 1, mask=(page < 0) | (page >= pages))
            token = first % page_size + tl.arange(0, plan.block_N)
        else:
            page = tl.load(entries + key // page_size, mask=readable, other=0)
            wrong = readable & ((page < 0) | (page >= pages))
            tl.store(status + PAGE_TABLE + key * 0, b + 1, mask=wrong)
            token = key % page_size
        return tl.minimum(tl.maximum(page, 0), pages - 1).to(tl.int64), token.to(tl.int64)


@triton.jit
def load_keys(
    x,
    strides,
    row,
    token,
    h,
    readable,
    columns: tl.constexpr,
    padded: tl.constexpr,
    masked: tl.constexpr,
):
    """The tile [block_N, padded] of one head; keys that are not readable are zeros, if the tile is `masked`."""
    column = tl.arange(0, padded)[None, :]
    offset = row * strides[0] + token * strides[1] + h.to(tl.int64) * strides[2]
    pointers = x + offset[:, None] + column
    if masked and columns != padded:
        tile = tl.load(pointers, mask=readable[:, None] & (column < columns), other=0.0)
    elif masked:
        tile = tl.load(pointers, mask=readable[:, None], other=0.0)
    elif columns != padded:
        tile = tl.load(pointers, mask=column < columns, other=0.0)
    else:
        tile = tl.load(pointers)
    return tile
