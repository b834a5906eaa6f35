"""Operations on tiles in all kernels: loads, stores, products, and the ranges that need a mask.

A tensor (batch, seqlen, heads, head_dim) reaches a kernel as a pointer with its strides or, on NVIDIA GPUs from Hopper
on, as a tensor descriptor, from which the hardware copies (TMA). A tile has a power of two of columns; those beyond
head_dim are zeros.

Descriptors have three dimensions, (batch, seqlen, heads * head_dim), where the heads of a position lie side by side, or
else four, with which copies take longer. In the forward pass q and o have one, too, if it is of three: of the time at
head dim 128 on an H200 k and v with three dimensions saved up to 4 %, q and o then 3 %.

:func:`load_tile` has more than ten arguments: of a function of Triton each constant is an argument by itself.
"""

import triton
import triton.language as tl


@triton.jit
def tile_and_head(rows: tl.constexpr, folds):
    """The first row of this program's tile, and its head; both may be beyond the last. The grid is that of grid.py.

    Programs start in the order of their numbers, those of the first dimension first: the first tiles of all heads that
    are side by side, then the second ones, and so on; then the next heads. So tiles that take longest, as some do under
    a causal mask, are begun together, and short ones fill the gaps at the end.
    """
    tile = tl.program_id(2) % folds * tl.num_programs(1) + tl.program_id(1)
    head = tl.program_id(2) // folds * tl.num_programs(0) + tl.program_id(0)
    return tile * rows, head


@triton.jit
def last_tile_and_head(seqlen, rows: tl.constexpr, folds):
    """The same from the last tiles on, which of queries are the longest; beyond the first, a row is negative."""
    first, head = tile_and_head(rows, folds)
    return (tl.cdiv(seqlen, rows) - 1) * rows - first, head


@triton.jit
def load_tile(
    x,
    strides,
    b,
    h,
    first,
    end,
    rows: tl.constexpr,
    columns: tl.constexpr,
    padded: tl.constexpr,
    tma: tl.constexpr,
    partial: tl.constexpr,
):
    """Rows first, first + 1, ... of head h: [rows, padded]. If it is `partial`, those from `end` on are zeros."""
    if tma == 3:
        tile = x.load([b, first, h * padded]).reshape([rows, padded])
    elif tma == 4:
        tile = x.load([b, first, h, 0]).reshape([rows, padded])
    else:
        row = tl.arange(0, rows)[:, None]
        column = tl.arange(0, padded)[None, :]
        start = b.to(tl.int64) * strides[0] + first.to(tl.int64) * strides[1] + h.to(tl.int64) * strides[2]
        pointers = x + start + (row * strides[1] + column)
        if partial and columns != padded:
            tile = tl.load(pointers, mask=(row < end - first) & (column < columns), other=0.0)
        elif partial:
            tile = tl.load(pointers, mask=row < end - first, other=0.0)
        elif columns != padded:
            tile = tl.load(pointers, mask=column < columns, other=0.0)
        else:
            tile = tl.load(pointers)
    return tile


@triton.jit
def store_tile(
    x,
    tile,
    seqlen,
    heads,
    b,
    h,
    first,
    rows: tl.constexpr,
    columns: tl.constexpr,
    padded: tl.constexpr,
):
    """Stores rows first, first + 1, ... below seqlen of a contiguous tensor (batch, seqlen, heads, columns)."""
    row = tl.arange(0, rows)[:, None]
    column = tl.arange(0, padded)[None, :]
    start = ((b.to(tl.int64) * seqlen + first) * heads + h) * columns
    pointers = x + start + (row * (heads * columns) + column)
    within = row < seqlen - first
    if columns != padded:
        within = within & (column < columns)
    tl.store(pointers, tile.to(x.dtype.element_ty), mask=within)


@triton.jit
def load_rows(x, bh, seqlen, first, rows: tl.constexpr, other: tl.constexpr):
    """Numbers first, first + 1, ... of one head of a contiguous tensor (batch, heads, seqlen); `other` beyond it."""
    row = first + tl.arange(0, rows)
    return tl.load(x + bh.to(tl.int64) * seqlen + row, mask=row < seqlen, other=other)


@triton.jit
def store_rows(x, values, bh, seqlen, first, rows: tl.constexpr):
    """Stores numbers first, first + 1, ... of one head, as :func:`load_rows` reads them."""
    row = first + tl.arange(0, rows)
    tl.store(x + bh.to(tl.int64) * seqlen + row, values, mask=row < seqlen)


@triton.jit
def product(x, y, precision: tl.constexpr):
    """x @ y, summed in float32."""
    if precision == "interpreted":  # the interpreter cannot multiply bfloat16
        return tl.dot(x.to(tl.float32), y.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(x, y, input_precision=precision)


@triton.jit
def add_product(x, y, total, precision: tl.constexpr):
    """total + x @ y, where x is rounded to y's dtype."""
    if precision == "interpreted":
        return tl.dot(x.to(y.dtype).to(tl.float32), y.to(tl.float32), total, input_precision="ieee")
    elif precision != "tf32":  # float32
        # One chain of additions over all keys would lose digits that PyTorch's products keep; so each tile has its own.
        return total - tl.dot(-x, y, input_precision=precision)
    else:
        return tl.dot(x.to(y.dtype), y, total, input_precision=precision)


@triton.jit
def phases(any_range, full_range, origin, seqlen, block: tl.constexpr):
    """Where a loop over tiles has to compute the mask: (start, full_start, full_end, end).

    Tiles from full_start to full_end are fully visible; those before and behind need the mask. The ranges are
    counted from `origin` and clamped to 0 .. seqlen; tiles begin at multiples of `block`.

    Products of positions are of 64 bits (`Neighborhood` has some), and descriptors take coordinates of 32.
    """
    lo, end = tl.maximum(any_range[0] - origin, 0), tl.minimum(any_range[1] - origin, seqlen)
    full_lo, full_hi = tl.maximum(full_range[0] - origin, 0), tl.minimum(full_range[1] - origin, end)
    lo, end, full_lo, full_hi = lo.to(tl.int32), end.to(tl.int32), full_lo.to(tl.int32), full_hi.to(tl.int32)
    start = lo // block * block
    full_start = tl.maximum((full_lo + block - 1) // block * block, start)
    full_end = tl.maximum(full_hi, 0) // block * block
    if_any = full_end > full_start
    return start, tl.where(if_any, full_start, start), tl.where(if_any, full_end, start), end


@triton.jit
def visible(plan: tl.constexpr, b, h, q, k, seqlen_k, tensors, numbers):
    """May position q see position k? False beyond the last key."""
    within = k < seqlen_k
    if plan.allows is not None:
        within = within & plan.allows(b, h, q, k, tensors, numbers)
    return within
