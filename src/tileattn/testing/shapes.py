"""What a kernel is called with, beside what it is compiled for: of dense and of packed conformance cases."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from ..call.facts import Packed


@dataclass(frozen=True)
class Shape:
    """What a kernel is called with.

    values: "normal": standard normal. "large": scores of up to a thousand. "negative": scores far below 0, where a
        padded score of 0 would outweigh them all. The last two are made of small integers times powers of two, so that
        scores are exact in every dtype, and eager is not worse for their size.
    scale: of the scores; None: 1 / sqrt(head_dim).
    """

    batch: int
    heads: int
    kv_heads: int
    seqlen_q: int
    seqlen_k: int
    layout: str = "bshd"
    values: str = "normal"
    scale: float | None = None

    @property
    def of_q(self) -> tuple[int, int]:
        """The first dimensions of q (bshd)."""
        return self.batch, self.seqlen_q

    @property
    def of_k(self) -> tuple[int, int]:
        """The same of k and v."""
        return self.batch, self.seqlen_k

    @property
    def name(self) -> str:
        """Short and readable."""
        heads = f"h{self.heads}" if self.heads == self.kv_heads else f"h{self.heads}kv{self.kv_heads}"
        parts = [f"b{self.batch}{heads}", f"q{self.seqlen_q}k{self.seqlen_k}", self.layout]
        parts += [self.values] * (self.values != "normal")
        return "-".join(parts + ([] if self.scale is None else [f"scale{self.scale:g}"]))


@dataclass(frozen=True)
class PackedShape:
    """The same of packed sequences, which are to masks and modifications what batch elements are.

    label: its name.
    lengths_q, lengths_k: of each sequence.
    behind: rows of q, k and v that belong to no sequence, and hold NaN.
    slack: by how much max_seqlen_q and max_seqlen_k are larger than they need be.
    layout, values, scale: as in `Shape`; a layout is that of one batch element.
    """

    label: str
    heads: int
    kv_heads: int
    lengths_q: tuple[int, ...]
    lengths_k: tuple[int, ...]
    behind: int = 0
    slack: tuple[int, int] = (0, 0)
    layout: str = "bshd"
    values: str = "normal"
    scale: float | None = None
    dropout_p: float = 0.0

    @property
    def batch(self) -> int:
        """How many sequences."""
        return len(self.lengths_q)

    @property
    def seqlen_q(self) -> int:
        """What is given as max_seqlen_q."""
        return max(self.lengths_q, default=0) + self.slack[0]

    @property
    def seqlen_k(self) -> int:
        """What is given as max_seqlen_k."""
        return max(self.lengths_k, default=0) + self.slack[1]

    @property
    def of_q(self) -> tuple[int, int]:
        """The first dimensions of q (bshd)."""
        return 1, sum(self.lengths_q) + self.behind

    @property
    def of_k(self) -> tuple[int, int]:
        """The same of k and v."""
        return 1, sum(self.lengths_k) + self.behind

    @property
    def name(self) -> str:
        """Short and readable."""
        heads = f"h{self.heads}" if self.heads == self.kv_heads else f"h{self.heads}kv{self.kv_heads}"
        parts = ["varlen", self.label, heads, self.layout, *[self.values] * (self.values != "normal")]
        parts += [] if self.scale is None else [f"scale{self.scale:g}"]
        return "-".join(parts + ([f"dropout{self.dropout_p:g}"] if self.dropout_p else []))

    def packed(self, device: torch.device) -> Packed:
        """As a backend is given it."""
        ends = [[0, *itertools.accumulate(lengths)] for lengths in (self.lengths_q, self.lengths_k)]
        cu_seqlens_q, cu_seqlens_k = (torch.tensor(each, dtype=torch.int32, device=device) for each in ends)
        return Packed(cu_seqlens_q, cu_seqlens_k, self.seqlen_q, self.seqlen_k)
