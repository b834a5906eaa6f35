"""The cost model: its bytes are those of real transfers, its areas those of masks, its choice is the fastest."""

from __future__ import annotations

from typing import Any

import pytest

import tileattn
from tests.parallel.ranks_plan import traffic
from tests.tools.ranks import pool, returned
from tileattn.parallel import Topology, simulate
from tileattn.parallel.prediction.cost import Model, Shape, candidates, choose
from tileattn.parallel.sharding.layout import sequence_layout

HEADS, DIM, SIZE = 2, 8, 4  # of `traffic`


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("mask", [None, tileattn.Causal(), tileattn.SlidingWindow(9), tileattn.PrefixLM(20)], ids=str)
@pytest.mark.parametrize("algorithm", ["gather", "ulysses"])
def test_bytes_are_those_of_real_transfers(algorithm: str, mask: Any, layout: str, ranks: int) -> None:
    seqlen = 131
    found = returned(pool(ranks).run(traffic, seqlen, layout, mask, {"algorithm": algorithm}))
    simulated = simulate(
        Topology(ranks), mask, (1, seqlen, HEADS, HEADS, DIM), layout=layout, algorithm=algorithm, itemsize=SIZE
    )
    plan = sequence_layout(layout, seqlen, ranks)
    for rank, (received, _) in enumerate(found):
        expected = sum(simulated.received[rank])
        if algorithm == "ulysses":  # o and lse of my rows come back from the ranks that computed them
            mine = (rank + 1) * HEADS // ranks - rank * HEADS // ranks
            expected += plan.rows(rank) * (HEADS - mine) * (DIM + 1) * SIZE
        assert received == expected


def test_tiers_add_up() -> None:
    one, three = (
        simulate(topology, None, (1, 1 << 12, 8, 8, 64), causal=True, algorithm="gather")
        for topology in (Topology(16, node=16), Topology(16, node=2, site=8))
    )
    assert one.area == three.area
    assert [sum(each) for each in one.received] == [sum(each) for each in three.received]
    assert all(each[1:] == (0, 0) for each in one.received)
    assert all(min(each) > 0 for each in three.received)
    assert max(three.forward) > max(one.forward)


def test_balance_of_layouts() -> None:
    shape = (1, 1 << 15, 8, 8, 64)
    zigzag, contiguous = (
        simulate(Topology(8), None, shape, causal=True, layout=layout, algorithm="gather")
        for layout in ("zigzag", "contiguous")
    )
    assert zigzag.balance > 0.99
    assert contiguous.balance < 0.6  # the last of 8 ranks has 15/64 of the area
    assert sum(zigzag.area) == sum(contiguous.area)


def test_many_ranks_need_two_levels() -> None:
    """64 GPUs, a million tokens, multi-head attention: a flat ring waits for the network."""
    by = {
        algorithm: simulate(Topology(64), None, (1, 1 << 20, 32, 32, 128), causal=True, algorithm=algorithm)
        for algorithm in ("2d", "ring", "gather", "auto")
    }
    assert by["2d"].efficiency[0] > by["ring"].efficiency[0] + 0.2
    assert by["auto"].algorithm == "2d"
    assert max(by["auto"].forward) <= min(max(each.forward) for each in by.values())
    assert "64 ranks, 2d" in str(by["auto"])


@pytest.mark.parametrize("ranks", [1, 2, 8, 16])
@pytest.mark.parametrize("mask", [None, tileattn.Causal(), tileattn.SlidingWindow(127)], ids=str)
def test_auto_takes_the_fastest(mask: Any, ranks: int) -> None:
    topology, shape = Topology(ranks), Shape(1, 32, 8, 128, 128)
    model = Model(topology, sequence_layout("zigzag", 1 << 15, ranks), mask, shape)
    times = {}
    for choice in candidates(topology, shape):
        of_ranks = [model.times(load, choice.groups) for load in model.loads(choice.inner)]
        times[choice] = max(each.forward + each.backward for each in of_ranks)
    assert times[choose(model, True, False)] == min(times.values())
    assert choose(model, True, True).inner == 1


@pytest.mark.parametrize(
    ("arguments", "options", "error", "text"),
    [
        ((8, None, (1, 8, 2, 2, 8)), {}, TypeError, "topology must be a tileattn.parallel.Topology, got int"),
        ((Topology(2), None, (1, 8, 2)), {}, TypeError, "shape must be five ints"),
        ((Topology(2), None, (1, 8, 3, 2, 8)), {}, ValueError, "heads a multiple of kv_heads, got"),
        ((Topology(2), None, (1, 8, 2, 2, 8)), {"algorithm": "x"}, ValueError, "algorithm must be one of 'auto'"),
        ((Topology(2), None, (1, 8, 2, 2, 8)), {"head_groups": 3}, ValueError, "head_groups must lie in 1 .. kv_heads"),
        (
            (Topology(2), None, (1, 8, 2, 2, 8)),
            {"head_groups": 2, "algorithm": "ring"},
            ValueError,
            "head_groups is for algorithm='gather' and '2d', got 2",
        ),
        ((Topology(2), None, (1, 8, 2, 2, 8)), {"layout": "x"}, ValueError, "layout must be 'zigzag' or 'contiguous'"),
        ((Topology(9), None, (1, 8, 2, 2, 8)), {"algorithm": "2d"}, ValueError, "node must divide ranks for algorithm"),
    ],
)
def test_a_bad_simulation(arguments: Any, options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        simulate(*arguments, **options)


def test_head_groups_that_are_asked_for_with_auto() -> None:
    for groups in (1, 2, 4):  # with more ranks than heads "auto" does not choose ulysses, which has no groups
        simulated = simulate(Topology(8), None, (1, 4096, 4, 4, 64), causal=True, head_groups=groups)
        assert (simulated.algorithm, simulated.head_groups) == ("gather", groups)


@pytest.mark.parametrize(
    ("name", "value"), [("ranks", 0), ("node", 1.5), ("site", 0), ("fast", -1.0), ("forward", 0.0), ("ranks", True)]
)
def test_a_bad_topology(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"Topology: {name} must be"):
        Topology(**{"ranks": 2, name: value})
