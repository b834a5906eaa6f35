"""Attention in which several query heads share a head of keys and values, so that fewer of these need be kept."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .base import SelfAttention, check_positive


class KVCacheSize(NamedTuple):
    """Bytes of a cache of keys and values; see :meth:`GroupedQueryAttention.get_memory_usage`."""

    bytes: int
    multi_head_bytes: int

    @property
    def reduction(self) -> float:
        """How many times smaller than with a key/value head for each query head: num_heads / num_kv_heads."""
        return self.multi_head_bytes / self.bytes


class GroupedQueryAttention(SelfAttention):
    """Grouped-query attention: query heads share key/value heads, which are never repeated in memory.

    Args:
        embed_dim, num_heads, dropout, bias, causal, device, dtype: as :class:`SelfAttention`.
        num_kv_heads: heads of keys and values, a divisor of num_heads. With num_heads of them it is multi-head
            attention, with 1 multi-query attention.

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
        """What a cache of this layer's keys and values takes while text is generated.

        That is ``2 * batch * seqlen * num_kv_heads * head_dim`` elements; beside it stands the same with num_heads, as
        multi-head attention would need. What a call itself allocates is not in it.

        Args:
            batch: sequences, 1 or more.
            seqlen: cached positions in each, 1 or more.
            dtype: of the cache; None: the parameters'.

        Raises:
            TypeError, ValueError: batch or seqlen is no positive int, or dtype no torch.dtype.
        """
        batch, seqlen = check_positive("batch", batch), check_positive("seqlen", seqlen)
        dtype = self.out_proj.weight.dtype if dtype is None else dtype
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype must be a torch.dtype or None, got {dtype!r}")
        per_head = 2 * batch * seqlen * self.head_dim * dtype.itemsize
        return KVCacheSize(bytes=self.num_kv_heads * per_head, multi_head_bytes=self.num_heads * per_head)


class MultiQueryAttention(GroupedQueryAttention):
    """Multi-query attention: all query heads share one head of keys and values.

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
