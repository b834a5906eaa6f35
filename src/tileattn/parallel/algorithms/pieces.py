"""The calls of a backend that a rank makes: pieces of its queries, with the rows of the keys that they reach."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ...call.facts import Packed
from ..sharding.layout import Layout, Run, Span
from ..sharding.own import OwnRun
from ..sharding.work import Segment
from .call import Call, Rows, cut, within
from .shifted import Part


class Piece(NamedTuple):
    """One call of a backend.

    Attributes:
        part: what the variant is told.
        rows: rows of the queries that this rank computes.
        keys: rows of the keys that the call is given.
        heads: heads of these queries.
        kv_heads: heads of these keys.
        packed: the sequences, if the piece is several whole ones.
    """

    part: Part
    rows: Span
    keys: Span
    heads: Span
    kv_heads: Span
    packed: Packed | None = None

    def of(self, q: Tensor, k: Tensor, v: Tensor) -> Rows:
        """Its rows and heads of tensors (batch, rows, heads, dim)."""
        keys, values = (cut(x, self.keys, self.kv_heads) for x in (k, v))
        return Rows(cut(q, self.rows, self.heads), keys, values)


class FetchedRun(NamedTuple):
    """Queries whose keys are fetched.

    Attributes:
        run: the queries.
        reached: positions of the keys, from a multiple of 256 on.
        rows: rows of the queries, among those that this rank computes.
        keys: rows of the keys, among those that it has fetched.
    """

    run: Run
    reached: Span
    rows: Span
    keys: Span


@dataclass(frozen=True)
class Runs:
    """The runs of queries that a rank computes: those with keys of its own, and those whose keys it fetches."""

    own: tuple[OwnRun, ...]
    fetched: tuple[FetchedRun, ...]

    def own_pieces(
        self, call: Call, heads: int, kv_heads: int, device: torch.device, most: int | None = None
    ) -> Iterator[Piece]:
        """One for each run; one for several whole sequences, where the variant allows it.

        most: rows times query heads of a piece, where its heads can be divided; None for no limit.
        """
        for runs in _stretches(self.own, call):
            first, last = runs[0], runs[-1]
            packed = _packed(tuple(each.rows for each in runs), device) if len(runs) > 1 else None
            rows, keys = (first.rows[0], last.rows[1]), (first.keys[0], last.keys[1])
            parts = 1 if most is None else -(-(rows[1] - rows[0]) * heads // most)
            for some, of_keys in _head_parts(heads, kv_heads, parts):
                part = call.part(first.run.sequence, first.run[1:], first.reached, some)
                yield Piece(part, rows, keys, some, of_keys, packed)

    def fetched_pieces(
        self, call: Call, segments: Sequence[Segment], first_head: int, first_kv_head: int
    ) -> Iterator[Piece]:
        """Of some heads, those with the most keys first: then less is left to do when multiprocessors fall idle."""
        if not segments:  # more ranks than heads
            return
        for run, reached, rows, keys in sorted(self.fetched, key=lambda each: each.reached[0] - each.reached[1]):
            for segment in segments:
                part = call.part(run.sequence, run[1:], reached, segment.heads)
                heads, kv_heads = within(segment.heads, first_head), within(segment.kv_heads, first_kv_head)
                yield Piece(part, rows, keys, heads, kv_heads)


def _head_parts(heads: int, kv_heads: int, parts: int) -> Iterator[tuple[Span, Span]]:
    """Query heads and their key/value heads, in so many parts where there are as many key/value heads."""
    parts, group = max(1, min(parts, kv_heads)), heads // kv_heads
    for start, stop in pairwise([part * kv_heads // parts for part in range(parts + 1)]):
        yield (start * group, stop * group), (start, stop)


def _stretches(runs: Sequence[OwnRun], call: Call) -> Iterator[list[OwnRun]]:
    """Runs that one call computes: whole sequences that lie one after the other, or a single run."""
    stretch: list[OwnRun] = []
    for run in runs:
        pair = [*stretch[-1:], run]
        joins = call.packs and all(each.is_whole(call.layout) for each in pair) and pair[0].rows[1] == run.rows[0]
        if stretch and not joins:
            yield stretch
            stretch = []
        stretch.append(run)
    if stretch:
        yield stretch


@functools.lru_cache(maxsize=64)
def _packed(rows: tuple[Span, ...], device: torch.device) -> Packed:
    lengths = [stop - start for start, stop in rows]
    bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    return Packed(bounds, bounds, max(lengths), max(lengths))


def rows_of_keys(layout: Layout, needed: Sequence[Span], run: Run, reached: Span) -> Span:
    """Where the reached keys are among those fetched: in the span in which they end.

    Spans overlap where the gap of one begins before the end of another, so where keys begin does not tell.
    """
    first, row = layout.bounds[run.sequence] + reached[0], 0
    last = first + reached[1] - reached[0]
    for start, stop in needed:
        if start <= first and last <= stop:
            return row + first - start, row + last - start
        row += stop - start
    raise AssertionError("every reached key is needed")
