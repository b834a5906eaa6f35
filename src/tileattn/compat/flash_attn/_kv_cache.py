"""Implements `flash_attn_with_kvcache`: the new keys are appended in place, then the queries read the whole cache.

The translation to :func:`tileattn.append_kv` and :func:`tileattn.decode`:

- flash-attn's cache_seqlens counts the keys before the call, tileattn's seqlens_k those after it.
- cache_batch_idx is a page table with one page for each sequence: a row of the cache.
- cache_leftpad is a mask, :class:`LeftPadding`; positions stay those in the cache.

Nothing here reads a value on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...api.append import append_kv
from ...api.decode import decode
from ...call.argument_names import renamed
from ...call.scalars import as_int
from ...call.validation import check_int32
from ...variant.mask_bounds import Range
from ...variant.masks import Causal, Mask
from ...variant.math import load
from ._attend import Options, check_queries, is_window, without_autocast
from ._forward_only import forward_only


@dataclass(frozen=True, eq=False)
class LeftPadding(Mask):
    """A query sees the keys from a sequence's own first key on: flash-attn's `cache_leftpad`.

    Args:
        first: int32 tensor (batch,), on the queries' device: the position of each sequence's first key.
    """

    first: Tensor

    def allows(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return k >= load(self.first, b)

    def kv_range(self, b: Any, h: Any, q_lo: Any, q_hi: Any, seqlen_k: Any) -> Range:
        return load(self.first, b), seqlen_k

    def full_range(self, b: Any, h: Any, q_lo: Any, q_hi: Any, seqlen_k: Any) -> Range:
        return load(self.first, b), seqlen_k


class NewKeys(NamedTuple):
    """What is appended, and the rotary embedding; the arguments of `flash_attn_with_kvcache`."""

    k: Tensor | None
    v: Tensor | None
    cos: Tensor | None
    sin: Tensor | None
    interleaved: bool

    def check(self) -> None:
        """Raises ValueError unless the arguments are given together."""
        if (self.k is None) != (self.v is None):
            raise ValueError(f"k and v must be given together, got {'v' if self.k is None else 'k'} alone")
        if (self.cos is None) != (self.sin is None):
            missing = "rotary_sin" if self.sin is None else "rotary_cos"
            raise ValueError(f"rotary_cos and rotary_sin must be given together, got no {missing}")
        for name, x in (("k", self.k), ("v", self.v)):
            if x is not None and not isinstance(x, Tensor):
                raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        if self.cos is not None and self.k is None:
            raise ValueError("rotary_cos and rotary_sin need k and v, as in flash-attn, got k=None")


class Cache(NamedTuple):
    """The cache and what says where its sequences lie; the arguments of `flash_attn_with_kvcache`."""

    k: Tensor
    v: Tensor
    seqlens: int | Tensor | None
    batch_idx: Tensor | None
    leftpad: Tensor | None
    block_table: Tensor | None

    def check(self, q: Tensor) -> None:
        """Raises TypeError or ValueError unless the arguments fit q (batch, q_len, heads, head_dim)."""
        for name, cache in (("k_cache", self.k), ("v_cache", self.v)):
            if not isinstance(cache, Tensor):
                raise TypeError(f"{name} must be a torch.Tensor, got {type(cache).__name__}")
            if cache.ndim != 4:
                shape = "(batch, seqlen, kv_heads, head_dim), with block_table (pages, page_size, kv_heads, head_dim)"
                raise ValueError(f"{name} must have 4 dimensions, {shape}, got shape {tuple(cache.shape)}")
        if self.block_table is not None and not isinstance(self.block_table, Tensor):
            raise TypeError(f"block_table must be an int32 tensor, got {type(self.block_table).__name__}")
        if self.block_table is not None and self.batch_idx is not None:
            raise ValueError("block_table and cache_batch_idx exclude each other: both say where a sequence lies")
        for name, x in (("cache_batch_idx", self.batch_idx), ("cache_leftpad", self.leftpad)):
            if x is not None:
                check_int32(name, x, {"batch": q.shape[0]}, q.device, contiguous=False)
        if isinstance(self.seqlens, Tensor):
            check_int32("cache_seqlens", self.seqlens, {"batch": q.shape[0]}, q.device, contiguous=False)
        elif self.seqlens is not None and (isinstance(self.seqlens, bool) or not isinstance(as_int(self.seqlens), int)):
            raise TypeError(f"cache_seqlens must be an int or an int32 tensor (batch,), got {self.seqlens!r}")

    @property
    def page_table(self) -> Tensor | None:
        """The page table: the one given, or rows of a contiguous cache as pages."""
        if self.batch_idx is not None:
            return self.batch_idx.reshape(-1, 1)
        table = self.block_table
        return table if table is None or table.stride(-1) == 1 else table.contiguous()

    @property
    def capacity(self) -> int:
        """The most keys that a sequence can have."""
        return self.k.shape[1] * (1 if self.block_table is None else self.block_table.shape[-1])

    def seqlens_with(self, new: int, q: Tensor) -> Tensor:
        """int32 (batch,): the keys of each sequence with `new` more; without cache_seqlens all keys of the cache."""
        if isinstance(self.seqlens, Tensor):
            return self.seqlens.contiguous() if new == 0 else self.seqlens + new
        length = self.capacity if self.seqlens is None else as_int(self.seqlens) + new
        return torch.full((q.shape[0],), length, dtype=torch.int32, device=q.device)


def attend_cache(
    q: Tensor, new: NewKeys, cache: Cache, options: Options, num_splits: int, s_aux: Tensor | None
) -> Tensor | tuple[Tensor, Tensor]:
    """Appends new keys to a cache and attends to it; `flash_attn_with_kvcache` describes arguments and results."""
    check_queries(q)
    new.check()
    cache.check(q)
    options = options.with_numbers()
    splits = _splits(num_splits)
    if new.k is not None and cache.seqlens is None:
        raise ValueError("cache_seqlens must be given with k and v: it says where they are written, got None")
    names = {
        "cos": "rotary_cos",
        "sin": "rotary_sin",
        "page_table": "block_table" if cache.batch_idx is None else "cache_batch_idx",
        "sink": "s_aux",
        "splits": "num_splits",
        "scale": "softmax_scale",
        "seqlens_k": "cache_seqlens" if new.k is None else "cache_seqlens plus the number of new keys",
    }
    given = (q, new.k, new.v, s_aux, options.alibi_slopes)
    try:
        with torch.no_grad(), without_autocast(q.device.type):
            rows, seqlens = _appended(_last_contiguous(q), new, cache, options)
            result = _decoded(rows, seqlens, cache, options, splits, s_aux)
    except (TypeError, ValueError) as error:
        raise renamed(error, names) from None
    if isinstance(result, Tensor):
        return forward_only("flash_attn_with_kvcache", result, given)
    o, lse = result
    return forward_only("flash_attn_with_kvcache", o, given), lse


def _splits(num_splits: Any) -> int | None:
    splits = as_int(num_splits)
    if isinstance(splits, bool) or not isinstance(splits, int):
        raise TypeError(f"num_splits must be an int, 0 to let tileattn choose, got {num_splits!r}")
    return None if splits == 0 else splits


def _appended(q: Tensor, new: NewKeys, cache: Cache, options: Options) -> tuple[Tensor, Tensor]:
    """The queries, rotated if the call has a rotary embedding, and the keys of each sequence after the call."""
    if new.k is None or new.v is None:
        return q, cache.seqlens_with(0, q)
    k, v = _last_contiguous(new.k), _last_contiguous(new.v)
    seqlens = cache.seqlens_with(k.shape[1] if k.ndim == 4 else 0, q)
    rotary: dict[str, Any] = {}
    if new.cos is not None:
        before = cache.seqlens_with(0, q)[:, None]  # the position of the first new key, and of the first query
        if options.causal or is_window(options.window_size):
            positions = before + torch.arange(q.shape[1], dtype=torch.int32, device=q.device)
        else:
            positions = before.expand(-1, q.shape[1])
        rotary = {"cos": new.cos, "sin": new.sin, "interleaved": bool(new.interleaved), "q": q}
        rotary["q_positions"] = positions
    rotated = append_kv(k, v, cache.k, cache.v, seqlens, page_table=cache.page_table, **rotary)
    return (q if rotated is None else rotated), seqlens


def _decoded(
    q: Tensor, seqlens: Tensor, cache: Cache, options: Options, splits: int | None, s_aux: Tensor | None
) -> Tensor | tuple[Tensor, Tensor]:
    mask = options.mask(cache.capacity)
    causal = isinstance(mask, Causal)
    mask = None if causal else mask
    if cache.leftpad is not None:
        padding = LeftPadding(cache.leftpad)
        mask = padding if mask is None else mask & padding
    return decode(
        q,
        cache.k,
        cache.v,
        seqlens,
        page_table=cache.page_table,
        causal=causal,
        mask=mask,
        score_mod=options.score_mods() or None,
        sink=s_aux,
        scale=q.shape[-1] ** -0.5 if options.softmax_scale is None else options.softmax_scale,
        splits=splits,
        return_lse=bool(options.return_attn_probs),
    )


def _last_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
