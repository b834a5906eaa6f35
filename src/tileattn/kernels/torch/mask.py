"""Applies masks, score modifications and dropout to tiles of scores, and finds the keys that a mask lets rows see.

A tile is the block of scores between some rows (queries) and some keys: (batch, heads, rows, keys).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ...call.dropout import Dropout, keep_mask, weight_of_kept
from ...variant.masks import Mask
from ...variant.scores import Bias

ScoreMods = Sequence[Callable[..., Tensor]]


@dataclass(frozen=True)
class ScoreMatrix:
    """The matrix of scores (batch, heads, seqlen_q, seqlen_k), which is never stored: its sizes and what applies to it.

    batch: the slice of the batch elements that are computed. dtype: of scores and softmax, float32, or float64 for
    float64 inputs. first: the number of batch element 0: the sequence's number in a packed call, else 0.
    """

    mask: Mask | None
    score_mods: ScoreMods
    batch: slice
    heads: int
    seqlen_q: int
    seqlen_k: int
    dtype: torch.dtype
    device: torch.device
    dropout: Dropout | None = None
    first: int = 0

    @classmethod
    def of(
        cls, q: Tensor, k: Tensor, mask: Mask | None, score_mods: ScoreMods, dropout: Dropout | None, first: int = 0
    ) -> ScoreMatrix:
        """The matrix of all batch elements of q and k (bshd); `first` is the number of batch element 0."""
        dtype = torch.promote_types(q.dtype, torch.float32)
        batch, seqlen_q, heads, _ = q.shape
        return cls(mask, score_mods, slice(0, batch), heads, seqlen_q, k.shape[1], dtype, q.device, dropout, first)

    @property
    def numbers(self) -> slice:
        """The numbers of the batch elements, which masks and modifications get as `b`."""
        return slice(self.first + self.batch.start, self.first + self.batch.stop)

    def arange(self, size: slice) -> Tensor:
        """The integers of a slice as an int64 tensor."""
        return torch.arange(size.start, size.stop, device=self.device)

    def indices(self, rows: slice, keys: slice) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """b, h, q and k of a tile: int64, broadcastable to the tile. q are positions, aligned bottom-right."""
        b, h = self.arange(self.numbers), self.arange(slice(0, self.heads))
        q = self.arange(rows) + (self.seqlen_k - self.seqlen_q)
        return b[:, None, None, None], h[:, None, None], q[:, None], self.arange(keys)

    def modified(self, tile: Tensor, rows: slice, keys: slice) -> Tensor:
        """A tile of scores after the score modifications, in order."""
        for score_mod in self.score_mods:
            if isinstance(score_mod, Bias):
                # Adding a slice is much faster than `Bias`, which gathers elements; so is its gradient.
                tile = tile + self.cut(score_mod.tensor, rows, keys).to(self.dtype)
            else:
                modified = torch.as_tensor(score_mod(tile, *self.indices(rows, keys)), device=self.device)
                tile = modified.to(self.dtype).expand(torch.broadcast_shapes(tile.shape, modified.shape))
        return tile

    def cut(self, bias: Tensor, rows: slice, keys: slice) -> Tensor:
        """The tile of a bias (batch | 1, heads | 1, seqlen_q | 1, seqlen_k), as a view."""
        everything = slice(None)
        batch = everything if bias.shape[0] == 1 else self.batch
        return bias[batch, :, everything if bias.shape[2] == 1 else rows, keys]

    def forbidden(self, rows: slice, keys: slice) -> Tensor:
        """Where the mask hides a key of the tile: bool, broadcastable to the tile. Needs a mask."""
        assert self.mask is not None
        return ~torch.as_tensor(self.mask.allows(*self.indices(rows, keys)), device=self.device)

    def dropped(self, rows: slice, keys: slice) -> Tensor:
        """Which probabilities of a tile are dropped: bool (batch, heads, rows, keys). Needs dropout."""
        assert self.dropout is not None
        p, seed, place = self.dropout
        return ~keep_mask(seed, p, self.numbers, self.heads, rows, keys, place)

    @property
    def weight_of_kept(self) -> float:
        """The factor of probabilities that are kept: 1 / (1 - p)."""
        return 1.0 if self.dropout is None else weight_of_kept(self.dropout.p)


class Stretch(NamedTuple):
    """Adjacent keys, half-open, and those of them that all rows of a block see."""

    lo: int
    hi: int
    full: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class KeyRange:
    """The keys of a block of rows, half-open: `lo..hi` that any row may see, `full_lo..full_hi` that all rows see.

    0 <= lo <= full_lo <= full_hi <= hi <= seqlen_k; if no key is seen by all rows, full_lo = full_hi = hi.

    stretches: what is known beyond that: the keys of lo..hi that are visited, in order, and what of them all rows see.
    """

    lo: int
    hi: int
    full_lo: int
    full_hi: int
    stretches: tuple[Stretch, ...] | None = None

    def partial(self, keys: slice) -> bool:
        """Whether the mask must be evaluated in a tile of these keys."""
        if self.stretches is None:
            return keys.start < self.full_lo or keys.stop > self.full_hi
        full = (each for stretch in self.stretches for each in stretch.full)
        return not any(lo <= keys.start and keys.stop <= hi for lo, hi in full)

    def tiles(self, most: int) -> list[slice]:
        """The keys to visit, in tiles of at most `most` keys."""
        parts = [(self.lo, self.hi)] if self.stretches is None else [(each.lo, each.hi) for each in self.stretches]
        return [slice(lo, min(lo + most, end)) for begin, end in parts for lo in range(begin, end, most)]

    @property
    def visited(self) -> int:
        """The number of keys to visit."""
        return sum(keys.stop - keys.start for keys in self.tiles(max(self.hi, 1)))


def row_blocks(seqlen_q: int, block_M: int) -> list[slice]:
    """Slices of block_M rows that cover seqlen_q; the last may be shorter."""
    return [slice(row, min(row + block_M, seqlen_q)) for row in range(0, seqlen_q, block_M)]


def key_ranges(matrix: ScoreMatrix, block_M: int) -> list[list[KeyRange]]:
    """The key range of each block of rows: one list for all batch elements, or a list for each if they differ."""
    seqlen_k, count = matrix.seqlen_k, -(-matrix.seqlen_q // block_M)
    if matrix.mask is None:
        return [[KeyRange(0, seqlen_k, 0, seqlen_k)] * count]
    q_lo = matrix.arange(slice(0, count)) * block_M
    q_hi = (q_lo + (block_M - 1)).clamp(max=matrix.seqlen_q - 1)
    offset = seqlen_k - matrix.seqlen_q
    b, h = matrix.arange(matrix.numbers)[:, None, None], matrix.arange(slice(0, matrix.heads))[:, None]
    seen = matrix.mask.kv_range(b, h, q_lo + offset, q_hi + offset, seqlen_k)
    seen_by_all = matrix.mask.full_range(b, h, q_lo + offset, q_hi + offset, seqlen_k)

    def bounds(value: int | Tensor) -> Tensor:
        """(batch or 1, heads or 1, blocks), within the keys."""
        return (torch.zeros_like(q_lo)[None, None] + value).clamp(0, seqlen_k)

    # Over the heads: the union of what some row sees, the intersection of what all rows see.
    lo, hi = bounds(seen[0]).amin(1), bounds(seen[1]).amax(1)
    full_lo, full_hi = bounds(seen_by_all[0]).amax(1), bounds(seen_by_all[1]).amin(1)
    ranges = torch.stack(torch.broadcast_tensors(lo, hi, full_lo, full_hi), dim=-1)
    if bool((ranges == ranges[:1]).all()):
        ranges = ranges[:1]
    return [[_consistent(*block) for block in element] for element in ranges.tolist()]


def _consistent(lo: int, hi: int, full_lo: int, full_hi: int) -> KeyRange:
    hi = max(lo, hi)
    full_lo, full_hi = max(lo, full_lo), min(hi, full_hi)
    return KeyRange(lo, hi, full_lo, full_hi) if full_lo < full_hi else KeyRange(lo, hi, hi, hi)
