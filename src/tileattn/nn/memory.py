"""The bytes of attention by its formulas: what `get_memory_usage` of the modules returns."""

from __future__ import annotations

from typing import Any, NamedTuple

# Names that `MemoryUsage[...]` takes beside its fields, without the unit at their end.
OTHER_NAMES = {"output": "o", "attention_matrix": "weights", "statistics": "lse", "block_attention": "tiles"}
UNITS = {"_mb": 1e6, "_gb": 1e9}


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

    The keys of FlashTile's dict that have a meaning here are read by name, ``usage["total_mb"]``: any of the above,
    `total` too, with ``_mb`` (10^6 bytes) or ``_gb``; ``output``, ``attention_matrix``, ``statistics`` and
    ``block_attention`` for o, weights, lse and tiles; ``complexity``; ``kv_savings_ratio``; ``comparison_with_naive``.
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

    def __getitem__(self, key: Any) -> Any:
        """A field by its place, or a figure by its name in FlashTile; KeyError names those that exist."""
        if not isinstance(key, str):
            return tuple.__getitem__(self, key)
        named = self._named()
        if key not in named:
            raise KeyError(f"{key!r} is not a figure of memory; accepted: {', '.join(named)}")
        return named[key]

    def __contains__(self, key: object) -> bool:
        return key in self._named() if isinstance(key, str) else tuple.__contains__(self, key)

    def keys(self) -> list[str]:
        """The names that ``usage[name]`` takes; so ``dict(usage)`` is a dict of them."""
        return list(self._named())

    def _named(self) -> dict[str, Any]:
        byte_counts = {name: getattr(self, name) for name in ("qkv", "o", "weights", "lse", "tiles", "naive", "total")}
        byte_counts |= {name: byte_counts[own] for name, own in OTHER_NAMES.items()}
        return {
            **{name + unit: count / size for name, count in byte_counts.items() for unit, size in UNITS.items()},
            "complexity": "O(N²)" if self.weights else "O(N)",
            "kv_savings_ratio": self.kv_cache.reduction,
            "comparison_with_naive": {"naive_mb": self.naive / 1e6, "reduction_ratio": self.reduction},
        }
