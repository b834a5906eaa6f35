"""The shapes of conformance cases, dense and packed: the run-time facts of a call."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from ..call.facts import Packed


@dataclass(frozen=True)
class Shape:
    """The run-time facts of a dense case: sizes, memory layout, magnitude of the values, scale.

    values: "normal": standard normal. "large": scores of up to a thousand. "negative": scores far below 0, where a
        padded score of 0 would dominate. The last two are small integers times powers of two, so that scores are exact
        in every dtype and eager has no larger error.
    scale: Scale of the scores; None: 1 / sqrt(head_dim).
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
        """The first dimensions of k and v."""
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
    """The run-time facts of a packed case. To masks and modifications a sequence is a batch element.

    label: Name of the shape.
    lengths_q, lengths_k: Lengths of the sequences.
    behind: Number of unused tail rows of q, k and v; they hold NaN.
    slack: Difference between max_seqlen_q (max_seqlen_k) and the longest length.
    layout, values, scale: As in `Shape`; the layout is that of one batch element.
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
        """Number of sequences."""
        return len(self.lengths_q)

    @property
    def seqlen_q(self) -> int:
        """The argument max_seqlen_q."""
        return max(self.lengths_q, default=0) + self.slack[0]

    @property
    def seqlen_k(self) -> int:
        """The argument max_seqlen_k."""
        return max(self.lengths_k, default=0) + self.slack[1]

    @property
    def of_q(self) -> tuple[int, int]:
        """The first dimensions of q (bshd)."""
        return 1, sum(self.lengths_q) + self.behind

    @property
    def of_k(self) -> tuple[int, int]:
        """The first dimensions of k and v."""
        return 1, sum(self.lengths_k) + self.behind

    @property
    def name(self) -> str:
        """Short and readable."""
        heads = f"h{self.heads}" if self.heads == self.kv_heads else f"h{self.heads}kv{self.kv_heads}"
        parts = ["varlen", self.label, heads, self.layout, *[self.values] * (self.values != "normal")]
        parts += [] if self.scale is None else [f"scale{self.scale:g}"]
        return "-".join(parts + ([f"dropout{self.dropout_p:g}"] if self.dropout_p else []))

    def packed(self, device: torch.device) -> Packed:
        """The lengths as a backend receives them."""
        ends = [[0, *itertools.accumulate(lengths)] for lengths in (self.lengths_q, self.lengths_k)]
        cu_seqlens_q, cu_seqlens_k = (torch.tensor(each, dtype=torch.int32, device=device) for each in ends)
        return Packed(cu_seqlens_q, cu_seqlens_k, self.seqlen_q, self.seqlen_k)
