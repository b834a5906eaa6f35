"""Grouped-query and multi-query attention: query heads share key/value heads, which makes a KV cache smaller."""

from __future__ import annotations

import torch

from .base import SelfAttention, check_positive


class GroupedQueryAttention(SelfAttention):
    """Grouped-query attention: groups of query heads share a key/value head. K and V are not repeated in memory.

    The projections are `q_proj`, `k_proj`, `v_proj` and `out_proj`, also where num_kv_heads equals num_heads.

    Args:
        embed_dim, num_heads, dropout, bias, causal, device, dtype: as :class:`SelfAttention`.
        num_kv_heads: heads of keys and values, a divisor of num_heads. num_heads gives multi-head attention, 1 gives
            multi-query attention.

    Source: Ainslie et al. 2023 (arXiv 2305.13245).
    """

    separate_projections = True

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int,
        *,
        dropout: float = 0.0,
        bias: bool = True,
        causal: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        num_kv_heads = check_positive("num_kv_heads", num_kv_heads)
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


class MultiQueryAttention(GroupedQueryAttention):
    """Multi-query attention: all query heads share one key/value head.

    Args:
        embed_dim, num_heads, dropout, bias, causal, device, dtype: as :class:`SelfAttention`.

    Source: Shazeer 2019 (arXiv 1911.02150).
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        dropout: float = 0.0,
        bias: bool = True,
        causal: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(embed_dim, num_heads, 1, dropout=dropout, bias=bias, causal=causal, device=device, dtype=dtype)
