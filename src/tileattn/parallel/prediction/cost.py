"""The cost model: what each rank computes and receives, and how long that takes.

Areas and bytes are exact: they come from the mask's own ranges and the layout, as in the real transfers. Times are a
model: a kernel runs at a fixed speed, a link at a fixed rate, links of different tiers work side by side, and the
transfer of one group of heads is hidden behind the computation of the group before. With a fetch f and a computation m
of each group,

    forward = f_1 + max(m_1, f_2) + max(m_2, f_3) + ... + m_last

A ring goes in lockstep: each step takes the longer of the slowest link's transfer and its share of the computation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from ...variant.masks import Mask
from ..sharding.contents import Ask
from ..sharding.groups import backward_groups, forward_groups
from ..sharding.layout import Cover, Layout, Run, Span, joined
from ..sharding.own import separated
from ..sharding.ranges import areas, key_ranges
from ..sharding.work import assign, kv_heads_of, needed_keys, rows_of
from .topology import Topology

_FLOAT32 = 4
_GROUP_BYTES = 2 * 2**30  # below, the memory of a group of heads does not count


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
        own: those of them whose keys the rank holds, computed while the first group of heads is on its way.
        calls: calls of a kernel, for one group of heads.
        keys: bytes of k and v from its node, its site and other sites.
        queries: bytes of q from the same; o takes the way back.
        wide: bytes of dk and dv on their way back: as `keys`. Counted in float32: twice what is sent where each rank
            makes one call for a group of heads.
        outputs: bytes of o.
    """

    area: int
    own: int
    calls: int
    keys: tuple[int, int, int]
    queries: tuple[int, int, int]
    wide: tuple[int, int, int]
    outputs: int


class Times(NamedTuple):
    """Seconds of a rank."""

    forward: float
    backward: float


@dataclass(frozen=True)
class Model:
    """The cost of calls with one mask and shape. ask: what the mask may be asked."""

    topology: Topology
    layout: Layout
    mask: Mask | None
    shape: Shape
    ask: Ask = Ask.NOW
    _loads: dict[int, list[Load]] = field(default_factory=dict, compare=False, repr=False)

    def loads(self, inner: int) -> list[Load]:
        """What each rank does, where groups of `inner` ranks share their rows by heads (1: gather, all: ulysses)."""
        if inner not in self._loads:
            self._loads[inner] = self._counted(inner)
        return self._loads[inner]

    def _counted(self, inner: int) -> list[Load]:
        layout, shape = self.layout, self.shape
        group = shape.heads // shape.kv_heads
        assignment = assign(layout, shape.heads, inner)
        runs = sorted({run for each in assignment.runs for run in each})
        asked = (self.mask, layout, runs, shape.batch, shape.heads, self.ask)
        reached = dict(zip(runs, key_ranges(*asked))) if runs else {}
        of_runs = dict(zip(runs, areas(*asked)))
        needed = needed_keys(layout, assignment, lambda of: [reached[run] for run in of])
        own = self._own(inner)
        loads = []
        tokens = self._tokens()
        for rank in range(layout.ranks):
            heads = assignment.heads[rank]
            count, kv_heads = heads[1] - heads[0], kv_heads_of(heads, group)
            area = sum(of_runs[run] for run in assignment.runs[rank]) * count * shape.batch
            dims = shape.head_dim + shape.head_dim_v
            of_keys = tokens(rank, needed[rank], (kv_heads[1] - kv_heads[0]) * dims)
            of_queries = tokens(rank, rows_of(layout, assignment.runs[rank]), count * shape.head_dim)
            loads.append(
                Load(
                    area,
                    own[rank] * count * shape.batch,
                    len(assignment.runs[rank]) if count else 0,
                    _times(of_keys, shape.size),
                    _times(of_queries, shape.size),
                    _times(of_keys, max(shape.size, _FLOAT32)),
                    sum(run.stop - run.start for run in assignment.runs[rank])
                    * (count * shape.head_dim_v * shape.size * shape.batch),
                )
            )
        return loads

    def _own(self, inner: int) -> list[int]:
        """For each rank the scores whose keys it holds, of one head and batch element."""
        if inner > 1:  # queries change hands first
            return [0] * self.layout.ranks
        asked, shape = (self.mask, self.layout), self.shape

        def ranges(runs: Sequence[Run]) -> list[Span]:
            return key_ranges(*asked, runs, shape.batch, shape.heads, self.ask)

        of_ranks = [[each.run for each in queries.own] for queries in separated(self.layout, ranges)]
        every = [run for runs in of_ranks for run in runs]
        found = dict(zip(every, areas(*asked, every, shape.batch, shape.heads, self.ask) if every else ()))
        return [sum(found[run] for run in runs) for runs in of_ranks]

    def _tokens(self) -> Callable[[int, Sequence[Span], int], tuple[int, int, int]]:
        """A function of a rank, the spans it needs, and the elements of a token.

        It returns the elements that the rank receives from its node, its site and other sites.
        """
        layout, covers = self.layout, dict[range, Cover]()

        def cover(ranks: range) -> Cover:
            if ranks not in covers:
                covers[ranks] = Cover(joined([span for each in ranks for span in layout.owned[each]]))
            return covers[ranks]

        def tokens(rank: int, needed: Sequence[Span], elements: int) -> tuple[int, int, int]:
            around = (range(rank, rank + 1), *self.topology.neighbours(rank))
            # All ranks together have all tokens.
            found = [
                cover(ranks).common(needed) if len(ranks) < layout.ranks else sum(b - a for a, b in needed)
                for ranks in around
            ]
            near, site, far = (b - a for a, b in pairwise(found))
            each = elements * self.shape.batch
            return near * each, site * each, far * each

        return tokens

    def times(self, load: Load, groups: tuple[int, int]) -> Times:
        """Seconds of one rank by gathered keys, in so many groups of heads forward and backward."""
        top, shape = self.topology, self.shape
        dims = 2 * (shape.head_dim + shape.head_dim_v)
        forward, backward = dims / top.forward, 2.5 * dims / top.backward
        calls, queries = load.calls * top.call, self._seconds(load.queries)

        def stages(spans: Sequence[Span], score: float, back: Sequence[int]) -> float:
            """The first transfer beside own keys, computations beside the transfers around them, the last way back."""
            own, whole = score * load.own, score * (load.area - load.own)
            parts = [(stop - start) / shape.kv_heads for start, stop in spans]
            fetches = [self._seconds(load.keys, part) for part in parts]
            sends = [self._seconds(back, part) for part in parts]
            beside = [fetch + send for fetch, send in zip([*fetches[1:], 0.0], [0.0, *sends])]
            computed = sum(max(part * whole + calls, each) for part, each in zip(parts, beside))
            # Several groups are copied together, and apart again: keys to be sent, and o or dq.
            copies = (sum(load.keys) + load.outputs) / top.copy if len(spans) > 1 else 0.0
            return max(fetches[0], own) + computed + sends[-1] + copies

        return Times(
            2 * queries + stages(forward_groups(shape.kv_heads, groups[0]), forward, (0, 0, 0)),
            # q, o and do come, dq goes
            4 * queries + stages(backward_groups(shape.kv_heads, groups[1]), backward, load.wide),
        )

    def group_bytes(self, load: Load, groups: tuple[int, int], needs_grad: bool) -> float:
        """Bytes of the largest group of heads (with gradients and their parts in a backward pass) and of queries."""
        spans = (
            backward_groups(self.shape.kv_heads, groups[1])
            if needs_grad
            else forward_groups(self.shape.kv_heads, groups[0])
        )
        most = max(stop - start for start, stop in spans) / self.shape.kv_heads
        of_queries = (4 if needs_grad else 2) * sum(load.queries)
        return most * (sum(load.keys) + 2 * sum(load.wide) * needs_grad) + of_queries

    def ring(self, loads: Sequence[Load]) -> list[Times]:
        """Seconds of the ranks by the ring; `loads` are those of gather."""
        top, shape = self.topology, self.shape
        ranks = self.layout.ranks
        dims = shape.head_dim + shape.head_dim_v
        rows = max((self.layout.rows(rank) for rank in range(ranks)), default=0)
        block = rows * shape.batch * shape.kv_heads * dims
        slowest = min((top.rates[tier] for tier in self._ring_tiers()), default=top.fast)
        keys = top.transfer + block * shape.size / slowest
        wide = top.transfer + block * max(shape.size, _FLOAT32) / slowest
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

    def _seconds(self, by_tier: Sequence[int], part: float = 1.0) -> float:
        """Seconds of a part of a transfer; none if nothing moves."""
        if not any(by_tier):
            return 0.0
        return self.topology.transfer + max(size / rate for size, rate in zip(by_tier, self.topology.rates)) * part


def _times(elements: tuple[int, int, int], size: int) -> tuple[int, int, int]:
    return elements[0] * size, elements[1] * size, elements[2] * size


class Choice(NamedTuple):
    """An algorithm, the ranks that share rows by heads, and the groups of heads of both passes."""

    algorithm: str
    inner: int
    groups: int
    backward_groups: int = 1

    @property
    def both_groups(self) -> tuple[int, int]:
        """The groups of heads of the forward and of the backward pass."""
        return self.groups, self.backward_groups


def candidates(topology: Topology, shape: Shape) -> list[Choice]:
    """What "auto" chooses from, with the same groups in both passes. Not the ring, which saves no time."""
    groups = [count for count in (1, 2, 3, 4, 6, 8, 16, 32) if count <= shape.kv_heads]
    choices = [Choice("gather", 1, count, count) for count in groups]
    node = topology.node
    if 1 < node < topology.ranks and topology.ranks % node == 0 and node <= shape.heads:
        choices += [Choice("2d", node, count, count) for count in groups]
    if 1 < topology.ranks <= shape.heads:
        choices.append(Choice("ulysses", topology.ranks, 1, 1))
    return choices


def named(topology: Topology, algorithm: str, groups: int | None) -> Choice:
    """The choice of who names an algorithm."""
    inner = {"ulysses": topology.ranks, "2d": topology.node}.get(algorithm, 1)
    return Choice(algorithm, inner, groups or 1, groups or 1)


def with_groups(choice: Choice, groups: int | None) -> Choice:
    """A choice of "auto" with the head groups that were asked for, where its algorithm has any."""
    if groups is None or choice.algorithm == "ulysses":
        return choice
    return choice._replace(groups=groups, backward_groups=groups)


def choose(model: Model, needs_grad: bool, local_rows: bool) -> Choice:
    """The fastest choice by the model, of those whose groups of heads are not too large; the first of equals.

    The passes choose their groups apart. local_rows: whether rows must stay where they are.
    """
    found: dict[tuple[str, int], tuple[tuple[float, float], Choice]] = {}
    every = [each for each in candidates(model.topology, model.shape) if each.inner == 1 or not local_rows]
    for name in dict.fromkeys((each.algorithm, each.inner) for each in every):
        groups = [each.groups for each in every if (each.algorithm, each.inner) == name]
        loads = model.loads(name[1])
        by_groups = {count: [model.times(load, (count, count)) for load in loads] for count in groups}
        forward = {count: max(each.forward for each in times) for count, times in by_groups.items()}
        backward = {count: max(each.backward for each in times) * needs_grad for count, times in by_groups.items()}
        size = {count: max(model.group_bytes(load, (count, count), needs_grad) for load in loads) for count in groups}
        of_forward = min(groups, key=lambda count: (max(size[count], _GROUP_BYTES), forward[count]))
        of_backward = min(groups, key=lambda count: (max(size[count], _GROUP_BYTES), backward[count]))
        rank = max(size[of_backward], _GROUP_BYTES), forward[of_forward] + backward[of_backward]
        found[name] = rank, Choice(*name, of_forward, of_backward)
    return min(found.values(), key=lambda each: each[0])[1]
