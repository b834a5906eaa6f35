"""The bytes of attention by its formulas: what `get_memory_usage` of the modules returns."""

from __future__ import annotations

from typing import NamedTuple


class KVCacheSize(NamedTuple):
    """Bytes of the keys and values that a layer keeps while it generates.

    bytes: with num_kv_heads heads. multi_head_bytes: with num_heads heads, as multi-head attention needs.
    """

    bytes: int
    multi_head_bytes: int

    @property
    def reduction(self) -> float:
        """The factor by which sharing heads shrinks the cache: num_heads / num_kv_heads."""
        return self.multi_head_bytes / self.bytes


class MemoryUsage(NamedTuple):
    """Bytes of attention, without the projections; see :meth:`SelfAttention.get_memory_usage`.

    qkv, o: of q, k and v, and of the output.
    weights: of the matrix of attention weights, (batch, num_heads, seqlen, seqlen); 0 where it is never in memory.
    lse: of the one number per row that is kept instead of the weights.
    tiles: of a tile of scores, where a loop in Python has it in memory. Kernels have it on the chip.
    naive: what :class:`NaiveAttention` of the same shape needs in all.
    kv_cache: of the layer's cache during generation. It is not part of `total`.
    """

    qkv: int
    o: int
    weights: int
    lse: int
    tiles: int
    naive: int
    kv_cache: KVCacheSize

    @property
    def total(self) -> int:
        """The sum of all but `naive` and `kv_cache`."""
        return self.qkv + self.o + self.weights + self.lse + self.tiles

    @property
    def reduction(self) -> float:
        """The factor by which this module needs less than :class:`NaiveAttention`."""
        return self.naive / self.total
