"""Attention by gathered keys: the algorithms gather, ulysses and 2d, which differ in their assignment only (work.py).

    for each group of key/value heads:
        fetch its keys and values from all ranks that hold what my queries reach   (while the group before computes)
        for each run of queries:  o, lse = attention(q_run, k[reached], v[reached])

`tileattn` aligns masks bottom-right, so a call on a run of queries and the keys up to its end already has the positions
of the whole sequence. Each row's softmax is computed by one call over all of its keys: nothing is merged.

Keys are given to a call from a multiple of 256 on, as if those before were there: zeros stand for keys that no query
reaches. So the tiles of a kernel are those of one device, and with runs that begin at multiples of 256 so are the bits
of o and lse.

The backward pass fetches keys and values again instead of keeping them, so memory stays that of the shards and one
group of heads. It sends dk and dv, in float32, to the ranks that hold the keys, which sum them in the order of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..sharding.layout import Layout, Run, Span
from ..sharding.work import (
    Assignment,
    KeyRanges,
    Segment,
    assign,
    head_steps,
    kv_heads_of,
    needed_keys,
    rows_of,
    segments,
)
from ..transport.transfer import Summing, Transfer
from .call import Call, Operands, Outputs, PartGradients, Rows, cut, part_forward, part_outputs, within
from .shifted import Part

_TILE = 256  # a multiple of the tile sizes of all kernels


class Piece(NamedTuple):
    """One call of a backend.

    Attributes:
        part: what the variant is told.
        rows: rows of the queries that this rank computes.
        keys: rows of the keys that this rank has fetched.
        heads: heads of these queries.
        kv_heads: heads of these keys.
    """

    part: Part
    rows: Span
    keys: Span
    heads: Span
    kv_heads: Span


@dataclass(frozen=True)
class Step:
    """A group of key/value heads: the transfer of its keys and values, and this rank's query heads of it."""

    transfer: Transfer
    segments: tuple[Segment, ...]
    first_kv_head: int


@dataclass(frozen=True)
class GatherWork:
    """The work of a rank, for one variant and one number of heads.

    Attributes:
        queries: the transfer of q, and back that of o.
        runs: the runs of queries that this rank computes, and the keys that each reaches.
        needed: for this rank the spans of tokens of the keys it fetches, each from its gap on.
        heads: this rank's query heads.
        steps: the groups of heads.
    """

    queries: Transfer
    runs: tuple[tuple[Run, Span], ...]
    needed: tuple[Span, ...]
    heads: Span
    steps: tuple[Step, ...]
    local_rows: bool

    # --- Forward ---

    def forward(self, call: Call, q: Tensor, k: Tensor, v: Tensor, operands: Operands) -> tuple[Tensor, Tensor]:
        """o (batch, rows, heads, head_dim_v) and lse (batch, rows, heads, 1) of this rank's rows."""
        heads = q.shape[2]
        mine = self._fetched(call, [q])[0]
        accumulator = torch.promote_types(q.dtype, torch.float32)
        o = mine.new_empty(*mine.shape[:3], v.shape[3])
        lse = mine.new_empty(*mine.shape[:3], 1, dtype=accumulator)
        for step, keys, values in self._groups(call, k, v):
            for piece in self._pieces(call, step):
                rows = self._rows(piece, mine, keys, values)
                of_part, lse_of_part = part_forward(call, piece.part, rows, operands)
                cut(o, piece.rows, piece.heads).copy_(of_part)
                cut(lse, piece.rows, piece.heads)[..., 0].copy_(lse_of_part.transpose(1, 2))
        if self.local_rows:
            return o, lse
        return self.queries.place(call.link, [o], heads)[0], self.queries.place(call.link, [lse], heads)[0]

    def _fetched(self, call: Call, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The rows and heads that this rank computes, of tensors that are sharded as q. All have one dtype."""
        return list(tensors) if self.local_rows else self.queries.fetch(call.link, tensors)

    def _groups(self, call: Call, k: Tensor, v: Tensor) -> Iterator[tuple[Step, Tensor, Tensor]]:
        """Each group of heads with its keys and values; the next group is on its way meanwhile."""
        fetch = self.steps[0].transfer.start(call.link, [k, v])
        for number, step in enumerate(self.steps):
            keys, values = fetch.wait()
            if number + 1 < len(self.steps):
                fetch = self.steps[number + 1].transfer.start(call.link, [k, v])
            yield step, keys, values

    def _pieces(self, call: Call, step: Step) -> Iterator[Piece]:
        if not step.segments:  # more ranks than heads
            return
        row = 0
        for run, reached in self.runs:
            rows = row, row + run.stop - run.start
            row = rows[1]
            keys = self._rows_of_keys(call.layout, run, reached)
            for segment in step.segments:
                part = call.part(run.sequence, (run.start, run.stop), reached, segment.heads)
                heads, kv_heads = within(segment.heads, self.heads[0]), within(segment.kv_heads, step.first_kv_head)
                yield Piece(part, rows, keys, heads, kv_heads)

    def _rows_of_keys(self, layout: Layout, run: Run, reached: Span) -> Span:
        """Where the reached keys are among those fetched: in the span in which they end.

        Spans overlap where the gap of one begins before the end of another, so where keys begin does not tell.
        """
        first, row = layout.bounds[run.sequence] + reached[0], 0
        last = first + reached[1] - reached[0]
        for start, stop in self.needed:
            if start <= first and last <= stop:
                return row + first - start, row + last - start
            row += stop - start
        raise AssertionError("every reached key is needed")

    def _rows(self, piece: Piece, q: Tensor, k: Tensor, v: Tensor) -> Rows:
        keys, values = (cut(x, piece.keys, piece.kv_heads) for x in (k, v))
        return Rows(cut(q, piece.rows, piece.heads), keys, values)

    # --- Backward ---

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
        back = _Back(call, self, of_rows, sums, (k, v), mine)
        for step, keys, values in self._groups(call, k, v):
            back.begin(step, keys, values)
            for piece in self._pieces(call, step):
                of_piece = part_outputs(fetched, piece.rows, piece.heads)
                back.add(piece, self._rows(piece, mine, keys, values), of_piece)
            back.send()
        return back.finish(q.shape[2])


class _Back:
    """Collects gradients over the groups of heads; dk and dv of a group are on their way while the next computes."""

    def __init__(
        self,
        call: Call,
        work: GatherWork,
        of_rows: Sequence[bool],
        sums: PartGradients,
        sharded: tuple[Tensor, Tensor],
        q: Tensor,
    ) -> None:
        self.call, self.work, self.of_rows, self.sums = call, work, of_rows, sums
        self.dtypes = [x.dtype for x in sharded]
        self.accumulator = torch.promote_types(q.dtype, torch.float32)
        self.dq = torch.empty_like(q, memory_format=torch.contiguous_format) if of_rows[0] else None
        self.totals = [torch.zeros(x.shape, dtype=self.accumulator, device=x.device) for x in sharded]
        self.dkv: list[Tensor] = []
        self.transfer: Transfer | None = None
        self.summing: Summing | None = None

    def begin(self, step: Step, k: Tensor, v: Tensor) -> None:
        self.transfer = step.transfer
        self.dkv = [torch.zeros(x.shape, dtype=self.accumulator, device=x.device) for x in (k, v)]

    def add(self, piece: Piece, rows: Rows, outputs: Outputs) -> None:
        dq, *dkv = self.sums.backward(self.call, piece.part, rows, self.of_rows, outputs)
        if self.dq is not None and dq is not None:
            cut(self.dq, piece.rows, piece.heads).copy_(dq)
        for total, part in zip(self.dkv, dkv):
            if part is not None:
                place = cut(total, piece.keys, piece.kv_heads)
                place += part

    def send(self) -> None:
        """Sends dk and dv of a group, and adds what has arrived of the group before."""
        assert self.transfer is not None
        if any(self.of_rows[1:]):
            summing = self.transfer.start_sum(self.call.link, self.dkv)
            self._arrived()
            self.summing = summing

    def _arrived(self) -> None:
        if self.summing is not None:
            self.summing.add_to(self.totals)

    def finish(self, heads: int) -> list[Tensor | None]:
        self._arrived()
        dq = self.dq
        if dq is not None and not self.work.local_rows:
            dq = self.work.queries.place(self.call.link, [dq], heads)[0]
        dk, dv = (
            total.to(dtype) if need else None for total, dtype, need in zip(self.totals, self.dtypes, self.of_rows[1:])
        )
        return [dq, dk, dv]


def gather_work(
    layout: Layout, rank: int, ranges: KeyRanges, heads: tuple[int, int], inner: int, groups: int
) -> GatherWork:
    """The work of a rank.

    Args:
        layout, rank: of the plan.
        ranges: the keys that runs reach (`tileattn.parallel.sharding.ranges.key_ranges`).
        heads: of q, and of k and v.
        inner: ranks that share their rows by heads; 1 for gather, all for ulysses.
        groups: into how many parts the key/value heads are cut.
    """
    assignment = assign(layout, heads[0], inner)
    needed = needed_keys(layout, assignment, ranges)
    queries = Transfer(layout.owned, [rows_of(layout, runs) for runs in assignment.runs], assignment.heads, rank)
    steps = tuple(
        _step(layout, rank, assignment, needed, span, heads[0] // heads[1]) for span in head_steps(heads[1], groups)
    )
    runs = assignment.runs[rank]
    reached = tuple((run, (aligned(start), stop)) for run, (start, stop) in zip(runs, ranges(runs) if runs else ()))
    mine = tuple((start - gap, stop) for (start, stop), gap in zip(needed[rank], gaps_before(layout, needed[rank])))
    return GatherWork(queries, reached, mine, assignment.heads[rank], steps, assignment.local_rows)


def aligned(position: int) -> int:
    """The last multiple of 256 up to a position."""
    return position // _TILE * _TILE


def gaps_before(layout: Layout, spans: Sequence[Span]) -> list[int]:
    """The rows from the last multiple of 256 positions of its sequence to the begin of each span."""
    starts = [max(bound for bound in layout.bounds if bound <= start) for start, _ in spans]
    return [start - bound - aligned(start - bound) for bound, (start, _) in zip(starts, spans)]


def _step(
    layout: Layout, rank: int, assignment: Assignment, needed: list[list[Span]], kv_heads: Span, group: int
) -> Step:
    """The step of some key/value heads."""

    def share(of: Span, within: Span) -> Span:
        start, stop = max(of[0], within[0]), min(of[1], within[1])
        return (start, stop) if start < stop else (0, 0)

    of_kv = [share(kv_heads_of(heads, group), kv_heads) for heads in assignment.heads]
    mine = share(assignment.heads[rank], (kv_heads[0] * group, kv_heads[1] * group))
    wanted = [spans if of[0] < of[1] else [] for spans, of in zip(needed, of_kv)]
    transfer = Transfer(layout.owned, wanted, of_kv, rank, tuple(gaps_before(layout, wanted[rank])))
    return Step(transfer, tuple(segments(mine, group)), of_kv[rank][0])
