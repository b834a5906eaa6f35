"""A mask with what is known of its blocks: :func:`tileattn.block_mask` makes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..evaluated import values_of
from ..expression import has_symbol
from ..intervals.tiles import Kind, grid, numbers, tile_kinds
from ..intervals.values import Ends
from ..key import encode
from ..mask_bounds import Range, intersection
from ..masks import Mask
from ..program import program
from ..reading import evaluate
from .blocks import RowBlocks, bounds_of

MOST_PAIRS = 2**24  # that are evaluated at a time


@dataclass(frozen=True, eq=False)
class KnownBlocks(Mask):
    """A mask that is evaluated only in the blocks that it cuts through.

    Args:
        mask: the mask.
        kinds: its blocks, whose tensor has values of `Kind`, uint8.
        seqlen_q, seqlen_k: the lengths of the calls that it is for.
    """

    mask: Mask
    kinds: RowBlocks
    seqlen_q: int
    seqlen_k: int

    def __repr__(self) -> str:
        """Without the tensors, which may be long."""
        return f"KnownBlocks({self.mask!r}, block_size={(self.kinds.block_q, self.kinds.block_k)})"

    def allows(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        kind = self.kinds.allows(b, h, q, k)
        return (kind == Kind.WHOLE.value) | ((kind == Kind.MIXED.value) & self.mask.allows(b, h, q, k))

    def kv_range(self, b: Any, h: Any, q_lo: Any, q_hi: Any, seqlen_k: Any) -> Range:
        return intersection(*(mask.kv_range(b, h, q_lo, q_hi, seqlen_k) for mask in (self.mask, self.kinds)))

    def full_range(self, b: Any, h: Any, q_lo: Any, q_hi: Any, seqlen_k: Any) -> Range:
        return self.mask.full_range(b, h, q_lo, q_hi, seqlen_k)

    def q_range(self, b: Any, h: Any, k_lo: Any, k_hi: Any, seqlen_k: Any) -> Range:
        return intersection(*(mask.q_range(b, h, k_lo, k_hi, seqlen_k) for mask in (self.mask, self.kinds)))

    def full_q_range(self, b: Any, h: Any, k_lo: Any, k_hi: Any, seqlen_k: Any) -> Range:
        return self.mask.full_q_range(b, h, k_lo, k_hi, seqlen_k)

    def check(self, batch: int, heads: int, seqlen_q: int, seqlen_k: int) -> None:
        self.mask.check(batch, heads, seqlen_q, seqlen_k)
        of_batch, of_heads = self.kinds.blocks.shape[:2]
        made_for = (of_batch, of_heads, self.seqlen_q, self.seqlen_k)
        if of_batch not in (1, batch) or of_heads not in (1, heads) or made_for[2:] != (seqlen_q, seqlen_k):
            raise ValueError(
                f"block_mask was made for (batch, heads, seqlen_q, seqlen_k) = {made_for}, where 1 stands for any "
                f"number of batch elements or heads, got a call of {(batch, heads, seqlen_q, seqlen_k)}: make another"
            )


def known_blocks(
    mask: Mask, batch: int, heads: int, seqlen_q: int, seqlen_k: int, block_size: tuple[int, int], device: torch.device
) -> KnownBlocks:
    """The mask with the kinds of its blocks. Its tensors are on the device, and fit the call."""
    key, operands = encode(mask, ())
    allows, values = program(key).allows, values_of(operands)
    q, k = grid(seqlen_q, seqlen_k, *block_size, device)
    b = numbers(batch if has_symbol(allows, "b") else 1, 4, device)
    h = numbers(heads if has_symbol(allows, "h") else 1, 3, device)
    kinds = tile_kinds(allows, values, q, k, b, h)
    kinds = kinds.expand(b.first.shape[0], h.first.shape[0], q.first.shape[0], k.first.shape[0]).contiguous()
    _evaluate(kinds, allows, values, q, k, block_size)
    kinds = kinds.to(torch.uint8)
    bounds = bounds_of(kinds != Kind.HIDDEN, *block_size)
    return KnownBlocks(mask, RowBlocks(kinds, *bounds, seqlen_k - seqlen_q, None, *block_size), seqlen_q, seqlen_k)


def _evaluate(
    kinds: Tensor, allows: Any, values: dict[str, Any], q: Ends, k: Ends, block_size: tuple[int, int]
) -> None:
    """Evaluates all pairs of positions of the blocks that are called mixed, and writes what they are."""
    mixed = (kinds == Kind.MIXED).nonzero()
    rows, columns = (torch.arange(size, device=kinds.device) for size in block_size)
    for some in mixed.split(max(1, MOST_PAIRS // (block_size[0] * block_size[1]))):
        b, h, row, column = (each[:, None, None] for each in some.unbind(1))
        # Behind the end of the sequence the last position is repeated.
        positions = {
            "q": torch.minimum(q.first[row, 0] + rows[:, None], q.last[row, 0]),
            "k": torch.minimum(k.first[column] + columns, k.last[column]),
        }
        seen = torch.as_tensor(evaluate(allows, {**values, **positions, "b": b, "h": h}), device=kinds.device)
        seen = seen.expand(len(some), *block_size).flatten(1)
        kinds[tuple(some.unbind(1))] = seen.any(1).to(torch.int8) + seen.all(1).to(torch.int8)
