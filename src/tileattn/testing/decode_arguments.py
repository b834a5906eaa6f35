"""The types of the conformance cases of `decode`: what a case is, and the arguments of its call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..call.decoding import FixedSplit, Splits
from ..variant.masks import Mask
from .call_arguments import DTYPES, ScoreFn


@dataclass(frozen=True)
class DecodeStructure:
    """The static facts of a case, for which a kernel is compiled.

    Attributes:
        dtype: a name of `DTYPES`.
        head_dim, head_dim_v: elements per head.
        pages: what divides the page size: 0 for contiguous caches, 1 (sizes 1 and 3), 2, 16 (and 48), 64 (and 256).
        mask: a name of `MASKS`.
        scores: names of `SCORES`.
        causal: whether the call is causal, beside its mask.
        tree: whether the call has a tree mask, in place of causal.
        sink: whether there is one.
        packed: whether queries are packed.
        fixed: the keys of a `FixedSplit`, or 0.
        aligned: whether rows begin at multiples of 16 bytes.
    """

    dtype: str
    head_dim: int
    head_dim_v: int
    pages: int = 0
    mask: str = "none"
    scores: tuple[str, ...] = ()
    causal: bool = True
    tree: bool = False
    sink: bool = False
    packed: bool = False
    fixed: int = 0
    aligned: bool = True

    @property
    def name(self) -> str:
        """Short and readable."""
        dims = f"d{self.head_dim}" if self.head_dim == self.head_dim_v else f"d{self.head_dim}v{self.head_dim_v}"
        masks = (
            ["tree"] * self.tree + ["causal"] * (self.causal and not self.tree) + [self.mask] * (self.mask != "none")
        )
        flags = ["sink"] * self.sink + ["packed"] * self.packed + ["unaligned"] * (not self.aligned)
        return "-".join([self.dtype, dims, "&".join(masks) or "full", *self.scores, *flags])


@dataclass(frozen=True)
class DecodeShape:
    """The run-time facts of a case.

    Attributes:
        lengths: name of the lengths.
        lengths_q: queries of each sequence; all equal where queries are not packed.
        lengths_k: keys of each sequence, those of its queries included.
        heads, kv_heads: of the queries, and of the caches.
        page: tokens of a page; 0 for contiguous caches.
        packed: whether queries are packed.
        layout: the memory of the caches, a name of `CACHE_LAYOUTS`.
        splits: what `decode(splits=...)` is given.
        slack: keys that the caches have room for beyond the longest sequence (at least).
        behind: rows of packed queries that no sequence has; they hold NaN.
        shared: whether sequences share the pages of a common prefix.
        values: as in `Shape`.
        scale: scale of the scores; None: 1 / sqrt(head_dim).
    """

    lengths: str
    lengths_q: tuple[int, ...]
    lengths_k: tuple[int, ...]
    heads: int
    kv_heads: int
    page: int = 0
    packed: bool = False
    layout: str = "own"
    splits: Splits = None
    slack: int = 0
    behind: int = 0
    shared: bool = False
    values: str = "normal"
    scale: float | None = None

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return len(self.lengths_q)

    @property
    def seqlen_q(self) -> int:
        """q_len, or the longest of packed queries."""
        return max(self.lengths_q, default=0)

    @property
    def seqlen_k(self) -> int:
        """The capacity: the most keys that a sequence can have, to which masks and biases with tensors are sized."""
        room = max(self.lengths_k, default=0) + self.slack
        return -(-room // self.page) * self.page if self.page else room

    @property
    def name(self) -> str:
        """Short and readable."""
        splits = f"fixed{self.splits.keys}" if isinstance(self.splits, FixedSplit) else f"splits{self.splits}"
        parts = [self.lengths, f"h{self.heads}kv{self.kv_heads}", f"page{self.page}", self.layout]
        parts += [splits] * (self.splits is not None) + ["shared"] * self.shared
        parts += [self.values] * (self.values != "normal")
        return "-".join(parts + ([] if self.scale is None else [f"scale{self.scale:g}"]))


@dataclass(frozen=True)
class DecodeCase:
    """One call to `decode`. The `smoke` cases are a small subset in which every feature occurs."""

    structure: DecodeStructure
    shape: DecodeShape
    smoke: bool = False

    @property
    def id(self) -> str:
        """Short, readable and unique."""
        return f"{self.structure.name}-{self.shape.name}"

    @property
    def dtype(self) -> torch.dtype:
        """Of q and the caches."""
        return DTYPES[self.structure.dtype]


@dataclass(frozen=True)
class DecodeArguments:
    """The arguments of a call of `decode`, as a user gives them."""

    q: Tensor
    """(batch, q_len, heads, head_dim), or packed (total_q, heads, head_dim)."""
    k_cache: Tensor
    v_cache: Tensor
    seqlens_k: Tensor
    page_table: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    max_seqlen_q: int | None = None
    causal: bool = True
    mask: Mask | None = None
    score_mods: tuple[ScoreFn, ...] = ()
    tree_mask: Tensor | None = None
    sink: Tensor | None = None
    scale: float | None = None
    splits: Splits = None

    @property
    def positional(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k_cache, v_cache, seqlens_k."""
        return self.q, self.k_cache, self.v_cache, self.seqlens_k

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments that are not their defaults."""
        named = {
            "page_table": self.page_table,
            "cu_seqlens_q": self.cu_seqlens_q,
            "max_seqlen_q": self.max_seqlen_q,
            "mask": self.mask,
            "score_mod": list(self.score_mods) or None,
            "tree_mask": self.tree_mask,
            "sink": self.sink,
            "scale": self.scale,
            "splits": self.splits,
        }
        found = {name: value for name, value in named.items() if value is not None}
        return found if self.causal else found | {"causal": False}
