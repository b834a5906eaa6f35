"""Attention under a mask: a mask of tileattn, a user's function, or a sliding window."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..api.cache_step import LayerCache
from ..api.sdpa import additive
from ..runtime.run import MaskLike
from ..variant.key import CAUSAL, normalize
from ..variant.mask_bounds import MAX_SIZE
from ..variant.masks import Mask, SlidingWindow
from .attn_mask import checked
from .base import SelfAttention, check_positive


class MaskedAttention(SelfAttention):
    """Self-attention in which a mask says which keys each query sees.

    Args:
        embed_dim, num_heads, num_kv_heads, dropout, bias, causal, device, dtype: as :class:`SelfAttention`.
        mask: a mask of :mod:`tileattn.masks` or a function ``mask(b, h, q, k) -> bool``; None: no restriction. The
            tensors of a mask are not in the state dict, and `to` does not move them. Pass a mask that changes from
            batch to batch, such as :class:`tileattn.Documents`, to `forward`.
        chunk_size: queries of a call with `attn_mask` that are computed at a time, 1 or more; None: all. A boolean
            `attn_mask` is turned into numbers that are added to the scores, ``chunk_size * seqlen`` of them at a time,
            so a smaller chunk_size saves memory where no gradients are recorded. The outputs do not depend on it, but
            for dropout, whose pattern does. It has no effect in a call that also has a mask other than `causal`.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        mask: MaskLike | None = None,
        chunk_size: int | None = None,
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
            num_kv_heads=num_kv_heads,
            dropout=dropout,
            bias=bias,
            causal=causal,
            device=device,
            dtype=dtype,
        )
        self.mask, _ = normalize(mask, None, False)
        self.chunk_size = None if chunk_size is None else check_positive("chunk_size", chunk_size)

    if TYPE_CHECKING:

        def __call__(
            self,
            x: Tensor,
            mask: MaskLike | None = None,
            *,
            attn_mask: Tensor | None = None,
            cache: LayerCache | None = None,
        ) -> tuple[Tensor, Tensor | None]: ...

    def forward(
        self,
        x: Tensor,
        mask: MaskLike | None = None,
        *,
        attn_mask: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """As :meth:`SelfAttention.forward`; a query sees the keys that `mask`, the module's mask and `causal` allow.

        `attn_mask` is a tensor that is True where a key is hidden; a mask or a function is True where a key is seen.

        With a cache, tensors of masks have the size of the cache's capacity in their dimension of keys. A mask without
        `causal` is taken as it is: over a cache a token never sees those of later steps, so the outputs are those of
        the whole sequence where the mask hides these.
        """
        mask, _ = normalize(mask, None, self.causal)
        if self.mask is not None:
            mask = self.mask if mask is None else self.mask & mask
        return self._forward(x, mask, cache, attn_mask)

    def _attend_masked(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, attn_mask: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        if self.chunk_size is None or mask not in (None, CAUSAL):
            return super()._attend_masked(q, k, v, mask, attn_mask)
        seqlen, whole = q.shape[1], checked(attn_mask, q)
        whole = whole.expand(*whole.shape[:2], seqlen, seqlen)
        outputs = []
        for start in range(0, max(seqlen, 1), self.chunk_size):
            stop = min(start + self.chunk_size, seqlen)
            keys = slice(0, seqlen if mask is None else stop)  # the last query is at the last key
            rows = whole[:, :, start:stop, keys]
            bias = additive(~rows, q.dtype) if rows.dtype == torch.bool else rows
            outputs.append(self.attend(q[:, start:stop], k[:, keys], v[:, keys], mask, bias)[0])
        return torch.cat(outputs, dim=1), None

    def extra_repr(self) -> str:
        shown = super().extra_repr() + (f", mask={self.mask!r}" if self.mask is not None else "")
        return shown + (f", chunk_size={self.chunk_size}" if self.chunk_size is not None else "")


class SlidingWindowAttention(SelfAttention):
    """Sliding-window attention: each position sees positions less than `window_size` away.

    With `causal` a position sees itself and the ``window_size - 1`` before it (Mistral's window); otherwise also the
    ``window_size - 1`` after it. Time and memory are linear in seqlen.

    Args:
        embed_dim, num_heads, num_kv_heads, dropout, bias, causal, device, dtype: as :class:`SelfAttention`.
        window_size: 1 or more. The attribute may be changed later; a new size compiles no new kernel.

    Source: Longformer, Beltagy et al. 2020 (arXiv 2004.05150).
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        window_size: int,
        *,
        num_kv_heads: int | None = None,
        dropout: float = 0.0,
        bias: bool = True,
        causal: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        window_size = check_positive("window_size", window_size)
        super().__init__(
            embed_dim,
            num_heads,
            num_kv_heads=num_kv_heads,
            dropout=dropout,
            bias=bias,
            causal=causal,
            device=device,
            dtype=dtype,
        )
        self.window_size = window_size

    def forward(
        self, x: Tensor, *, attn_mask: Tensor | None = None, cache: LayerCache | None = None
    ) -> tuple[Tensor, Tensor | None]:
        if cache is not None and not self.causal:
            raise ValueError("cache needs a module with causal=True: otherwise earlier tokens see later ones")
        others = min(self.window_size - 1, MAX_SIZE)
        return self._forward(x, SlidingWindow(others, 0 if self.causal else others), cache, attn_mask)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, window_size={self.window_size}"
