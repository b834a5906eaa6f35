"""The masks of flash-attn's interface, and of PyTorch's flash operators: causal or not, and two sizes of a window."""

from __future__ import annotations

from typing import Any

from ..variant.mask_bounds import MAX_SIZE
from ..variant.masks import Causal, Mask, SlidingWindow


def window_mask(causal: bool, left: int | None, right: int | None, seqlen_k: Any) -> Mask | None:
    """None where every query sees all keys, of which there are at most `seqlen_k`.

    left, right: None or a negative number for no bound. Aligned bottom-right, as all masks are.
    """
    left = None if left is None or left < 0 or left >= seqlen_k else left
    right = 0 if causal else None if right is None or right < 0 else right
    if type(right) is int:
        right = min(right, MAX_SIZE)  # beyond all keys
    if left is None and right is None:
        return None
    return Causal() if left is None and right == 0 else SlidingWindow(left, right)
