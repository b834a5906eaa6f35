"""The mask of a tree of queries, as in speculative decoding: `tree_mask` of :func:`tileattn.decode`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .mask_bounds import Range
from .masks import Mask
from .math import load


@dataclass(frozen=True, eq=False)
class TreeMask(Mask):
    """A query sees all keys before the call's own, and of the call's own those that the tree has.

    Args:
        tree: bool tensor (batch or 1, seqlen_q, seqlen_q): row i sees the call's key j where ``tree[b, i, j]``.
        first: int32 tensor (batch,), the position of each sequence's first query, which is that of its key 0.
    """

    tree: torch.Tensor
    first: torch.Tensor

    def allows(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        first = load(self.first, b)
        # Before `first` the second index is negative: there `load` returns some element, and the result is True.
        return (k < first) | load(self.tree, b, q - first, k - first)

    def full_range(self, b: Any, h: Any, q_lo: Any, q_hi: Any, seqlen_k: Any) -> Range:
        return 0, load(self.first, b)
