"""Block-sparse masks: which blocks of scores are seen is a tensor, which a model may have computed.

`BlockSparse` is what a user makes. It counts rows of queries from 0, and so depends on the lengths of a call.
`for_call` makes of it a `RowBlocks`, whose operands are the blocks as conditions, where the rows begin, and bounds.
All of that is computed on the device in every call, and nothing is read on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...call.scalars import as_int
from ..mask_bounds import Range
from ..masks import And, Mask, Or
from ..math import load
from . import block_lists
from .patterns import checked_step

_INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
LEAST_KEYS, MOST_KEYS = 16, 256
_SHAPE = "(batch or 1, heads, kv heads or 1, blocks of q, blocks of k)"
_LISTS = "(batch or 1, heads, kv heads or 1, blocks of q, capacity)"


class CallSizes(NamedTuple):
    """The sizes of a call. Of a packed one, sequences are batch elements, and lengths the largest possible.

    first: the position of each sequence's first query: an int, or an integer tensor (batch,).
    """

    batch: int
    heads: int
    kv_heads: int
    seqlen_q: int
    seqlen_k: int
    first: int | Tensor


@dataclass(frozen=True, eq=False, init=False, repr=False)
class BlockSparse(Mask):
    """A query sees the keys of the blocks that a tensor names for its own block of queries.

    Blocks count rows of q and rows of k from 0, in packed calls from the start of each sequence. They do not count
    positions: with seqlen_q != seqlen_k the first query is row 0. Of a cache, rows of k are its keys, and rows of q the
    queries of the call. A query whose block names no block of keys sees nothing: its ``o`` is 0, its lse -inf.

    The blocks are read on the device in every call, and never on the host; a tensor that is written in place is read
    again, in a CUDA graph too.

    Args:
        blocks: on the queries' device, one of

            - a bool tensor (batch or 1, heads, kv heads or 1, blocks of q, blocks of k): True where a block is seen.
              With the size of the kv heads, the query heads of a group share their blocks. There must be ``ceil(seqlen
              / block_size)`` blocks at least; more are never reached. In a packed call batch is the number of
              sequences, and lengths are max_seqlen_q and max_seqlen_k. Over a cache seqlen_k is its capacity.
            - an integer tensor (batch or 1, heads, kv heads or 1, blocks of q, capacity): the numbers of the blocks of
              keys that a block of queries sees, in any order; one that is named twice counts once. -1 names none.
        block_size: rows of q and rows of k in a block: an int for both, or a tuple (q, k). q is 1 or more, k a multiple
            of 16 from 16 to 256. Kernels are compiled for a block size.
        counts: with lists of numbers: how many of each list count, the first ones, an integer tensor (batch or 1,
            heads, kv heads or 1, blocks of q). None: all that are not -1.

    Raises:
        TypeError, ValueError: an argument is neither; or, in a call, a tensor does not fit it. Of numbers in lists only
            a CPU knows at once whether they are in 0 .. ceil(seqlen_k / block_size) - 1 (or -1). On a GPU such a number
            is left out, and a later call with lists, or :func:`tileattn.check_blocks`, raises; under torch.compile it
            is left out.

    Source: block-sparse attention of FlexAttention (Dong et al. 2024, arXiv 2412.05496); chosen by the model as in
    Native Sparse Attention (Yuan et al. 2025, arXiv 2502.11089) and MoBA (Lu et al. 2025, arXiv 2502.13189).
    """

    blocks: Tensor
    counts: Tensor | None
    block_q: int
    block_k: int

    CONSTANTS = ("block_q", "block_k")

    def __init__(self, blocks: Tensor, block_size: int | tuple[int, int], counts: Tensor | None = None) -> None:
        block_q, block_k = as_block_size("BlockSparse", block_size)
        _check_blocks(blocks, counts)
        for name, value in (("blocks", blocks), ("counts", counts), ("block_q", block_q), ("block_k", block_k)):
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        return f"BlockSparse(..., {(self.block_q, self.block_k)})"

    def allows(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        """As in a call with as many keys as queries, where a row is a position. `for_call` has all others."""
        if self.blocks.dtype != torch.bool:
            raise NotImplementedError("BlockSparse: lists of blocks have an answer in a call only, whose lengths count")
        return load(self.blocks, b, h, q // self.block_q, k // self.block_k)

    def check(self, batch: int, heads: int, seqlen_q: int, seqlen_k: int) -> None:
        self._fitted(batch, heads, heads, seqlen_q, seqlen_k)

    def _fitted(self, batch: int, heads: int, kv_heads: int, seqlen_q: int, seqlen_k: int) -> None:
        """Raises ValueError unless the blocks are of a call of these sizes."""
        shape, is_bool = tuple(self.blocks.shape), self.blocks.dtype == torch.bool
        rows, columns = -(-seqlen_q // self.block_q), -(-seqlen_k // self.block_k)
        if (
            shape[0] not in (1, batch)
            or shape[1] not in (1, heads, kv_heads)
            or shape[2] < rows
            or (is_bool and shape[3] < columns)
        ):
            accepted = _SHAPE if is_bool else _LISTS
            raise ValueError(
                f"BlockSparse: blocks must have shape {accepted}, with batch {batch}, {heads} heads, {kv_heads} kv "
                f"heads, at least {rows} blocks of {self.block_q} rows of q"
                + f" and at least {columns} blocks of {self.block_k} rows of k" * is_bool
                + f", got {shape}"
            )

    def in_call(self, sizes: CallSizes) -> Mask:
        """The mask in a call of these sizes. Raises ValueError if the blocks do not fit."""
        self._fitted(*sizes[:5])
        blocks = self.blocks
        if blocks.dtype != torch.bool:
            blocks = block_lists.as_conditions(blocks, self.counts, -(-sizes.seqlen_k // self.block_k))
        heads = blocks.shape[1]
        group = None if heads in (1, sizes.heads) else sizes.heads // sizes.kv_heads
        bounds = bounds_of(blocks, self.block_q, self.block_k)
        return RowBlocks(blocks, *bounds, sizes.first, group, self.block_q, self.block_k)


@dataclass(frozen=True, eq=False)
class RowBlocks(Mask):
    """A `BlockSparse` in a call.

    A tile may begin and end in different rows of blocks. So the bounds of a row of blocks also hold for those after it
    (``first``) or before it (``end``).

    Args:
        blocks: bool (batch or 1, heads, kv heads or 1, blocks of q, blocks of k), whether each is seen. (Those of
            `KnownBlocks` have numbers.)
        first_key, end_key: int32 (batch or 1, heads.., blocks of q): the least key of a block that is seen in this row
            of blocks or a later one, and the end of the last one in this or an earlier one.
        first_row, end_row: int32 (batch or 1, heads.., blocks of k): the same for rows of q.
        first: the position of each sequence's row 0, an int or an integer tensor (batch,).
        group: the number of query heads that share blocks; None if each has its own, or all have the same.
        block_q, block_k: the rows of a block. Constants of a kernel, which divides by them.
    """

    blocks: Tensor
    first_key: Tensor
    end_key: Tensor
    first_row: Tensor
    end_row: Tensor
    first: int | Tensor
    group: int | None
    block_q: int
    block_k: int

    CONSTANTS = ("block_q", "block_k")

    def _first(self, b: Any) -> Any:
        # Tensors, and the symbols that stand for them while the mask is traced, have dimensions.
        return load(self.first, b) if hasattr(self.first, "ndim") else self.first

    def _head(self, h: Any) -> Any:
        return h if self.group is None else h // self.group

    def allows(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return load(self.blocks, b, self._head(h), (q - self._first(b)) // self.block_q, k // self.block_k)

    def kv_range(self, b: Any, h: Any, q_lo: Any, q_hi: Any, seqlen_k: Any) -> Range:
        h, first = self._head(h), self._first(b)
        top, bottom = (q_lo - first) // self.block_q, (q_hi - first) // self.block_q
        return load(self.first_key, b, h, top), load(self.end_key, b, h, bottom)

    def q_range(self, b: Any, h: Any, k_lo: Any, k_hi: Any, seqlen_k: Any) -> Range:
        h, first = self._head(h), self._first(b)
        left, right = k_lo // self.block_k, k_hi // self.block_k
        return load(self.first_row, b, h, left) + first, load(self.end_row, b, h, right) + first


def for_call(
    mask: Mask | None, sizes: Callable[[], tuple[int, int, int, int, int]], first: Callable[[], int | Tensor]
) -> Mask | None:
    """The mask in a call: each `BlockSparse` in it, also under ``&`` and ``|``, becomes a `RowBlocks`.

    Args:
        mask: as :func:`tileattn.variant.key.normalize` returns it.
        sizes: returns batch, heads, kv_heads, seqlen_q and seqlen_k. Not called without a `BlockSparse`.
        first: returns the position of each sequence's first query (see `CallSizes`). Does not wait for the device.

    Raises:
        ValueError: the blocks do not fit the call, or, on a CPU, a number in a list is out of range.
    """
    if mask is None or not blocks_of(mask):
        return mask
    return _bound(mask, CallSizes(*sizes(), first()))


def blocks_of(mask: Any) -> list[BlockSparse]:
    """The `BlockSparse` masks in a mask, which have other operands in a call than by themselves."""
    if isinstance(mask, (And, Or)):
        return blocks_of(mask.x) + blocks_of(mask.y)
    return [mask] if isinstance(mask, BlockSparse) else []


def _bound(mask: Any, sizes: CallSizes) -> Mask:
    if isinstance(mask, (And, Or)):
        return type(mask)(_bound(mask.x, sizes), _bound(mask.y, sizes))
    return mask.in_call(sizes) if isinstance(mask, BlockSparse) else mask


def for_tensors(mask: Mask | None, q: Tensor, k: Tensor) -> Mask | None:
    """`for_call` for a dense call of q and k in bshd."""
    return for_call(mask, lambda: (*q.shape[::2], k.shape[2], q.shape[1], k.shape[1]), lambda: k.shape[1] - q.shape[1])


def bounds_of(blocks: Tensor, block_q: int, block_k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """first_key, end_key, first_row and end_row of `RowBlocks`."""
    return (*_ends(blocks, 3, block_k), *_ends(blocks, 2, block_q))


def _ends(blocks: Tensor, dim: int, size: int) -> tuple[Tensor, Tensor]:
    """Along a dimension the first block that is seen or a later row's, and the end of the last or an earlier row's."""
    count = blocks.shape[dim]
    if count == 0:
        nothing = blocks.new_zeros(blocks.sum(dim).shape, dtype=torch.int32)
        return nothing, nothing
    some, bits = blocks.any(dim), blocks.to(torch.uint8)
    first = torch.where(some, bits.argmax(dim), count)
    end = torch.where(some, count - bits.flip(dim).argmax(dim), 0)
    if some.shape[-1] == 0:
        return first.to(torch.int32), end.to(torch.int32)
    first, end = first.flip(-1).cummin(-1).values.flip(-1), end.cummax(-1).values
    return (first * size).clamp(max=2**30).to(torch.int32), (end * size).clamp(max=2**30).to(torch.int32)


def as_block_size(name: str, given: Any) -> tuple[int, int]:
    """(q, k) of a block size as a user gives it; `name` is that of the class or function. Raises for a wrong one."""
    accepted = (
        f"an int or a tuple of two (q, k), q at least 1 and k a multiple of 16 from {LEAST_KEYS} to {MOST_KEYS} (so is "
        f"an int for both)"
    )
    sizes = given if isinstance(given, (tuple, list)) else (given, given)
    if len(sizes) != 2:
        raise ValueError(f"{name}: block_size must be {accepted}, got {given!r}")
    block_q, block_k = (checked_step(f"{name}: block_size", as_int(size), accepted) for size in sizes)
    if block_k % 16 or not LEAST_KEYS <= block_k <= MOST_KEYS:
        raise ValueError(f"{name}: block_size must be {accepted}, got {given!r}")
    return block_q, block_k


def _check_blocks(blocks: Any, counts: Any) -> None:
    """Raises TypeError or ValueError for blocks and counts of another dtype or number of dimensions."""
    accepted = f"a bool tensor {_SHAPE} or an integer tensor {_LISTS}"
    if not isinstance(blocks, Tensor) or blocks.dtype not in (torch.bool, *_INTEGERS):
        given = blocks.dtype if isinstance(blocks, Tensor) else type(blocks).__name__
        raise TypeError(f"BlockSparse: blocks must be {accepted}, got {given}")
    if blocks.ndim != 4:
        raise ValueError(f"BlockSparse: blocks must be {accepted}, got shape {tuple(blocks.shape)}")
    if counts is None:
        return
    if blocks.dtype == torch.bool:
        raise ValueError("BlockSparse: counts is for blocks that are lists of numbers, got counts and blocks of bool")
    shape = tuple(blocks.shape[:3])
    if not isinstance(counts, Tensor) or counts.dtype not in _INTEGERS:
        given = counts.dtype if isinstance(counts, Tensor) else type(counts).__name__
        raise TypeError(f"BlockSparse: counts must be an integer tensor {shape}, as blocks is, got {given}")
    if tuple(counts.shape) != shape:
        raise ValueError(f"BlockSparse: counts must have the shape {shape} of blocks, got {tuple(counts.shape)}")
    if counts.device != blocks.device:
        raise ValueError(f"BlockSparse: counts must be on the device of blocks, {blocks.device}, got {counts.device}")
