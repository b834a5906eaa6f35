"""Masks and score modifications on tiles of scores.

A tile is some rows (queries) times some keys; its scores are (batch, heads, rows, keys).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...call.dropout import Dropout, keep_mask, weight_of_kept
from ...variant.masks import Mask
from ...variant.scores import Bias

ScoreMods = Sequence[Callable[..., Tensor]]


@dataclass(frozen=True)
class Variant:
    """What is done to scores and probabilities, and the shape of their matrix, which is never materialised.

    batch is a slice of the batch elements that there are, of which the first has the number `first`: 0, but for one of
    several sequences of a packed call. dtype is that of scores and softmax: float32, or float64 for float64 inputs.
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
    ) -> Variant:
        """That of all batch elements of q and k (bshd), of which the first has the number `first`."""
        dtype = torch.promote_types(q.dtype, torch.float32)
        batch, seqlen_q, heads, _ = q.shape
        return cls(mask, score_mods, slice(0, batch), heads, seqlen_q, k.shape[1], dtype, q.device, dropout, first)

    @property
    def numbers(self) -> slice:
        """Of the batch elements: what masks and modifications get as `b`."""
        return slice(self.first + self.batch.start, self.first + self.batch.stop)

    def arange(self, size: slice) -> Tensor:
        """The integers of a slice, int64."""
        return torch.arange(size.start, size.stop, device=self.device)

    def indices(self, rows: slice, keys: slice) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """b, h, q, k of a tile, int64, broadcastable to it; q are positions, aligned bottom-right."""
        b, h = self.arange(self.numbers), self.arange(slice(0, self.heads))
        q = self.arange(rows) + (self.seqlen_k - self.seqlen_q)
        return b[:, None, None, None], h[:, None, None], q[:, None], self.arange(keys)

    def modified(self, tile: Tensor, rows: slice, keys: slice) -> Tensor:
        """A tile of scores after the score modifications, in order."""
        for score_mod in self.score_mods:
            if isinstance(score_mod, Bias):
                # What `Bias` does by gathering elements, as a slice: much faster, and its gradient too.
                tile = tile + self.cut(score_mod.tensor, rows, keys).to(self.dtype)
            else:
                modified = torch.as_tensor(score_mod(tile, *self.indices(rows, keys)), device=self.device)
                tile = modified.to(self.dtype).expand(torch.broadcast_shapes(tile.shape, modified.shape))
        return tile

    def cut(self, bias: Tensor, rows: slice, keys: slice) -> Tensor:
        """The tile of a bias (batch | 1, heads | 1, seqlen_q | 1, seqlen_k)."""
        everything = slice(None)
        batch = everything if bias.shape[0] == 1 else self.batch
        return bias[batch, :, everything if bias.shape[2] == 1 else rows, keys]

    def forbidden(self, rows: slice, keys: slice) -> Tensor:
        """Where a tile of scores must be -inf: bool, broadcastable to the tile. There must be a mask."""
        assert self.mask is not None
        return ~torch.as_tensor(self.mask.allows(*self.indices(rows, keys)), device=self.device)

    def dropped(self, rows: slice, keys: slice) -> Tensor:
        """Which probabilities of a tile are dropped: bool (batch, heads, rows, keys). There must be dropout."""
        assert self.dropout is not None
        return ~keep_mask(self.dropout.seed, self.dropout.p, self.numbers, self.heads, rows, keys)

    @property
    def weight_of_kept(self) -> float:
        """What probabilities that are not dropped are multiplied by."""
        return 1.0 if self.dropout is None else weight_of_kept(self.dropout.p)


@dataclass(frozen=True)
class KeyRange:
    """Of a block of rows: keys `lo..hi` (excluded) that some row may see, and `full_lo..full_hi` that all rows see.

    0 <= lo <= full_lo <= full_hi <= hi <= seqlen_k; where all rows see no common key, full_lo = full_hi = hi.
    """

    lo: int
    hi: int
    full_lo: int
    full_hi: int

    def partial(self, keys: slice) -> bool:
        """Whether the mask has to be computed in a tile of these keys."""
        return keys.start < self.full_lo or keys.stop > self.full_hi


def row_blocks(seqlen_q: int, block_M: int) -> list[slice]:
    """The rows, in blocks."""
    return [slice(row, min(row + block_M, seqlen_q)) for row in range(0, seqlen_q, block_M)]


def key_ranges(variant: Variant, block_M: int) -> list[list[KeyRange]]:
    """The range of each block of rows: one list for all batch elements, or one for each where they differ."""
    seqlen_k, count = variant.seqlen_k, -(-variant.seqlen_q // block_M)
    if variant.mask is None:
        return [[KeyRange(0, seqlen_k, 0, seqlen_k)] * count]
    q_lo = variant.arange(slice(0, count)) * block_M
    q_hi = (q_lo + (block_M - 1)).clamp(max=variant.seqlen_q - 1)
    offset = seqlen_k - variant.seqlen_q
    b, h = variant.arange(variant.numbers)[:, None, None], variant.arange(slice(0, variant.heads))[:, None]
    seen = variant.mask.kv_range(b, h, q_lo + offset, q_hi + offset, seqlen_k)
    seen_by_all = variant.mask.full_range(b, h, q_lo + offset, q_hi + offset, seqlen_k)

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
