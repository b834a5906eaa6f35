"""The tiles of keys that the tiles of query rows of a decode call see, for every backend. Imports no backend.

A decode kernel goes by its mask's range of keys. A user's function has no range, of masks joined by `|` the range is a
hull, and blocks that a model chooses lie anywhere. Of these the interval analysis tells which tiles are hidden from all
rows of a tile of queries, and which are whole: its rows are a *box* of queries and of the heads of a group.

The rows of a sequence and a kv head are packed: row r is query ``r // group`` of head ``kv_head * group + r % group``.
An *item* is a sequence's tile of block_M such rows. Items are numbered: of sequences with as many queries each, those
of a sequence follow one another; of packed queries a sequence b has those from ``cu_seqlens_q[b] * group // block_M +
b`` on, and one at its end may have no rows.

Operations of PyTorch compute it. Nothing is read on the host, and shapes depend on sizes alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..call.decoding import DecodeInputs, DecodeSizes
from ..variant.evaluated import values_of
from ..variant.expression import Expr, has_symbol
from ..variant.intervals.tiles import Kind, tile_kinds
from ..variant.intervals.values import Ends
from ..variant.program import Program
from ..variant.reading import evaluate
from .tile_lists import depends_on

# Boxes are analysed together up to so many tiles, so that bounds in 64 bits take some 100 MB at most.
MOST_AT_ONCE = 2**21


class Rows(NamedTuple):
    """Of some items: the sequence, its number of keys, the first and the last position of queries; (items, 1, 1)."""

    b: Tensor
    seqlen: Tensor
    q_lo: Tensor
    q_hi: Tensor


class Boxes(NamedTuple):
    """The boxes of a call.

    Attributes:
        traced: the variant.
        sizes: of the call.
        block_M, block_N: packed query rows of an item, and keys of a tile.
        items: see above.
        planes: boxes of an item. Box number ``item * planes + kv_head`` is of a kv head; with one plane ``item`` of
            all of them.
        tiles: of keys, in the capacity.
    """

    traced: Program
    sizes: DecodeSizes
    block_M: int
    block_N: int
    items: int
    planes: int
    tiles: int

    @classmethod
    def of(cls, traced: Program, sizes: DecodeSizes, block_M: int, block_N: int, items: int) -> Any:
        """Those of a call with so many items: one plane where the mask does not depend on the head."""
        planes = sizes.kv_heads if depends_on(traced, "h") else 1
        return cls(traced, sizes, block_M, block_N, items, planes, -(-sizes.capacity // block_N))

    @property
    def all_tiles(self) -> int:
        """Tiles of all boxes."""
        return self.items * self.planes * self.tiles

    @property
    def most_queries(self) -> int:
        """By how much the last query of an item exceeds the first, at most."""
        group = self.sizes.heads // self.sizes.kv_heads
        return max(min(self.sizes.max_seqlen_q - 1, -(-(self.block_M - 1) // group)), 0)

    def parts(self, inputs: DecodeInputs, device: torch.device) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Some items after others, with :meth:`seen` of them.

        Lengths that are wrong are clamped here, and boxes are of any rows then; the kernels report them.
        """
        at_once = max(MOST_AT_ONCE // (self.tiles * self.planes), 1)
        for first in range(0, self.items, at_once):
            end = min(first + at_once, self.items)
            rows = self.rows_of(inputs, torch.arange(first, end, device=device))
            yield slice(first, end), *self.seen(inputs, rows)

    def rows_of(self, inputs: DecodeInputs, item: Tensor) -> Rows:
        """The rows of items, as the kernels find them."""
        sizes, block_M, ends = self.sizes, self.block_M, inputs.cu_seqlens_q
        group, longest = sizes.heads // sizes.kv_heads, sizes.max_seqlen_q
        if ends is None:
            q_tiles = -(-longest * group // block_M)
            b, q_tile = item // q_tiles, item % q_tiles
            q_len = torch.full_like(b, longest)
        else:
            ends = ends.long()
            first_items = ends[:-1] * group // block_M + torch.arange(sizes.batch, device=item.device)
            b = (torch.searchsorted(first_items, item, right=True) - 1).clamp(0, sizes.batch - 1)
            q_tile, q_len = item - first_items[b], ends.diff()[b].clamp(0, longest)
        seqlen = inputs.seqlens_k.long().clamp(0, sizes.capacity)[b]
        row0 = q_tile * block_M
        last = torch.minimum(row0 + block_M, q_len * group) - 1
        begin, low, high = seqlen - q_len, -longest, sizes.capacity - 1
        q_lo = q_hi = (begin + row0 // group).clamp(low, high)
        if self.most_queries > 0:  # else the analysis sees that they are the same
            q_hi = (begin + last // group).clamp(low, high).clamp(q_lo, q_lo + self.most_queries)
        b, seqlen, q_first = (each[:, None, None] for each in (b, seqlen, q_lo))
        return Rows(b, seqlen, q_first, q_first if q_hi is q_lo else q_hi[:, None, None])

    def seen(self, inputs: DecodeInputs, rows: Rows) -> tuple[Tensor, Tensor]:
        """Which tiles must be visited, and which are whole: bool (items, planes, tiles)."""
        sizes, block_N, traced = self.sizes, self.block_N, self.traced
        k_lo = torch.arange(self.tiles, device=rows.b.device) * block_N
        k_hi = torch.minimum(k_lo + (block_N - 1), (rows.seqlen - 1).clamp(min=0)).maximum(k_lo)
        values = values_of(inputs.operands)
        kinds = tile_kinds(
            traced.allows,
            values,
            Ends(rows.q_lo, rows.q_hi, (-sizes.max_seqlen_q, sizes.capacity - 1), self.most_queries),
            Ends(k_lo, k_hi, (0, sizes.capacity - 1), block_N - 1),
            Ends(rows.b, rows.b, (0, sizes.batch - 1), 0),
            self._heads(rows.b.device),
        ).expand(len(rows.b), self.planes, self.tiles)
        seen = (kinds != Kind.HIDDEN) & (k_lo < rows.seqlen)
        place = {**values, "b": rows.b, "q_lo": rows.q_lo, "q_hi": rows.q_hi, "seqlen_k": rows.seqlen}
        if _is_of_all_heads(traced.kv_range):
            lo, hi = (evaluate(bound, place) if isinstance(bound, Expr) else bound for bound in traced.kv_range)
            seen = seen & (k_hi >= lo) & (k_lo < hi)
        if _is_of_all_heads(traced.full_range):
            lo, hi = (evaluate(bound, place) if isinstance(bound, Expr) else bound for bound in traced.full_range)
            kinds = kinds.where((k_lo < lo) | (k_hi >= hi), Kind.WHOLE)
        # Keys behind the sequence's last have scores as well, which the mask hides.
        return seen, (kinds == Kind.WHOLE) & (k_lo + block_N <= rows.seqlen)

    def _heads(self, device: torch.device) -> Ends:
        """The heads of all rows of each plane: those of a kv head's group, or all, of which the mask knows nothing."""
        count = self.sizes.heads // self.planes
        first = torch.arange(self.planes, device=device)[:, None] * count
        return Ends(first, first if count == 1 else first + (count - 1), (0, self.sizes.heads - 1), count - 1)


def _is_of_all_heads(bounds: tuple[Any, Any]) -> bool:
    """Whether a range says something, and the same for each head: the rows of a box differ in it."""
    return any(isinstance(bound, Expr) for bound in bounds) and not any(has_symbol(bound, "h") for bound in bounds)
