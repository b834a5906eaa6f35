"""Textbook attention with the matrix of weights in memory, for inspection and comparison."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..api.cache_step import LayerCache
from ..call.dropout import draw_seed, keep_mask, weight_of_kept
from ..runtime.run import MaskLike
from ..variant.key import encode
from ..variant.masks import Mask
from ..variant.sparse.blocks import for_call
from .masked import MaskedAttention


class NaiveAttention(MaskedAttention):
    """Attention by its definition, ``softmax(q k^T / sqrt(head_dim)) v``; the only module that returns the weights.

    The memory of both passes grows with the square of seqlen. Arguments are those of :class:`MaskedAttention`, without
    chunk_size. The second value of `forward` is the weights (batch, num_heads, seqlen, seqlen), after dropout; for one
    seed, dropout drops the same weights in all modules. A row that sees no key has weights and attention of 0. The
    module takes no cache.

    Source: Vaswani et al. 2017 (arXiv 1706.03762), section 3.2.1.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        mask: MaskLike | None = None,
        num_kv_heads: int | None = None,
        dropout: float = 0.0,
        bias: bool = True,
        causal: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            embed_dim,
            num_heads,
            mask=mask,
            num_kv_heads=num_kv_heads,
            dropout=dropout,
            bias=bias,
            causal=causal,
            device=device,
            dtype=dtype,
        )

    if TYPE_CHECKING:

        def __call__(
            self,
            x: Tensor,
            mask: MaskLike | None = None,
            *,
            attn_mask: Tensor | None = None,
            cache: LayerCache | None = None,
        ) -> tuple[Tensor, Tensor]: ...

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        group = self.num_heads // self.num_kv_heads
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scores = q @ k.mT * self.head_dim**-0.5
        hidden = None if mask is None else ~_allowed(mask, scores, self.num_kv_heads)
        if bias is not None:
            scores = (scores + bias).to(scores.dtype)
            hidden = scores.isneginf() if hidden is None else hidden | scores.isneginf()
        if hidden is None:
            weights = torch.softmax(scores, dim=-1)
        else:
            # Not -inf: the softmax of a row without visible keys would be NaN, and so would its gradient.
            weights = torch.softmax(scores.masked_fill(hidden, torch.finfo(scores.dtype).min), dim=-1)
            weights = weights.masked_fill(hidden, 0.0)
        if self.dropout_p:
            weights = _dropped(weights, self.dropout_p)
        return (weights @ v).transpose(1, 2), weights

    def _kept(self, qkv: int, rows: int, seqlen: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
        qkv = 3 * rows * self.head_dim * dtype.itemsize  # keys and values are repeated for all heads
        return qkv, rows * seqlen * dtype.itemsize, 0, 0


def _dropped(weights: Tensor, p: float) -> Tensor:
    """The weights (batch, heads, seqlen, seqlen) after dropout by :mod:`tileattn.call.dropout`."""
    batch, heads, seqlen, _ = weights.shape
    keep = keep_mask(draw_seed(weights.device), p, batch, heads, slice(0, seqlen), slice(0, seqlen))
    return weights * keep * weight_of_kept(p)


def _allowed(mask: Mask, scores: Tensor, kv_heads: int) -> Tensor:
    """Where the mask allows a key: bool, broadcastable to scores (batch, heads, seqlen, seqlen)."""
    batch, heads, seqlen, _ = scores.shape
    mask = for_call(mask, lambda: (batch, heads, kv_heads, seqlen, seqlen), lambda: 0) or mask
    mask.check(batch, heads, seqlen, seqlen)
    if not torch.compiler.is_compiling():  # torch.compile traces `allows` below and reports errors itself
        encode(mask, ())  # raises the errors that attention() raises for a user's function
    b, h, i = (torch.arange(size, device=scores.device) for size in (batch, heads, seqlen))
    allowed = mask.allows(b[:, None, None, None], h[:, None, None], i[:, None], i)
    return torch.as_tensor(allowed, device=scores.device)  # a function may return True
