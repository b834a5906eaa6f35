"""Ring attention: keys and values go round from rank to rank, and each rank merges what its queries see of them.

    step s:  rank r holds the keys of rank (r - s) % P, and passes them to rank r + 1 while it computes
             o_s, lse_s = attention(q_run, keys)       for each run of my queries and each run of these keys
             lse' = log(exp(lse) + exp(lse_s)),   o = o * exp(lse - lse') + o_s * exp(lse_s - lse')     in float32

The merge is in float32 (float64 for float64). A kernel rounds its own o_s to the inputs' dtype, once; the sum is not
rounded again at each step, so the error does not grow with the ring. The sink joins at the end.

The backward pass takes the lse of all keys, so the parts of dq, dk and dv add up. dk and dv travel with their keys, in
float32, and go home from wherever the last step left them. Only two blocks of keys are in memory at a time.

Source: Liu, Zaharia and Abbeel 2023 (arXiv 2310.01889).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ...api.merge import merge
from ...kernels.sink import sink_gradient
from ..sharding.layout import Layout, Span
from ..sharding.work import KeyRanges
from ..transport.link import Pending
from .call import Call, Operands, Outputs, PartGradients, Rows, cut, part_forward, part_outputs
from .shifted import Part


class Pair(NamedTuple):
    """A run of my queries and keys of another rank's run: rows of my shard, rows of theirs, positions of both."""

    sequence: int
    rows: Span
    keys: Span
    queries: Span
    positions: Span


@dataclass(frozen=True)
class RingWork:
    """The work of a rank.

    Attributes:
        ranks, rank: of the plan.
        rows: for each rank the number of its rows.
        steps: for each step of the ring the pairs that this rank computes. Steps in which no rank computes anything
            are left out at the end.
    """

    ranks: int
    rank: int
    rows: tuple[int, ...]
    steps: tuple[tuple[Pair, ...], ...]

    def forward(self, call: Call, q: Tensor, k: Tensor, v: Tensor, operands: Operands) -> tuple[Tensor, Tensor]:
        """o (batch, rows, heads, head_dim_v) and lse (batch, rows, heads, 1) of this rank's rows."""
        accumulator = torch.promote_types(q.dtype, torch.float32)
        merged = _Merged(q, v, accumulator)
        without_sink = operands._replace(sink=None)
        for pairs, keys, values in self._blocks(call, k, v):
            for part, pair, rows in self._calls(call, pairs, q, keys, values):
                merged.add(pair.rows, *part_forward(call, part, rows, without_sink))
        return merged.with_sink(operands.sink, q.dtype)

    def _blocks(self, call: Call, k: Tensor, v: Tensor) -> Iterator[tuple[tuple[Pair, ...], Tensor, Tensor]]:
        """The pairs of each step with the keys and values that this rank holds then."""
        block = k, v
        for step, pairs in enumerate(self.steps):
            if step + 1 < len(self.steps):
                following, pending = self._pass(call, block, step + 1)
                yield pairs, *block
                pending.wait()
                block = following[0], following[1]
            else:
                yield pairs, *block

    def _pass(self, call: Call, block: Sequence[Tensor], step: int) -> tuple[list[Tensor], Pending]:
        """Begins to pass a block on; the block of the given step, which comes from the rank before."""
        before, after = (self.rank - 1) % self.ranks, (self.rank + 1) % self.ranks
        rows = self.rows[(self.rank - step) % self.ranks]
        following = [x.new_empty(x.shape[0], rows, *x.shape[2:]) for x in block]
        sends: list[list[Tensor]] = [[] for _ in range(self.ranks)]
        receives: list[list[Tensor]] = [[] for _ in range(self.ranks)]
        sends[after] = list(block)
        receives[before] = following
        return following, call.link.start(sends, receives, block[0])

    def _calls(
        self, call: Call, pairs: Sequence[Pair], q: Tensor, k: Tensor, v: Tensor
    ) -> Iterator[tuple[Part, Pair, Rows]]:
        heads, kv_heads = (0, q.shape[2]), (0, k.shape[2])
        for pair in pairs:
            part = call.part(pair.sequence, pair.queries, pair.positions, heads)
            keys, values = (cut(x, pair.keys, kv_heads) for x in (k, v))
            yield part, pair, Rows(cut(q, pair.rows, heads), keys, values)

    def backward(
        self, call: Call, saved: Rows, outputs: Outputs, of_rows: Sequence[bool], sums: PartGradients
    ) -> list[Tensor | None]:
        """Gradients of this rank's q, k and v; adds those of sink and variant to `sums`. Arguments as in gather.py."""
        q, k, v = saved
        accumulator = outputs.lse.dtype
        _add_sink(sums, outputs)
        ringed = sums.without_sink()
        dq = torch.zeros(q.shape, dtype=accumulator, device=q.device)
        dkv = [torch.zeros(x.shape, dtype=accumulator, device=x.device) for x in (k, v)]
        for step, (pairs, keys, values) in enumerate(self._blocks(call, k, v)):
            if step:
                dkv = self._passed(call, dkv, step)
            for part, pair, rows in self._calls(call, pairs, q, keys, values):
                given = part_outputs(outputs, pair.rows, part.heads)
                places = (cut(dq, pair.rows, part.heads), *(x[:, slice(*pair.keys)] for x in dkv))
                for place, gradient in zip(places, ringed.backward(call, part, rows, of_rows, given)):
                    if gradient is not None:
                        place += gradient
        dkv = self._home(call, dkv)
        found = [x.to(like.dtype) for x, like in zip((dq, *dkv), saved)]
        return [x if need else None for x, need in zip(found, of_rows)]

    def _passed(self, call: Call, block: Sequence[Tensor], step: int) -> list[Tensor]:
        following, pending = self._pass(call, block, step)
        pending.wait()
        return following

    def _home(self, call: Call, dkv: list[Tensor]) -> list[Tensor]:
        """Sends dk and dv from where the last step left them to the ranks that hold the keys."""
        last = len(self.steps) - 1
        if last == 0:
            return dkv
        sends: list[list[Tensor]] = [[] for _ in range(self.ranks)]
        receives: list[list[Tensor]] = [[] for _ in range(self.ranks)]
        mine = [x.new_empty(x.shape[0], self.rows[self.rank], *x.shape[2:]) for x in dkv]
        sends[(self.rank - last) % self.ranks] = dkv
        receives[(self.rank + last) % self.ranks] = mine
        call.link.start(sends, receives, dkv[0]).wait()
        return mine


class _Merged:
    """o and lse over the keys seen so far, in float32 or float64."""

    def __init__(self, q: Tensor, v: Tensor, dtype: torch.dtype) -> None:
        batch, rows, heads, _ = q.shape
        self.o = torch.zeros(batch, rows, heads, v.shape[3], dtype=dtype, device=q.device)
        self.lse = torch.full((batch, heads, rows), -torch.inf, dtype=dtype, device=q.device)

    def add(self, rows: Span, o: Tensor, lse: Tensor) -> None:
        """Merges the output of some rows over other keys; lse (batch, heads, rows)."""
        place_o, place_lse = self.o[:, slice(*rows)], self.lse[..., slice(*rows)]
        merged_o, merged_lse = merge(place_o, place_lse, o.to(place_o.dtype), lse.to(place_lse.dtype))
        place_o.copy_(merged_o)
        place_lse.copy_(merged_lse)

    def with_sink(self, sink: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """o in `dtype`, and lse (batch, rows, heads, 1), with the sink in the denominator: a key whose value is 0."""
        o, lse = self.o, self.lse
        if sink is not None:
            o, lse = merge(o, lse, torch.zeros_like(o), sink.to(lse.dtype)[:, None].expand_as(lse))
        return o.to(dtype), lse.transpose(1, 2)[..., None]


def _add_sink(sums: PartGradients, outputs: Outputs) -> None:
    """Adds the sink's gradient, of all keys at once."""
    total, sink = sums.sums[0], sums.operands.sink
    if total is None or sink is None:
        return
    _, lse, _, dlse = outputs
    o, do = outputs.o.to(lse.dtype), outputs.do.to(lse.dtype)
    delta = (do * o).sum(-1, keepdim=True) - (0.0 if dlse is None else dlse)
    by_head = (x[..., 0].transpose(1, 2) for x in (lse, delta))
    total += sink_gradient(sink.to(lse.dtype), *by_head)


def ring_work(layout: Layout, rank: int, ranges: KeyRanges) -> RingWork:
    """The work of a rank. ranges: the keys that runs reach."""
    steps = []
    for step in range(layout.ranks):
        of_all = [_pairs(layout, each, (each - step) % layout.ranks, ranges) for each in range(layout.ranks)]
        steps.append((any(of_all), tuple(of_all[rank])))
    while len(steps) > 1 and not steps[-1][0]:
        steps.pop()
    rows = tuple(layout.rows(each) for each in range(layout.ranks))
    return RingWork(layout.ranks, rank, rows, tuple(pairs for _, pairs in steps))


def _pairs(layout: Layout, rank: int, holder: int, ranges: KeyRanges) -> list[Pair]:
    """What a rank computes while it holds the keys of another."""
    pairs = []
    row = 0
    runs = layout.runs[rank]
    for run, reached in zip(runs, ranges(runs) if runs else []):
        rows = row, row + run.stop - run.start
        row = rows[1]
        first = 0
        for sequence, start, stop in layout.runs[holder]:
            low, high = max(start, reached[0]), min(stop, reached[1])
            if sequence == run.sequence and low < high:
                keys = first + low - start, first + high - start
                pairs.append(Pair(sequence, rows, keys, (run.start, run.stop), (low, high)))
            first += stop - start
    return pairs
