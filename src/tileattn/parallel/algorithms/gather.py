"""Attention by gathered keys: the algorithms gather, ulysses and 2d, which differ in their assignment only (work.py).

    begin to fetch the keys of the first group of heads
    attention of the queries that reach keys of their own rank only
    for each group of key/value heads:
        begin to fetch the keys of the next group       (while this one computes)
        for each run of queries:  o, lse = attention(q_run, k[reached], v[reached])

`tileattn` aligns masks bottom-right, so a call on a run of queries and the keys up to its end already has the positions
of the whole sequence. Each row's softmax is computed by one call over all of its keys: nothing is merged.

Keys are given to a call from a multiple of 256 on, as if those before were there: zeros stand for keys that no query
reaches. So a kernel's tiles of keys are those of one device. With runs that begin at multiples of 256 (of 768 where a
tile has 192 queries) its tiles of queries are, too, and so are the bits of o and lse.

The backward pass (gather_backward.py) fetches keys and values again instead of keeping them, so memory stays that of
the shards and one group of heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..sharding.groups import backward_groups, forward_groups
from ..sharding.layout import Layout, Run, Span
from ..sharding.own import OwnRun, aligned, separated
from ..sharding.work import Assignment, KeyRanges, Segment, assign, kv_heads_of, needed_keys, rows_of, segments
from ..transport.transfer import Fetch, Transfer
from .call import Call, Operands, Outputs, PartGradients, Rows, cut, part_forward
from .gather_backward import Backward
from .pieces import FetchedRun, Piece, Runs, rows_of_keys

_WORKSPACE = 2**28  # elements of dq in float32, 1 GiB, that the backward pass of own keys takes beside the results


class Step(NamedTuple):
    """A group of key/value heads.

    Attributes:
        transfer: of its keys and values.
        segments: this rank's query heads of it.
        first_kv_head: of those that this rank fetches.
        kv_heads: of the whole group.
    """

    transfer: Transfer
    segments: tuple[Segment, ...]
    first_kv_head: int
    kv_heads: Span


@dataclass(frozen=True)
class GatherWork:
    """The work of a rank, for one variant and one number of heads.

    Attributes:
        queries: the transfer of q, and back that of o.
        runs: the runs of queries that this rank computes.
        heads: this rank's query heads.
        forward_steps, backward_steps: the groups of heads of both passes.
        local_rows: whether this rank computes exactly its own rows.
        single: whether all ranks make one call at most for each group of heads.
    """

    queries: Transfer
    runs: Runs
    heads: Span
    forward_steps: tuple[Step, ...]
    backward_steps: tuple[Step, ...]
    local_rows: bool
    single: bool

    def forward(self, call: Call, q: Tensor, k: Tensor, v: Tensor, operands: Operands) -> tuple[Tensor, Tensor]:
        """o (batch, rows, heads, head_dim_v) and lse (batch, rows, heads, 1) of this rank's rows."""
        heads = q.shape[2]
        mine = self._fetched(call, [q])[0]
        o = mine.new_empty(*mine.shape[:3], v.shape[3])
        lse = mine.new_empty(*mine.shape[:3], 1, dtype=torch.promote_types(q.dtype, torch.float32))
        for piece, rows in self._calls(call, self.forward_steps, mine, k, v):
            place = cut(o, piece.rows, piece.heads)
            _, of_part = part_forward(call, piece.part, rows, operands, place, piece.packed)
            cut(lse, piece.rows, piece.heads)[..., 0].copy_(of_part.transpose(1, 2))
        call.link.settle()
        if self.local_rows:
            return o, lse
        return self.queries.place(call.link, [o], heads)[0], self.queries.place(call.link, [lse], heads)[0]

    def _fetched(self, call: Call, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The rows and heads that this rank computes, of tensors that are sharded as q. All have one dtype."""
        return list(tensors) if self.local_rows else self.queries.fetch(call.link, tensors)

    def _calls(
        self, call: Call, steps: Sequence[Step], q: Tensor, k: Tensor, v: Tensor
    ) -> Iterator[tuple[Piece, Rows]]:
        """All pieces with their tensors; the keys of a group are on their way while the pieces before compute."""
        groups = _Groups(call, steps, k, v)
        for piece in self.runs.own_pieces(call, q.shape[2], k.shape[2], q.device):
            yield piece, piece.of(q, k, v)
        for step, keys, values in groups.arriving():
            for piece in self.pieces(call, step):
                yield piece, piece.of(q, keys, values)

    def pieces(self, call: Call, step: Step) -> Iterator[Piece]:
        """The pieces of a group of heads, whose keys are fetched."""
        return self.runs.fetched_pieces(call, step.segments, self.heads[0], step.first_kv_head)

    def backward(
        self, call: Call, saved: Rows, outputs: Outputs, of_rows: Sequence[bool], sums: PartGradients
    ) -> list[Tensor | None]:
        """Gradients of this rank's q, k and v; adds those of sink and variant to `sums`.

        saved: of this rank. outputs: of its rows, all (batch, rows, heads, dim).
        """
        q, k, v = saved
        mine, o, do = self._fetched(call, [q, outputs.o, outputs.do])
        lse, *dlse = self._fetched(call, [x for x in (outputs.lse, outputs.dlse) if x is not None])
        fetched = Outputs(o, lse, do, dlse[0] if dlse else None)
        groups = _Groups(call, self.backward_steps, k, v)
        back = Backward(call, of_rows, sums, Rows(mine, k, v), fetched, self.single)
        for piece in self.runs.own_pieces(call, q.shape[2], k.shape[2], q.device, _WORKSPACE // q.shape[3]):
            back.add_own(piece)
        for step, keys, values in groups.arriving():
            back.begin(step.transfer, step.kv_heads, keys, values)
            for piece in self.pieces(call, step):
                back.add(piece)
            back.send()
        dk_and_dv = back.finish()
        call.link.settle()
        dq = back.dq
        if dq is not None and not self.local_rows:
            dq = self.queries.place(call.link, [dq], q.shape[2])[0]
        return [dq, *dk_and_dv]


class _Groups:
    """Keys and values of all groups of heads; the first fetch begins at once."""

    def __init__(self, call: Call, steps: Sequence[Step], k: Tensor, v: Tensor) -> None:
        self.call, self.steps, self.sharded = call, steps, (k, v)
        self.fetch: Fetch = steps[0].transfer.start(call.link, self.sharded)

    def arriving(self) -> Iterator[tuple[Step, Tensor, Tensor]]:
        for number, step in enumerate(self.steps):
            fetch = self.fetch
            if number + 1 < len(self.steps):
                self.fetch = self.steps[number + 1].transfer.start(self.call.link, self.sharded)
            keys, values = fetch.wait()
            yield step, keys, values


def gather_work(
    layout: Layout, rank: int, ranges: KeyRanges, heads: tuple[int, int], inner: int, groups: tuple[int, int]
) -> GatherWork:
    """The work of a rank.

    Args:
        layout, rank: of the plan.
        ranges: the keys that runs reach (`tileattn.parallel.sharding.ranges.key_ranges`).
        heads: of q, and of k and v.
        inner: ranks that share their rows by heads; 1 for gather, all for ulysses.
        groups: into how many parts the key/value heads are cut, in the forward and in the backward pass.
    """
    assignment = assign(layout, heads[0], inner)
    queries = Transfer(layout.owned, [rows_of(layout, runs) for runs in assignment.runs], assignment.heads, rank)
    fetching, own, later = assignment, tuple[OwnRun, ...](), frozenset[int]()
    if assignment.local_rows:
        separate = separated(layout, ranges)
        own = separate[rank].own
        busy = frozenset(each for each, queries in enumerate(separate) if queries.own)
        later = busy if len(busy) < layout.ranks else later
        fetching = Assignment(tuple(each.others for each in separate), assignment.heads, True)
    needed = needed_keys(layout, fetching, ranges)
    of_groups = [
        tuple(_step(layout, rank, assignment, needed, span, heads[0] // heads[1], later) for span in spans)
        for spans in (forward_groups(heads[1], groups[0]), backward_groups(heads[1], groups[1]))
    ]
    mine = assignment.heads[rank]
    fetched = fetching.runs[rank] if mine[0] < mine[1] else ()  # with more ranks than heads some compute nothing
    runs = _runs(layout, assignment.runs[rank], fetched, own, needed[rank], ranges)
    single = assignment.local_rows and all(len(each) <= 1 for each in fetching.runs)
    return GatherWork(queries, runs, mine, of_groups[0], of_groups[1], assignment.local_rows, single)


def _runs(
    layout: Layout,
    computed: Sequence[Run],
    fetching: Sequence[Run],
    own: tuple[OwnRun, ...],
    needed: Sequence[Span],
    ranges: KeyRanges,
) -> Runs:
    """computed: all runs of this rank, whose rows lie one after the other."""
    spans = tuple((start - gap, stop) for (start, stop), gap in zip(needed, gaps_before(layout, needed)))
    found = []
    for run, (start, stop) in zip(fetching, ranges(fetching) if fetching else ()):
        reached = aligned(start), stop
        found.append(FetchedRun(run, reached, _rows(computed, run), rows_of_keys(layout, spans, run, reached)))
    return Runs(own, tuple(found))


def _rows(computed: Sequence[Run], part: Run) -> Span:
    """The rows of a part of one of the runs."""
    row = 0
    for run in computed:
        if run.sequence == part.sequence and run.start <= part.start and part.stop <= run.stop:
            return row + part.start - run.start, row + part.stop - run.start
        row += run.stop - run.start
    raise AssertionError("the part belongs to a run")


def gaps_before(layout: Layout, spans: Sequence[Span]) -> list[int]:
    """The rows from the last multiple of 256 positions of its sequence to the begin of each span."""
    starts = [max(bound for bound in layout.bounds if bound <= start) for start, _ in spans]
    return [start - bound - aligned(start - bound) for bound, (start, _) in zip(starts, spans)]


def _step(
    layout: Layout,
    rank: int,
    assignment: Assignment,
    needed: list[list[Span]],
    kv_heads: Span,
    group: int,
    later: frozenset[int],
) -> Step:
    """The step of some key/value heads. later: ranks that have something to compute while the others wait."""

    def share(of: Span, within: Span) -> Span:
        start, stop = max(of[0], within[0]), min(of[1], within[1])
        return (start, stop) if start < stop else (0, 0)

    of_kv = [share(kv_heads_of(heads, group), kv_heads) for heads in assignment.heads]
    mine = share(assignment.heads[rank], (kv_heads[0] * group, kv_heads[1] * group))
    wanted = [spans if of[0] < of[1] else [] for spans, of in zip(needed, of_kv)]
    transfer = Transfer(layout.owned, wanted, of_kv, rank, tuple(gaps_before(layout, wanted[rank])), later)
    return Step(transfer, tuple(segments(mine, group)), of_kv[rank][0], kv_heads)
