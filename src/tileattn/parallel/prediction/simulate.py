"""`simulate`: time, bytes and balance of attention over ranks that need not be there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...measure.units import human_bytes
from ...runtime.run import MaskLike
from ...variant.key import normalize
from ..prepare import check_algorithm
from ..sharding.documents import documents_layout
from ..sharding.layout import sequence_layout
from .cost import Choice, Load, Model, Shape, Times, choose, named, with_groups
from .topology import Topology


@dataclass(frozen=True)
class Simulation:
    """What :func:`simulate` predicts. Lists have an entry for each rank.

    Attributes:
        algorithm, head_groups: what was asked for, or chosen.
        forward, backward: seconds.
        area: scores that a rank computes.
        received: bytes of q, k and v that a rank receives in the forward pass, from its node, its site and other sites.
    """

    topology: Topology
    algorithm: str
    head_groups: int
    forward: list[float]
    backward: list[float]
    area: list[int]
    received: list[tuple[int, int, int]]
    ideal: tuple[float, float]
    """Seconds of both passes if areas were equal and nothing were sent."""

    @property
    def balance(self) -> float:
        """The mean area over the largest: 1 if all ranks have the same work."""
        most = max(self.area)
        return sum(self.area) / len(self.area) / most if most else 1.0

    @property
    def efficiency(self) -> tuple[float, float]:
        """The ideal time over that of the slowest rank: of the forward pass, and of both."""
        forward, both = max(self.forward), max(f + b for f, b in zip(self.forward, self.backward))
        return (self.ideal[0] / forward if forward else 1.0), (sum(self.ideal) / both if both else 1.0)

    def __str__(self) -> str:
        forward, both = self.efficiency
        most = max(sum(each) for each in self.received)
        return (
            f"{self.topology.ranks} ranks, {self.algorithm}, {self.head_groups} group(s) of heads: forward "
            f"{_ms(max(self.forward))} ({forward:.0%} of ideal), both passes "
            f"{_ms(max(f + b for f, b in zip(self.forward, self.backward)))} ({both:.0%}), balance "
            f"{self.balance:.3f}, at most {human_bytes(most)} received"
        )


def _ms(seconds: float) -> str:
    ms = 1e3 * seconds
    return f"{ms:,.0f} ms" if ms >= 100 else f"{ms:.3g} ms"


def simulate(
    topology: Topology,
    mask: MaskLike | None,
    shape: Sequence[int],
    *,
    causal: bool = False,
    layout: str | None = None,
    documents: Sequence[int] | None = None,
    algorithm: str = "auto",
    head_groups: int | None = None,
    itemsize: int = 2,
) -> Simulation:
    """Predicts time, bytes and balance for any number of ranks, from the mask's own ranges. Needs no GPU, no group.

    Areas and bytes are those of the real transfers. Times are a model (cost.py) with the rates of the topology:
    use them to compare ways, not as measurements.

    Args:
        topology: the ranks and their links.
        mask: as in :func:`tileattn.attention`.
        shape: (batch, seqlen, heads, kv_heads, head_dim) of the whole sequence.
        causal: short for ``mask=Causal()``; with a mask, both hold.
        layout, documents: as in :class:`Plan`.
        algorithm, head_groups: as in :meth:`Plan.attention`.
        itemsize: bytes of an element of q, k and v.

    Raises:
        TypeError, ValueError: an argument is wrong.
    """
    sizes = _checked(topology, shape, algorithm, head_groups)
    batch, seqlen, heads, kv_heads, head_dim = sizes
    normal, _ = normalize(mask, None, causal)
    if documents is not None:
        laid = documents_layout(list(documents), topology.ranks, normal, 1)
    else:
        name = layout or "zigzag"
        if name not in ("zigzag", "contiguous"):
            raise ValueError(f"layout must be 'zigzag' or 'contiguous', or documents= given, got {layout!r}")
        laid = sequence_layout(name, seqlen, topology.ranks)
    model = Model(topology, laid, normal, Shape(batch, heads, kv_heads, head_dim, head_dim, itemsize))
    choice = _choice(model, algorithm, head_groups)
    loads = model.loads(choice.inner)
    times = (
        model.ring(loads) if choice.algorithm == "ring" else [model.times(load, choice.both_groups) for load in loads]
    )
    return _simulation(model, choice, loads, times)


def _choice(model: Model, algorithm: str, groups: int | None) -> Choice:
    if algorithm == "auto":
        return with_groups(choose(model, needs_grad=True, local_rows=False), groups)
    choice, ranks = named(model.topology, algorithm, groups), model.topology.ranks
    if ranks % choice.inner:
        raise ValueError(f"Topology: node must divide ranks for algorithm='2d', got {choice.inner} and {ranks}")
    return choice


def _simulation(model: Model, choice: Choice, loads: list[Load], times: Sequence[Times]) -> Simulation:
    flops = 2 * (model.shape.head_dim + model.shape.head_dim_v) * sum(load.area for load in loads) / len(loads)
    received = [tuple(a + b for a, b in zip(load.keys, load.queries)) for load in loads]
    return Simulation(
        model.topology,
        choice.algorithm,
        choice.groups,
        [each.forward for each in times],
        [each.backward for each in times],
        [load.area for load in loads],
        received,  # type: ignore[arg-type]
        (flops / model.topology.forward, 2.5 * flops / model.topology.backward),
    )


def _checked(topology: Any, shape: Any, algorithm: Any, groups: Any) -> tuple[int, ...]:
    if not isinstance(topology, Topology):
        raise TypeError(f"topology must be a tileattn.parallel.Topology, got {type(topology).__name__}")
    names = "(batch, seqlen, heads, kv_heads, head_dim)"
    if not isinstance(shape, (list, tuple)) or len(shape) != 5 or any(not isinstance(size, int) for size in shape):
        raise TypeError(f"shape must be five ints {names}, got {shape!r}")
    if min(shape) < 1 or shape[2] % shape[3]:
        raise ValueError(f"shape must be {names}, each at least 1 and heads a multiple of kv_heads, got {tuple(shape)}")
    check_algorithm(algorithm, groups, shape[3])
    return tuple(shape)
