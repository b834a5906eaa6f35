"""Grouped-query and multi-query attention: query heads share key/value heads, which makes a KV cache smaller."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .base import SelfAttention, check_positive


class KVCacheSize(NamedTuple):
    """Bytes of a KV cache; see :meth:`GroupedQueryAttention.get_memory_usage`.

    bytes: with num_kv_heads heads. multi_head_bytes: with num_heads heads, as multi-head attention needs.
    """

    bytes: int
    multi_head_bytes: int

    @property
    def reduction(self) -> float:
        """The factor by which sharing heads shrinks the cache: num_heads / num_kv_heads."""
        return self.multi_head_bytes / self.bytes


class GroupedQueryAttention(SelfAttention):
    """Grouped-query attention: groups of query heads share a key/value head. K and V are not repeated in memory.

    Args:
        embed_dim, num_heads, dropout, bias, causal, device, dtype: as :class:`SelfAttention`.
        num_kv_heads: heads of keys and values, a divisor of num_heads. num_heads gives multi-head attention, 1 gives
            multi-query attention.

    Source: Ainslie et al. 2023 (arXiv 2305.13245).
    """

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

    def get_memory_usage(self, batch: int, seqlen: int, dtype: torch.dtype | None = None) -> KVCacheSize:
        """The size of this layer's KV cache during generation.

        The cache has ``2 * batch * seqlen * num_kv_heads * head_dim`` elements. For comparison, the result also has
        the size with num_heads heads. Memory that `forward` allocates is not counted.

        Args:
            batch: sequences, 1 or more.
            seqlen: cached positions in each, 1 or more.
            dtype: of the cache; None: the parameters' dtype.

        Raises:
            TypeError, ValueError: batch or seqlen is not a positive int, or dtype is not a torch.dtype.
        """
        batch, seqlen = check_positive("batch", batch), check_positive("seqlen", seqlen)
        dtype = self.out_proj.weight.dtype if dtype is None else dtype
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype must be a torch.dtype or None, got {dtype!r}")
        per_head = 2 * batch * seqlen * self.head_dim * dtype.itemsize
        return KVCacheSize(bytes=self.num_kv_heads * per_head, multi_head_bytes=self.num_heads * per_head)


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
