"""The cost model: what each rank computes and receives, and how long that takes.

Areas and bytes are exact: they come from the mask's own ranges and the layout, as in the real transfers. Times are a
model: a kernel runs at a fixed speed, a link at a fixed rate, links of different tiers work side by side, and the
transfer of one group of heads is hidden behind the computation of the group before. With g groups, fetch f and compute
m of a group,

    forward = f + (g - 1) max(f, m) + m

A ring goes in lockstep: each step takes the longer of the slowest link's transfer and its share of the computation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...variant.masks import Mask
from ..sharding.layout import Layout, Span, joined
from ..sharding.ranges import areas, key_ranges
from ..sharding.work import assign, kv_heads_of, needed_keys, rows_of
from .topology import Topology

_FLOAT32 = 4


class Shape(NamedTuple):
    """The sizes of a call on the whole sequence; `size` is the bytes of an element."""

    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    size: int = 2


class Load(NamedTuple):
    """What one rank does in a forward pass.

    Attributes:
        area: scores, of all its heads and batch elements.
        calls: calls of a kernel, for one group of heads.
        keys: bytes of k and v from its node, its site and other sites.
        queries: bytes of q from the same; o takes the way back.
        wide: bytes of dk and dv, in float32, on their way back: as `keys`.
    """

    area: int
    calls: int
    keys: tuple[int, int, int]
    queries: tuple[int, int, int]
    wide: tuple[int, int, int]


class Times(NamedTuple):
    """Seconds of a rank."""

    forward: float
    backward: float


@dataclass(frozen=True)
class Model:
    """The cost of calls with one mask and shape."""

    topology: Topology
    layout: Layout
    mask: Mask | None
    shape: Shape

    def loads(self, inner: int) -> list[Load]:
        """What each rank does, where groups of `inner` ranks share their rows by heads (1: gather, all: ulysses)."""
        layout, shape = self.layout, self.shape
        group = shape.heads // shape.kv_heads
        assignment = assign(layout, shape.heads, inner)
        runs = sorted({run for each in assignment.runs for run in each})
        asked = (self.mask, layout, runs, shape.batch, shape.heads)
        reached = dict(zip(runs, key_ranges(*asked))) if runs else {}
        of_runs = dict(zip(runs, areas(*asked)))
        needed = needed_keys(layout, assignment, lambda of: [reached[run] for run in of])
        loads = []
        owned: dict[range, list[Span]] = {}
        for rank in range(layout.ranks):
            heads = assignment.heads[rank]
            count, kv_heads = heads[1] - heads[0], kv_heads_of(heads, group)
            area = sum(of_runs[run] for run in assignment.runs[rank]) * count * shape.batch
            dims = shape.head_dim + shape.head_dim_v
            of_keys = self._by_tier(owned, rank, needed[rank], (kv_heads[1] - kv_heads[0]) * dims)
            of_queries = self._by_tier(owned, rank, rows_of(layout, assignment.runs[rank]), count * shape.head_dim)
            loads.append(
                Load(
                    area,
                    len(assignment.runs[rank]) if count else 0,
                    _times(of_keys, shape.size),
                    _times(of_queries, shape.size),
                    _times(of_keys, max(shape.size, _FLOAT32)),
                )
            )
        return loads

    def _by_tier(
        self, owned: dict[range, list[Span]], rank: int, needed: Sequence[Span], elements: int
    ) -> tuple[int, int, int]:
        """Elements that a rank receives from its node, its site and others; `elements` is those of a token.

        owned: keeps the tokens of several ranks for the next call.
        """
        below, found = common(needed, self.layout.owned[rank]), []
        for ranks in self.topology.neighbours(rank):
            if ranks not in owned:
                owned[ranks] = joined([span for each in ranks for span in self.layout.owned[each]])
            total = common(needed, owned[ranks])
            found.append((total - below) * elements * self.shape.batch)
            below = total
        return found[0], found[1], found[2]

    def times(self, load: Load, groups: int) -> Times:
        """Seconds of one rank by gathered keys, in `groups` groups of heads."""
        top, shape = self.topology, self.shape
        dims = 2 * (shape.head_dim + shape.head_dim_v)
        calls = load.calls * top.call
        forward = load.area * dims / top.forward / groups + calls
        backward = load.area * 2.5 * dims / top.backward / groups + calls
        keys, queries, wide = (self._seconds(each) for each in (load.keys, load.queries, load.wide))
        fetch, send = keys / groups, wide / groups
        return Times(
            2 * queries + fetch + (groups - 1) * max(fetch, forward) + forward,
            # q, o and do come, dq goes
            4 * queries + fetch + (groups - 1) * max(fetch + send, backward) + backward + send,
        )

    def ring(self, loads: Sequence[Load]) -> list[Times]:
        """Seconds of the ranks by the ring; `loads` are those of gather."""
        top, shape = self.topology, self.shape
        ranks = self.layout.ranks
        dims = shape.head_dim + shape.head_dim_v
        rows = max((self.layout.rows(rank) for rank in range(ranks)), default=0)
        block = rows * shape.batch * shape.kv_heads * dims
        slowest = min((top.rates[tier] for tier in self._ring_tiers()), default=top.fast)
        keys, wide = block * shape.size / slowest, block * max(shape.size, _FLOAT32) / slowest
        most = max(load.area for load in loads)
        forward = most * 2 * dims / top.forward / ranks + top.call
        backward = most * 5 * dims / top.backward / ranks + top.call
        steps = ranks - 1
        times = Times(forward + steps * max(keys, forward), backward + steps * max(keys + wide, backward))
        return [times] * ranks

    def _ring_tiers(self) -> set[int]:
        ranks = self.layout.ranks
        tiers = set()
        for rank in range(ranks if ranks > 1 else 0):
            before = (rank - 1) % ranks
            tiers.add(next(tier for tier, near in enumerate(self.topology.neighbours(rank)) if before in near))
        return tiers

    def _seconds(self, by_tier: Sequence[int]) -> float:
        return max(size / rate for size, rate in zip(by_tier, self.topology.rates))


def common(a: Sequence[Span], b: Sequence[Span]) -> int:
    """Tokens in both of two lists of disjoint spans."""
    return sum(max(0, min(x[1], y[1]) - max(x[0], y[0])) for x in a for y in b)


def _times(elements: tuple[int, int, int], size: int) -> tuple[int, int, int]:
    return elements[0] * size, elements[1] * size, elements[2] * size


class Choice(NamedTuple):
    """An algorithm, the ranks that share rows by heads, and the groups of heads."""

    algorithm: str
    inner: int
    groups: int


def candidates(topology: Topology, shape: Shape) -> list[Choice]:
    """What "auto" chooses from. Not the ring: it saves memory, not time."""
    groups = [count for count in (1, 2, 4, 8) if count <= shape.kv_heads]
    choices = [Choice("gather", 1, count) for count in groups]
    node = topology.node
    if 1 < node < topology.ranks and topology.ranks % node == 0 and node <= shape.heads:
        choices += [Choice("2d", node, count) for count in groups]
    if 1 < topology.ranks <= shape.heads:
        choices.append(Choice("ulysses", topology.ranks, 1))
    return choices


def named(topology: Topology, algorithm: str, groups: int | None) -> Choice:
    """The choice of who names an algorithm."""
    return Choice(algorithm, {"ulysses": topology.ranks, "2d": topology.node}.get(algorithm, 1), groups or 1)


def with_groups(choice: Choice, groups: int | None) -> Choice:
    """A choice of "auto" with the head groups that were asked for, where its algorithm has any."""
    return choice if groups is None or choice.algorithm == "ulysses" else choice._replace(groups=groups)


def choose(model: Model, needs_grad: bool, local_rows: bool) -> Choice:
    """The fastest choice by the model; the first of equals. local_rows: whether rows must stay where they are."""
    best, least = Choice("gather", 1, 1), float("inf")
    loads: dict[int, list[Load]] = {}
    for choice in candidates(model.topology, model.shape):
        if local_rows and choice.inner > 1:
            continue
        if choice.inner not in loads:
            loads[choice.inner] = model.loads(choice.inner)
        times = [model.times(load, choice.groups) for load in loads[choice.inner]]
        seconds = max(each.forward + (each.backward if needs_grad else 0.0) for each in times)
        if seconds < least:
            best, least = choice, seconds
    return best
