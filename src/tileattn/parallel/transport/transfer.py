"""Transfers: rows and heads of sharded tensors, from the ranks that hold them to those that need them, and back.

A transfer is one all-to-all with sizes that every rank knows. What a rank needs of itself is copied locally. The way
back either places values, each of which one rank computed, or brings parts of sums, which are added up in the order of
ranks (sums.py), so that bits are the same from run to run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from ..sharding.layout import Span
from .link import Link, Pending
from .sums import Addend


@dataclass(frozen=True)
class Transfer:
    """Rows and heads that ranks need of tensors (batch, rows, heads, dim), whose rows are sharded.

    Attributes:
        owned: for each rank the tokens of its rows, one span each, in the order of its rows.
        needed: for each rank the tokens that it needs, in the order in which it wants them; disjoint.
        heads: for each rank the heads that it needs, (start, stop).
        rank: this rank.
        gaps: rows of zeros before each span that this rank receives; () for none. Nothing is sent for them.
        later: ranks that have something to compute before they need what they receive.
    """

    owned: Sequence[Sequence[Span]]
    needed: Sequence[Sequence[Span]]
    heads: Sequence[Span]
    rank: int
    gaps: Sequence[int] = ()
    later: frozenset[int] = frozenset()

    @cached_property
    def outgoing(self) -> list[list[Span]]:
        """For each rank, which of my rows it needs."""
        return [_common(self.owned[self.rank], needed) for needed in self.needed]

    @cached_property
    def incoming(self) -> list[list[Span]]:
        """For each rank, where its rows lie in what I need."""
        return [_common(self.needed[self.rank], owned, self.gaps) for owned in self.owned]

    @cached_property
    def moves(self) -> bool:
        """Whether any rank needs anything of another. All ranks know the same answer."""
        others = [
            _common(needed, owned)
            for to, needed in enumerate(self.needed)
            for of, owned in enumerate(self.owned)
            if to != of and self.heads[to][0] < self.heads[to][1]
        ]
        return any(others)

    @property
    def rows(self) -> int:
        """The number of rows that I need."""
        return _size(self.needed[self.rank]) + sum(self.gaps)

    def start(self, link: Link, tensors: Sequence[Tensor]) -> Fetch:
        """Begins to fetch what this rank needs of the tensors, whose rows and all heads are sharded."""
        sends = [
            [x[:, start:stop, slice(*heads)] for x in tensors for start, stop in spans]
            for spans, heads in zip(self.outgoing, self.heads)
        ]
        count = self.heads[self.rank][1] - self.heads[self.rank][0]
        out = [x.new_empty(x.shape[0], self.rows, count, x.shape[3]) for x in tensors]
        self._clear_gaps(out)
        receives = [[x[:, start:stop] for x in out for start, stop in spans] for spans in self.incoming]
        return Fetch(
            out, link.start(sends, receives, tensors[0], self.later) if self.moves else link.copy(sends, receives)
        )

    def _clear_gaps(self, tensors: Sequence[Tensor]) -> None:
        row = 0
        for gap, (start, stop) in zip(self.gaps, self.needed[self.rank]):
            for x in tensors:
                x[:, row : row + gap] = 0.0
            row += gap + stop - start

    def fetch(self, link: Link, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The rows and heads that this rank needs of each tensor."""
        return self.start(link, tensors).wait()

    def place(self, link: Link, tensors: Sequence[Tensor], heads: int) -> list[Tensor]:
        """The way back: my rows with all heads, of tensors that hold what each rank needed, each value once."""
        rows = _size(self.owned[self.rank])
        out = [x.new_empty(x.shape[0], rows, heads, x.shape[3]) for x in tensors]
        sends = [[x[:, start:stop] for x in tensors for start, stop in spans] for spans in self.incoming]
        receives = [
            [x[:, start:stop, slice(*of)] for x in out for start, stop in spans]
            for spans, of in zip(self.outgoing, self.heads)
        ]
        (link.start(sends, receives, tensors[0]) if self.moves else link.copy(sends, receives)).wait()
        return out

    def start_sum(self, link: Link, tensors: Sequence[Tensor]) -> Summing:
        """Begins the way back of parts of sums: gradients of what was fetched, all of one dtype."""
        sends = [[x[:, start:stop] for x in tensors for start, stop in spans] for spans in self.incoming]
        parts = [
            [x.new_empty(x.shape[0], stop - start, of[1] - of[0], x.shape[3]) for x in tensors for start, stop in spans]
            for spans, of in zip(self.outgoing, self.heads)
        ]
        parts[self.rank] = sends[self.rank]  # mine are not copied
        return Summing(self, parts, link.start(sends, parts, tensors[0]) if self.moves else Pending())


@dataclass(frozen=True)
class Fetch:
    """A fetch that has begun."""

    out: list[Tensor]
    pending: Pending

    def wait(self) -> list[Tensor]:
        """The tensors (batch, rows, heads, dim)."""
        self.pending.wait()
        return self.out


@dataclass(frozen=True)
class Summing:
    """A sum that has begun. parts: for each rank its parts, the spans of each tensor after those of the one before."""

    transfer: Transfer
    parts: list[list[Tensor]]
    pending: Pending

    def wait(self) -> list[list[Addend]]:
        """For each tensor the addends of all ranks to my rows, in their order."""
        self.pending.wait()
        found: list[list[Addend]] = []
        for parts, spans, heads in zip(self.parts, self.transfer.outgoing, self.transfer.heads):
            for place, values in enumerate(parts):
                tensor, span = divmod(place, len(spans))
                found += [[] for _ in range(tensor + 1 - len(found))]
                found[tensor].append(Addend(spans[span], heads, values))
        return found


def summed(link: Link, tensors: Sequence[Tensor], ranks: int) -> list[Tensor]:
    """The sum of each tensor over all ranks, in their order: equal bits on all ranks. All have one dtype.

    Each rank sums one part, and sends it to all others.
    """
    if ranks == 1 or not tensors:
        return list(tensors)
    flat = torch.cat([x.reshape(-1) for x in tensors])
    ends = [rank * flat.numel() // ranks for rank in range(ranks + 1)]
    mine = slice(ends[link.rank], ends[link.rank + 1])
    parts = [[torch.empty_like(flat[mine])] for _ in range(ranks)]
    link.start([[flat[start:stop]] for start, stop in pairwise(ends)], parts, flat).wait()
    total = torch.zeros_like(flat[mine])
    for (part,) in parts:
        total += part
    whole = torch.empty_like(flat)
    link.start([[total]] * ranks, [[whole[start:stop]] for start, stop in pairwise(ends)], flat).wait()
    return [x.view(like.shape) for x, like in zip(whole.split([x.numel() for x in tensors]), tensors)]


def _common(mine: Sequence[Span], theirs: Sequence[Span], gaps: Sequence[int] = ()) -> list[Span]:
    """Rows of my spans, which lie one after the other behind their gaps, that are in their spans, by tokens."""
    found: list[tuple[int, Span]] = []
    first = 0
    for number, (start, stop) in enumerate(mine):
        first += gaps[number] if gaps else 0
        for other_start, other_stop in theirs:
            low, high = max(start, other_start), min(stop, other_stop)
            if low < high:
                found.append((low, (first + low - start, first + high - start)))
        first += stop - start
    return [rows for _, rows in sorted(found)]


def _size(spans: Sequence[Span]) -> int:
    return sum(stop - start for start, stop in spans)
