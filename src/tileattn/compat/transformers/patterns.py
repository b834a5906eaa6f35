"""Masks of transformers' models that :mod:`tileattn.masks` does not have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ...variant.mask_bounds import Range
from ...variant.masks import FIRST_POSITION, Mask
from ...variant.math import load


@dataclass(frozen=True, eq=False)
class ShiftedWindow(Mask):
    """A sliding window that is not aligned bottom-right: the keys from ``q + shift - left`` to ``q + shift + right``.

    A static cache needs it: its last slots are unused, and the last query's position is before them. The shift may be
    known only on the device.

    Args:
        left: number of visible keys before position ``q + shift``; None for no bound.
        right: number of visible keys after position ``q + shift``; None for no bound.
        shift: added to a query's bottom-right aligned position; an int, or an integer tensor (1,) on the queries'
            device.
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
class DenseMask(Mask):
    """A mask in memory. Kernels read it tile by tile and visit every tile.

    Args:
        seen: bool tensor (batch or 1, heads or 1, seqlen_q or 1, seqlen_k): True where a query sees a key.
    """

    seen: torch.Tensor

    def allows(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        rows, keys = self.seen.shape[2], self.seen.shape[3]
        return load(self.seen, b, h, q - (keys - rows), k)

    def check(self, batch: int, heads: int, seqlen_q: int, seqlen_k: int) -> None:
        shape, full = tuple(self.seen.shape), (batch, heads, seqlen_q)
        fits = len(shape) == 4 and all(size in (1, whole) for size, whole in zip(shape[:3], full))
        if not fits or shape[3] != seqlen_k:
            raise ValueError(
                f"an attention mask must have shape (batch or 1, heads or 1, queries or 1, keys) with (batch, heads, "
                f"queries, keys) = {(*full, seqlen_k)}, got {shape}"
            )
