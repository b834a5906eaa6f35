"""Layouts: which rank holds which positions of the sequences. Nothing here communicates.

A layout gives each rank *runs*: pieces of sequences, in ascending order. A rank's shard of a tensor is the rows of its
runs, one after the other. A *token* is a row of the whole tensor; with several documents in one sequence, a position is
counted from the beginning of its document.

- ``"zigzag"``: the sequence is cut into 2P blocks for P ranks, and rank r holds the blocks r and 2P-1-r. Under a causal
  mask all ranks then have the same work. Source: Zhu Zilin, ring-flash-attention; Llama 3 (arXiv 2407.21783).
- ``"contiguous"``: P blocks in order.
- ``"documents"``: large documents are cut in zigzag over all ranks, the others are dealt whole (documents.py).

Block i of n covers the tokens from ``i * length // n`` on, so lengths need not divide and blocks differ by at most one
token. With more blocks than tokens some are empty, and so may be shards.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

Span = tuple[int, int]
"""(start, stop) in tokens or rows; stop excluded."""


class Run(NamedTuple):
    """Positions start .. stop - 1 of a sequence (0 but for documents)."""

    sequence: int
    start: int
    stop: int


@dataclass(frozen=True)
class Layout:
    """The runs of all ranks.

    Attributes:
        name: "zigzag", "contiguous" or "documents".
        bounds: the first token of each sequence, and behind them the number of tokens, as in cu_seqlens.
        runs: for each rank its runs, ascending, none empty.
    """

    name: str
    bounds: tuple[int, ...]
    runs: tuple[tuple[Run, ...], ...]

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.runs)

    @property
    def tokens(self) -> int:
        """The number of tokens of all ranks."""
        return self.bounds[-1]

    @property
    def packed(self) -> bool:
        """Whether there are documents, each a sequence of its own."""
        return self.name == "documents"

    def length(self, sequence: int) -> int:
        """The length of a sequence."""
        return self.bounds[sequence + 1] - self.bounds[sequence]

    @cached_property
    def owned(self) -> tuple[tuple[Span, ...], ...]:
        """For each rank the tokens of its runs, as one span for each run."""
        return tuple(tuple(self.span(run) for run in runs) for runs in self.runs)

    def span(self, run: Run) -> Span:
        """The tokens of a run."""
        first = self.bounds[run.sequence]
        return first + run.start, first + run.stop

    def rows(self, rank: int) -> int:
        """The number of rows of a rank's shard."""
        return sum(run.stop - run.start for run in self.runs[rank])

    def tokens_of(self, rank: int) -> Tensor:
        """The tokens of a rank's rows, int64 (rows,)."""
        return _concatenated([torch.arange(*span, device="cpu") for span in self.owned[rank]])

    def positions_of(self, rank: int) -> Tensor:
        """The positions of a rank's rows in their sequences, int64 (rows,)."""
        return _concatenated([torch.arange(run.start, run.stop, device="cpu") for run in self.runs[rank]])


def _concatenated(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device="cpu")


def zigzag_blocks(length: int, ranks: int) -> list[list[Span]]:
    """For each rank the spans of its two blocks of 2 * ranks, ascending; adjacent ones are joined, empty ones gone."""
    ends = [block * length // (2 * ranks) for block in range(2 * ranks + 1)]
    blocks = list(pairwise(ends))
    return [joined([blocks[rank], blocks[2 * ranks - 1 - rank]]) for rank in range(ranks)]


def contiguous_blocks(length: int, ranks: int) -> list[list[Span]]:
    """For each rank the span of its block."""
    ends = [rank * length // ranks for rank in range(ranks + 1)]
    return [joined([span]) for span in pairwise(ends)]


def joined(spans: Sequence[Span]) -> list[Span]:
    """The union of spans: ascending, disjoint and not adjacent, none empty."""
    union: list[Span] = []
    for start, stop in sorted(span for span in spans if span[0] < span[1]):
        if union and start <= union[-1][1]:
            union[-1] = union[-1][0], max(stop, union[-1][1])
        else:
            union.append((start, stop))
    return union


def merged(runs: Sequence[Run]) -> tuple[Run, ...]:
    """Runs in ascending order, adjacent ones of a sequence joined."""
    of_sequences: dict[int, list[Span]] = {}
    for sequence, start, stop in runs:
        of_sequences.setdefault(sequence, []).append((start, stop))
    return tuple(Run(sequence, *span) for sequence in sorted(of_sequences) for span in joined(of_sequences[sequence]))


class Cover:
    """Counts how many tokens of a list of spans lie in others, by bisection.

    Args:
        spans: ascending and disjoint.
    """

    def __init__(self, spans: Sequence[Span]) -> None:
        self.starts = [start for start, _ in spans]
        self.spans, self.before = spans, [0]
        for start, stop in spans:
            self.before.append(self.before[-1] + stop - start)

    def common(self, spans: Sequence[Span]) -> int:
        """The number of tokens in both, for disjoint spans."""
        return sum(self._below(stop) - self._below(start) for start, stop in spans)

    def _below(self, token: int) -> int:
        """The number of covered tokens before a token."""
        at = bisect_left(self.starts, token)
        return self.before[at] - max(0, self.spans[at - 1][1] - token if at else 0)


_BLOCKS = {"zigzag": zigzag_blocks, "contiguous": contiguous_blocks}
LAYOUTS = (*_BLOCKS, "documents")


def sequence_layout(name: str, length: int, ranks: int) -> Layout:
    """The layout of one sequence: "zigzag" or "contiguous"."""
    blocks = _BLOCKS[name](length, ranks)
    return Layout(name, (0, length), tuple(tuple(Run(0, *span) for span in spans) for spans in blocks))
