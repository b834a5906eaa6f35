"""Who computes what: the assignment of queries and heads to ranks, for each algorithm but the ring.

All ranks derive the same assignment from the layout, the mask and the shapes, so nobody asks anybody for a size.

- gather: a rank computes its own rows with all heads. It receives the keys and values that its masks reach.
- ulysses: a rank computes all rows with a part of the heads. Queries, keys, values and outputs change hands.
  Source: Jacobs et al. 2023, DeepSpeed Ulysses (arXiv 2309.14509).
- 2d: groups of ``inner`` consecutive ranks (a node) share their rows by heads, as Ulysses; between groups keys and
  values are gathered. With inner = 1 it is gather, with all ranks it is ulysses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from .layout import Layout, Run, Span, joined, merged

KeyRanges = Callable[[Sequence[Run]], list[Span]]


class Segment(NamedTuple):
    """Query heads of whole groups, or of a part of one: what one call computes. Both are (start, stop)."""

    heads: Span
    kv_heads: Span


def segments(heads: Span, group: int) -> list[Segment]:
    """Cuts query heads so that each part has whole groups of `group` heads, or lies in one group."""
    cut, head = [], heads[0]
    while head < heads[1]:
        whole = (heads[1] - head) // group if head % group == 0 else 0
        stop = head + whole * group if whole else min(heads[1], (head // group + 1) * group)
        cut.append(Segment((head, stop), (head // group, -(-stop // group))))
        head = stop
    return cut


def kv_heads_of(heads: Span, group: int) -> Span:
    """The key/value heads of query heads."""
    return (heads[0] // group, -(-heads[1] // group)) if heads[0] < heads[1] else (0, 0)


@dataclass(frozen=True)
class Assignment:
    """What each rank computes.

    Attributes:
        runs: for each rank the runs of its queries, ascending.
        heads: for each rank its query heads (start, stop).
        local_rows: whether each rank computes exactly its own rows.
    """

    runs: tuple[tuple[Run, ...], ...]
    heads: tuple[Span, ...]
    local_rows: bool


def assign(layout: Layout, heads: int, inner: int) -> Assignment:
    """The assignment for groups of `inner` consecutive ranks, which divides the number of ranks."""
    runs: list[tuple[Run, ...]] = []
    for first in range(0, layout.ranks, inner):
        shared = [run for rank in range(first, first + inner) for run in layout.runs[rank]]
        runs += [merged(shared)] * inner
    shares = tuple(head_share(heads, rank % inner, inner) for rank in range(layout.ranks))
    return Assignment(tuple(runs), shares, inner == 1)


def head_share(heads: int, index: int, of: int) -> Span:
    """The query heads of one of `of` ranks, even parts: whole groups where `of` divides the key/value heads.

    Elsewhere two ranks share a group, and both receive its keys and values. With more ranks than heads some get none.
    """
    return index * heads // of, (index + 1) * heads // of


def rows_of(layout: Layout, runs: Sequence[Run]) -> list[Span]:
    """The tokens of runs, one span each."""
    return [layout.span(run) for run in runs]


def needed_keys(layout: Layout, assignment: Assignment, ranges: KeyRanges) -> list[list[Span]]:
    """For each rank the tokens whose keys and values its queries reach, joined."""
    of_runs: dict[tuple[Run, ...], list[Span]] = {(): []}  # ranks of a node may share their runs
    needed = []
    for runs, heads in zip(assignment.runs, assignment.heads):
        computed = runs if heads[0] < heads[1] else ()
        if computed not in of_runs:
            firsts = [layout.bounds[run.sequence] for run in computed]
            found = zip(firsts, ranges(computed))
            of_runs[computed] = joined([(first + start, first + stop) for first, (start, stop) in found])
        needed.append(of_runs[computed])
    return needed


def head_steps(kv_heads: int, groups: int) -> list[Span]:
    """Key/value heads cut into `groups` parts, whose transfers overlap with the computation before; none is empty."""
    ends = [index * kv_heads // groups for index in range(groups + 1)]
    return [span for span in pairwise(ends) if span[0] < span[1]]
