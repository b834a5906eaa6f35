"""Which queries reach the keys of their own rank only: their attention needs no transfer, and no copy of keys.

A run of queries is cut where that begins and ends. Under a sliding window nearly all rows are of this kind, and of
documents all that are dealt whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from .layout import Layout, Run, Span
from .work import KeyRanges

KEYS = 256  # a multiple of the tiles of keys at head dims 64 and 128
QUERIES = 768  # a multiple of the tiles of queries, 128 and 192, and of KEYS


def aligned(position: int) -> int:
    """The last multiple of 256 up to a position: keys are given to a kernel from there on (algorithms/gather.py)."""
    return position // KEYS * KEYS


class OwnRun(NamedTuple):
    """Queries that reach keys of their own rank only.

    Attributes:
        run: the queries.
        reached: positions of the keys.
        rows: rows of the queries in the rank's shard.
        keys: rows of the keys in the same shard.
    """

    run: Run
    reached: Span
    rows: Span
    keys: Span

    def is_whole(self, layout: Layout) -> bool:
        """Whether it is a whole sequence."""
        return self.run.start == 0 and self.run.stop == layout.length(self.run.sequence)


class Queries(NamedTuple):
    """The queries of a rank.

    Attributes:
        own: those that reach keys of their rank only.
        others: runs of those that need a transfer.
    """

    own: tuple[OwnRun, ...]
    others: tuple[Run, ...]


def separated(layout: Layout, ranges: KeyRanges) -> list[Queries]:
    """Cuts the runs of each rank where they need keys of no other.

    ranges: the keys that runs reach. Asked once, for all pieces of 768 queries of all ranks.
    """
    pieces = {run: _tiles(run) for runs in layout.runs for run in runs}
    flat = [tile for tiles in pieces.values() for tile in tiles]
    reached = dict(zip(flat, ranges(flat) if flat else ()))
    return [_of_rank(runs, pieces, reached) for runs in layout.runs]


def _of_rank(runs: Sequence[Run], pieces: dict[Run, list[Run]], reached: dict[Run, Span]) -> Queries:
    own: list[OwnRun] = []
    others: list[Run] = []
    row = 0
    for run in runs:
        tiles = pieces[run]
        first, stop = _longest([_lies_in(run, reached[tile]) for tile in tiles])
        if 2 * (stop - first) <= len(tiles):  # too few to be worth a call of their own
            others.append(run)
        else:
            inner = Run(run.sequence, tiles[first].start, tiles[stop - 1].stop)
            own.append(_own_run(run, row, inner, [reached[tile] for tile in tiles[first:stop]]))
            around = Run(run.sequence, run.start, inner.start), Run(run.sequence, inner.stop, run.stop)
            others += [each for each in around if each.start < each.stop]
        row += run.stop - run.start
    return Queries(tuple(own), tuple(others))


def _tiles(run: Run) -> list[Run]:
    """Pieces of a run between multiples of 768."""
    ends = [run.start, *range(run.start // QUERIES * QUERIES + QUERIES, run.stop, QUERIES), run.stop]
    return [Run(run.sequence, start, stop) for start, stop in pairwise(ends)]


def _lies_in(run: Run, reached: Span) -> bool:
    """Whether keys, from a multiple of 256 on, lie in the run of their queries."""
    return run.start <= aligned(reached[0]) and reached[1] <= run.stop


def _longest(holds: Sequence[bool]) -> Span:
    """The longest stretch in which all hold, (start, stop)."""
    best, start = (0, 0), 0
    for place, each in enumerate([*holds, False]):
        if not each:
            best = max(best, (start, place), key=lambda span: span[1] - span[0])
            start = place + 1
    return best


def _own_run(run: Run, row: int, inner: Run, of_tiles: Sequence[Span]) -> OwnRun:
    reached = aligned(min(start for start, _ in of_tiles)), max(stop for _, stop in of_tiles)
    queries, keys = ((row + start - run.start, row + stop - run.start) for start, stop in (inner[1:], reached))
    return OwnRun(inner, reached, queries, keys)
