"""Attention as the textbook writes it, with the matrix of weights in memory: to look at, and to compare with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..call.dropout import draw_seed, keep_mask, weight_of_kept
from ..runtime.run import MaskLike
from ..variant.key import encode
from ..variant.masks import Mask
from .masked import MaskedAttention


class NaiveAttention(MaskedAttention):
    """``softmax(q k^T / sqrt(head_dim)) v`` in four lines; the one module that returns the weights.

    Memory grows with the square of the length, in both passes. Arguments as :class:`MaskedAttention`; `forward`
    returns the weights (batch, num_heads, seqlen, seqlen) as its second value, after dropout, which drops those that
    the other modules drop for the same seed. A position that sees no other has weights of 0, and so has an attention
    of 0.

    Source: Vaswani et al. 2017 (arXiv 1706.03762), section 3.2.1.
    """

    if TYPE_CHECKING:

        def __call__(self, x: Tensor, mask: MaskLike | None = None) -> tuple[Tensor, Tensor]: ...

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None) -> tuple[Tensor, Tensor]:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        group = self.num_heads // self.num_kv_heads
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scores = q @ k.mT * self.head_dim**-0.5
        if mask is None:
            weights = torch.softmax(scores, dim=-1)
        else:
            hidden = ~_allowed(mask, scores)
            # Not -inf: the softmax of a row in which nothing is seen would be NaN, and so would its gradient.
            weights = torch.softmax(scores.masked_fill(hidden, torch.finfo(scores.dtype).min), dim=-1)
            weights = weights.masked_fill(hidden, 0.0)
        if self.dropout_p:
            weights = _dropped(weights, self.dropout_p)
        return (weights @ v).transpose(1, 2), weights


def _dropped(weights: Tensor, p: float) -> Tensor:
    """The weights (batch, heads, seqlen, seqlen) after dropout, by the pattern of :mod:`tileattn.call.dropout`."""
    batch, heads, seqlen, _ = weights.shape
    keep = keep_mask(draw_seed(weights.device), p, batch, heads, slice(0, seqlen), slice(0, seqlen))
    return weights * keep * weight_of_kept(p)


def _allowed(mask: Mask, scores: Tensor) -> Tensor:
    """Which positions see which: bool, broadcastable to scores (batch, heads, seqlen, seqlen)."""
    batch, heads, seqlen, _ = scores.shape
    mask.check(batch, heads, seqlen, seqlen)
    if not torch.compiler.is_compiling():  # torch.compile traces the mask itself, below, and says what it cannot
        encode(mask, ())  # raises what attention() would of a user's function
    b, h, i = (torch.arange(size, device=scores.device) for size in (batch, heads, seqlen))
    allowed = mask.allows(b[:, None, None, None], h[:, None, None], i[:, None], i)
    return torch.as_tensor(allowed, device=scores.device)  # a function may return True
