"""Self-attention as torch.nn modules, with projections: ``forward(x)`` returns ``(output, weights or None)``.

| class | name | |
|---|---|---|
| :class:`NaiveAttention` | naive | the textbook's, with its weights; memory quadratic in the length |
| :class:`FlashAttentionV1` | flash_v1 | FlashAttention's loop in plain PyTorch, to be read |
| :class:`FlashAttentionV2` | flash_v2 | FlashAttention-2's |
| :class:`SlidingWindowAttention` | sliding_window | positions less than `window_size` away |
| :class:`GroupedQueryAttention` | gqa, grouped_query | query heads share key/value heads |
| :class:`MultiQueryAttention` | mqa, multi_query | all share one |
| :class:`MaskedAttention` | masked | any mask of tileattn, or a function; without one, plain multi-head attention |
| :class:`TritonFlashAttention` | triton | FlashAttention-2's kernels in Triton, on GPUs |

The last five run :func:`tileattn.attention`, so on a GPU they run its kernels.
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
