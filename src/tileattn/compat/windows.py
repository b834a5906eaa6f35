"""Masks from the arguments of flash-attn and of PyTorch's flash operators: `causal` and the two sizes of a window."""

from __future__ import annotations

from typing import Any

from ..variant.mask_bounds import MAX_SIZE
from ..variant.masks import Causal, Mask, SlidingWindow


def window_mask(causal: bool, left: int | None, right: int | None, seqlen_k: Any) -> Mask | None:
    """The mask for `causal` and a window, aligned bottom-right; None if every query sees all keys.

    Args:
        causal: whether a query sees no key after its position; `right` is then ignored.
        left: keys that a query sees before its position; None or negative: no bound.
        right: keys that a query sees after its position; None or negative: no bound.
        seqlen_k: the largest number of keys; a `left` of at least this many is no bound.
    """
    left = None if left is None or left < 0 or left >= seqlen_k else left
    right = 0 if causal else None if right is None or right < 0 else right
    if type(right) is int:
        right = min(right, MAX_SIZE)  # MAX_SIZE is larger than any seqlen_k, so the mask stays the same
    if left is None and right is None:
        return None
    return Causal() if left is None and right == 0 else SlidingWindow(left, right)
