"""Masks that transformers' models need beside those of :mod:`tileattn.masks`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from ...masks import FIRST_POSITION, Mask, Range
from ...math import load, where


@dataclass(frozen=True, eq=False)
class ShiftedWindow(Mask):
    """Keys from ``q + shift - left`` to ``q + shift + right``: queries that do not stand at the last keys.

    So it is in a static cache, whose last slots are not used yet: the queries stand before them, and only the device
    knows where.

    Args:
        left: keys seen before the query's place; None for no bound.
        right: keys seen after it; None for no bound.
        shift: how far a query's place is from its position; an int, or an integer tensor (1,) on the queries' device.
    """

    left: int | None
    right: int | None
    shift: int | torch.Tensor

    def _place(self, q: Any) -> Any:
        return q + self._distance

    @property
    def _distance(self) -> Any:
        return load(self.shift, 0) if hasattr(self.shift, "ndim") else self.shift

    def allows(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        place = self._place(q)
        if self.left is None and self.right is None:
            return k == k
        if self.left is None:
            return k <= place + self.right
        if self.right is None:
            return k >= place - self.left
        return (k >= place - self.left) & (k <= place + self.right)

    def kv_range(self, b: Any, h: Any, q_lo: Any, q_hi: Any, seqlen_k: Any) -> Range:
        lo = 0 if self.left is None else self._place(q_lo) - self.left
        hi = seqlen_k if self.right is None else self._place(q_hi) + self.right + 1
        return lo, hi

    def full_range(self, b: Any, h: Any, q_lo: Any, q_hi: Any, seqlen_k: Any) -> Range:
        lo = 0 if self.left is None else self._place(q_hi) - self.left
        hi = seqlen_k if self.right is None else self._place(q_lo) + self.right + 1
        return lo, hi

    def q_range(self, b: Any, h: Any, k_lo: Any, k_hi: Any, seqlen_k: Any) -> Range:
        lo = FIRST_POSITION if self.right is None else k_lo - self.right - self._distance
        hi = seqlen_k if self.left is None else k_hi + self.left + 1 - self._distance
        return lo, hi

    def full_q_range(self, b: Any, h: Any, k_lo: Any, k_hi: Any, seqlen_k: Any) -> Range:
        lo = FIRST_POSITION if self.right is None else k_hi - self.right - self._distance
        hi = seqlen_k if self.left is None else k_lo + self.left + 1 - self._distance
        return lo, hi


@dataclass(frozen=True, eq=False)
class SeenKeys(Mask):
    """A padding mask: of each sequence, the keys that are no padding.

    Tiles outside of a sequence's first and last key are skipped; where there is no padding between them, which is so
    for padding on either side, no tile inside computes the mask.

    Args:
        seen: bool tensor (batch, seqlen_k).
    """

    seen: torch.Tensor
    first: torch.Tensor = field(init=False, repr=False)
    end: torch.Tensor = field(init=False, repr=False)
    # Where keys without a gap end: `end`, or `first` if there is a gap.
    full_end: torch.Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        seqlen = self.seen.shape[1]
        place = torch.arange(seqlen, device=self.seen.device)
        first = torch.where(self.seen, place, seqlen).amin(1)
        end = torch.where(self.seen, place + 1, 0).amax(1)
        full_end = torch.where(self.seen.sum(1) == end - first, end, first)
        for name, value in (("first", first), ("end", end), ("full_end", full_end)):
            object.__setattr__(self, name, value.to(torch.int32))

    def allows(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return load(self.seen, b, k)

    def kv_range(self, b: Any, h: Any, q_lo: Any, q_hi: Any, seqlen_k: Any) -> Range:
        return load(self.first, b), load(self.end, b)

    def full_range(self, b: Any, h: Any, q_lo: Any, q_hi: Any, seqlen_k: Any) -> Range:
        return load(self.first, b), load(self.full_end, b)

    def q_range(self, b: Any, h: Any, k_lo: Any, k_hi: Any, seqlen_k: Any) -> Range:
        some = (k_hi >= load(self.first, b)) & (k_lo < load(self.end, b))
        return where(some, FIRST_POSITION, seqlen_k), seqlen_k

    def full_q_range(self, b: Any, h: Any, k_lo: Any, k_hi: Any, seqlen_k: Any) -> Range:
        all_ = (k_lo >= load(self.first, b)) & (k_hi < load(self.full_end, b))
        return where(all_, FIRST_POSITION, seqlen_k), seqlen_k

    def check(self, batch: int, heads: int, seqlen_q: int, seqlen_k: int) -> None:
        _check_shape("a padding mask", self.seen, (batch, seqlen_k))


@dataclass(frozen=True, eq=False)
class DenseMask(Mask):
    """A mask in memory, read tile by tile: every tile is visited.

    Args:
        seen: bool tensor (batch or 1, heads or 1, seqlen_q or 1, seqlen_k): True where a query sees a key.
    """

    seen: torch.Tensor

    def allows(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        rows, keys = self.seen.shape[2], self.seen.shape[3]
        return load(self.seen, b, h, q - (keys - rows), k)

    def check(self, batch: int, heads: int, seqlen_q: int, seqlen_k: int) -> None:
        _check_shape("an attention mask", self.seen, (batch, heads, seqlen_q, seqlen_k))


def _check_shape(name: str, seen: torch.Tensor, full: tuple[int, ...]) -> None:
    shape = tuple(seen.shape)
    fits = len(shape) == len(full) and all(size in (1, whole) for size, whole in zip(shape[:-1], full))
    if not fits or shape[-1] != full[-1]:
        accepted = ", ".join(str(size) if size == 1 else f"1 or {size}" for size in full[:-1])
        raise ValueError(f"{name} must have shape ({accepted}, {full[-1]}), got {shape}")
