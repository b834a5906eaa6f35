"""Self-attention as torch.nn modules with projections.

``forward(x)`` returns ``(output, weights)``; the weights are None for all but :class:`NaiveAttention`.

| class | name | |
|---|---|---|
| :class:`NaiveAttention` | naive | textbook attention; returns the weights; memory quadratic in seqlen |
| :class:`FlashAttentionV1` | flash_v1 | FlashAttention's loop in plain PyTorch, meant to be read |
| :class:`FlashAttentionV2` | flash_v2 | FlashAttention-2's loop in plain PyTorch, meant to be read |
| :class:`SlidingWindowAttention` | sliding_window | a position sees positions less than `window_size` away |
| :class:`GroupedQueryAttention` | gqa, grouped_query | groups of query heads share a key/value head |
| :class:`MultiQueryAttention` | mqa, multi_query | all query heads share one key/value head |
| :class:`MaskedAttention` | masked | any mask of tileattn or a function; without a mask, multi-head attention |
| :class:`TritonFlashAttention` | triton | FlashAttention-2 by Triton kernels, on GPUs |

The last five run :func:`tileattn.attention`, so on a GPU they run its kernels. They generate with a
:class:`tileattn.PagedKVCache`: ``module(x, cache=step.layer(i))``, see :meth:`SelfAttention.forward`.
"""

from __future__ import annotations

from .base import SelfAttention
from .factory import get_attention
from .flash import CausalEfficiency, FlashAttentionV1, FlashAttentionV2
from .grouped import GroupedQueryAttention, KVCacheSize, MultiQueryAttention
from .masked import MaskedAttention, SlidingWindowAttention
from .naive import NaiveAttention
from .triton_flash import TritonFlashAttention

__all__ = [
    "CausalEfficiency",
    "FlashAttentionV1",
    "FlashAttentionV2",
    "GroupedQueryAttention",
    "KVCacheSize",
    "MaskedAttention",
    "MultiQueryAttention",
    "NaiveAttention",
    "SelfAttention",
    "SlidingWindowAttention",
    "TritonFlashAttention",
    "get_attention",
]
