"""Sequences that are decoded in any company: alone or batched, in any cache, one query or several at a time."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

import tileattn


@dataclass(frozen=True)
class Heads:
    """The static facts of the tensors."""

    heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    dtype: torch.dtype
    device: str


@dataclass(frozen=True)
class Sequence:
    """Queries, keys and values of each position of a sequence: (length, heads or kv_heads, head_dim)."""

    q: Tensor
    k: Tensor
    v: Tensor


@dataclass(frozen=True)
class Rows:
    """Queries of a sequence that a call computes: `count` of them, from position `first` on."""

    sequence: Sequence
    first: int
    count: int

    @property
    def seqlen_k(self) -> int:
        """Keys up to the last of these queries."""
        return self.first + self.count

    @property
    def q(self) -> Tensor:
        """(count, heads, head_dim)."""
        return self.sequence.q[self.first : self.seqlen_k]


def draw(sizes: Heads, length: int, seed: int) -> Sequence:
    """A random sequence."""
    generator = torch.Generator().manual_seed(seed)

    def rows(heads: int, dim: int) -> Tensor:
        return torch.randn(length, heads, dim, generator=generator).to(sizes.device, sizes.dtype)

    q, k = rows(sizes.heads, sizes.head_dim), rows(sizes.kv_heads, sizes.head_dim)
    return Sequence(q, k, rows(sizes.kv_heads, sizes.head_dim_v))


@dataclass(frozen=True)
class Cache:
    """How a call's tensors lie in memory.

    Attributes:
        page: the page size; 0 for contiguous caches.
        packed: whether queries are packed.
        heads_first: whether a cache's memory is (rows, kv_heads, tokens, dim).
        slack: room behind the longest sequence.
        seed: of the pages' order.
    """

    page: int = 0
    packed: bool = False
    heads_first: bool = False
    slack: int = 0
    seed: int = 0


def arguments_of(wanted: Seq[Rows], cache: Cache) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """The arguments of `decode`; NaN in all rows of the caches that no sequence has, and behind packed queries."""
    lengths, device = [rows.seqlen_k for rows in wanted], wanted[0].q.device
    places, table, shape = _places(lengths, cache)
    caches = []
    for name in ("k", "v"):
        like = getattr(wanted[0].sequence, name)
        memory = torch.full((*shape, *like.shape[1:]), torch.nan, dtype=like.dtype, device=device)
        for (row, token), rows in zip(places, wanted):
            memory[row.to(device), token.to(device)] = getattr(rows.sequence, name)[: rows.seqlen_k]
        caches.append(memory.transpose(1, 2).contiguous().transpose(1, 2) if cache.heads_first else memory)
    named: dict[str, Any] = {} if table is None else {"page_table": table.to(device)}
    if cache.packed:
        counts = [rows.count for rows in wanted]
        behind = torch.full_like(wanted[0].sequence.q[:1].expand(3, -1, -1), torch.nan)
        q = torch.cat([*(rows.q for rows in wanted), behind])
        named |= {"cu_seqlens_q": int32([0, *accumulate(counts)], device), "max_seqlen_q": max(counts)}
    else:
        q = torch.stack([rows.q for rows in wanted])
    return (q, *caches, int32(lengths, device)), named


def _places(lengths: Seq[int], cache: Cache) -> tuple[list[tuple[Tensor, Tensor]], Tensor | None, tuple[int, int]]:
    """(row, token) of each key of each sequence; the page table; (rows, tokens) of the caches."""
    at = [torch.arange(length) for length in lengths]
    if not cache.page:
        size = max(lengths) + cache.slack
        return [(torch.full_like(keys, row), keys) for row, keys in enumerate(at)], None, (len(lengths), size)
    counts = [-(-length // cache.page) for length in lengths]
    order = torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(cache.seed)).int()
    table = torch.full((len(lengths), max(counts) + -(-cache.slack // cache.page)), -1, dtype=torch.int32)
    places, used = [], 0
    for row, (count, keys) in enumerate(zip(counts, at)):
        table[row, :count] = order[used : used + count]
        places.append((table[row, keys // cache.page].long(), keys % cache.page))
        used += count
    return places, table, (len(order), cache.page)


def decoded(wanted: Seq[Rows], cache: Cache, **options: Any) -> list[tuple[Tensor, Tensor]]:
    """o (count, heads, head_dim_v) and lse (heads, count) of each of the sequences, from one call of `decode`."""
    positional, named = arguments_of(wanted, cache)
    o, lse = tileattn.decode(*positional, **named, **options, return_lse=True)
    return split(wanted, cache, o, lse)


def split(wanted: Seq[Rows], cache: Cache, o: Tensor, lse: Tensor) -> list[tuple[Tensor, Tensor]]:
    """A call's results by sequence."""
    if not cache.packed:
        return list(zip(o.unbind(0), lse.unbind(0)))
    spans = [slice(end - rows.count, end) for rows, end in zip(wanted, accumulate(rows.count for rows in wanted))]
    return [(o[span], lse[:, span]) for span in spans]


def int32(values: Seq[int], device: torch.device | str) -> Tensor:
    """A tensor of lengths."""
    return torch.tensor(values, dtype=torch.int32, device=device)
