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

All take a mask tensor, ``module(x, attn_mask=mask)``: True where a key is hidden (PyTorch's
``scaled_dot_product_attention`` has it the other way round), or numbers that are added to the scores.
:func:`create_padding_mask` and :func:`create_causal_mask` make such masks.

The last five run :func:`tileattn.attention`, so on a GPU they run its kernels. They generate with a
:class:`tileattn.PagedKVCache`: ``module(x, cache=step.layer(i))``, see :meth:`SelfAttention.forward`.
"""

from __future__ import annotations

from .attn_mask import create_causal_mask, create_padding_mask
from .base import SelfAttention
from .factory import get_attention
from .flash import CausalEfficiency, FlashAttentionV1, FlashAttentionV2
from .grouped import GroupedQueryAttention, MultiQueryAttention
from .masked import MaskedAttention, SlidingWindowAttention
from .memory import KVCacheSize, MemoryUsage
from .naive import NaiveAttention
from .triton_flash import TritonFlashAttention

__all__ = [
    "CausalEfficiency",
    "FlashAttentionV1",
    "FlashAttentionV2",
    "GroupedQueryAttention",
    "KVCacheSize",
    "MaskedAttention",
    "MemoryUsage",
    "MultiQueryAttention",
    "NaiveAttention",
    "SelfAttention",
    "SlidingWindowAttention",
    "TritonFlashAttention",
    "create_causal_mask",
    "create_padding_mask",
    "get_attention",
]
