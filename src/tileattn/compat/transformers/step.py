"""Generation steps on a static cache, by :func:`tileattn.decode`.

A static cache has a slot for every token that there may be. Its mask says that a query sees the slots up to its own
position, which only the device knows. `decode` takes that number as the length of each sequence: it reads the slots
that are filled, and one compiled step, or one CUDA graph, serves all lengths.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...api.decode import decode
from ...runtime.few_queries import fit_in_a_tile
from ...variant.masks import Mask, SlidingWindow
from .mask import MaskParts
from .patterns import ShiftedWindow


def is_step(mask: Any, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, dropout: float) -> bool:
    """Whether a call is a step on a static cache that `decode` computes: few queries, no gradients, no dropout.

    Args:
        mask: what the layer got.
        q: (batch, seqlen_q, heads, head_dim).
        k: (batch, slots, kv_heads, head_dim).
        v: (batch, slots, kv_heads, head_dim_v).
        sink: one logit per head, or None.
        dropout: probability of dropping a weight.
    """
    if not isinstance(mask, MaskParts) or mask.filled is None or dropout:
        return False
    # A mask that says the same of all batch elements may have been made for another number of them.
    if mask.filled.shape[0] != q.shape[0] or not fit_in_a_tile(q.shape[1], q.shape[2], k.shape[2]):
        return False
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, sink)):
        return False
    # Autocast would cast, and so copy, the cache.
    return q.dtype == k.dtype == v.dtype and not torch._C._is_any_autocast_enabled()


def attend_step(q: Tensor, k: Tensor, v: Tensor, mask: MaskParts, **options: Any) -> Tensor:
    """Attention of the last queries to the filled slots; tensors as for :func:`is_step`.

    Args:
        q: see :func:`is_step`.
        k: see :func:`is_step`.
        v: see :func:`is_step`.
        mask: with `filled`.
        options: keyword arguments of :func:`tileattn.decode`: score_mod, scale, sink, backend.

    Returns:
        o (batch, seqlen_q, heads, head_dim_v).
    """
    assert mask.filled is not None
    causal, of_step = variant_of_step(mask)
    o = decode(q, k, v, mask.filled, causal=causal, mask=of_step, **options)
    assert isinstance(o, Tensor)
    return o


def variant_of_step(mask: MaskParts) -> tuple[bool, Mask | None]:
    """The arguments causal and mask, as arguments of :func:`tileattn.decode`, of a mask with `filled`."""
    assert isinstance(mask.window, ShiftedWindow)
    # Aligned to the last filled slot, as `decode` aligns masks, the shifted window is an ordinary one.
    left = mask.window.left
    window: Mask | None = None if left is None else SlidingWindow(left, 0)
    both = window if mask.padding is None else mask.padding if window is None else window & mask.padding
    return window is None, both
