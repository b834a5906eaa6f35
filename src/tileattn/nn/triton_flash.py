"""FlashAttention-2 by the Triton kernels, forward and backward."""

from __future__ import annotations

import torch
from torch import Tensor

from ..api.attention import attention
from ..api.cache_step import LayerCache
from ..variant.key import CAUSAL
from ..variant.masks import Mask
from ..variant.scores import Bias
from .base import SelfAttention


class TritonFlashAttention(SelfAttention):
    """FlashAttention-2 in Triton: :func:`tileattn.attention` with ``backend="triton"``.

    It runs on GPUs that Triton targets. For tests it also runs on a CPU in Triton's interpreter, if
    ``TRITON_INTERPRET=1`` is set before Python starts. Elsewhere `forward` raises NotImplementedError with the reason:
    there is no fallback to another backend.

    Args:
        embed_dim, num_heads, num_kv_heads, bias, causal, device, dtype: as :class:`SelfAttention`.
        dropout: must be 0; the kernels have no dropout.

    Raises:
        ValueError: dropout is not 0.
        TypeError, ValueError: another argument is wrong; see :class:`SelfAttention`.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
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
        if self.dropout:
            raise ValueError(
                f"dropout must be 0, got {dropout}: the Triton kernels have no dropout; MaskedAttention has ('masked')"
            )

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, bias: Tensor | None = None
    ) -> tuple[Tensor, None]:
        causal, score_mod = mask is CAUSAL, None if bias is None else Bias(bias)
        o = attention(q, k, v, mask=None if causal else mask, score_mod=score_mod, causal=causal, backend="triton")
        return o, None

    def attend_cached(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, cache: LayerCache) -> Tensor:
        causal = mask is CAUSAL
        return cache.attend(q, k, v, causal=causal, mask=None if causal else mask, backend="triton")
