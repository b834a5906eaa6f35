"""The cost model: its bytes are those of real transfers, its areas those of masks, its choice is the fastest."""

from __future__ import annotations

import json
import random
import time
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import tileattn
from tests.parallel.ranks_plan import traffic
from tests.parallel.test_documents import log_normal
from tests.tools.ranks.pools import pool, returned
from tileattn.parallel import Topology, simulate
from tileattn.parallel.prediction.cost import Choice, Model, Shape, candidates, choose
from tileattn.parallel.prediction.topology import FORMAT, MEASURED
from tileattn.parallel.sharding.layout import Cover, sequence_layout

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

    def seconds(choice: Choice) -> float:
        of_ranks = [model.times(load, choice.both_groups) for load in model.loads(choice.inner)]
        return max(each.forward for each in of_ranks) + max(each.backward for each in of_ranks)

    # The passes choose their groups apart.
    pairs = [
        forward._replace(backward_groups=backward.groups)
        for forward, backward in product(candidates(topology, shape), repeat=2)
        if forward.algorithm == backward.algorithm
    ]
    assert seconds(choose(model, True, False)) == min(map(seconds, pairs))
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
    ("name", "value"),
    [("ranks", 0), ("node", 1.5), ("site", 0), ("fast", -1.0), ("forward", 0.0), ("call", -1.0), ("ranks", True)],
)
def test_a_bad_topology(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"Topology: {name} must be"):
        Topology(**{"ranks": 2, name: value})


def test_a_transfer_costs_time_even_if_it_is_small() -> None:
    shape, free, dear = (1, 4096, 8, 8, 64), Topology(4, transfer=0.0), Topology(4, transfer=1e-3)
    for algorithm, transfers in (("gather", 2), ("ulysses", 3), ("ring", 3)):  # gather in two groups of heads
        groups = 2 if algorithm == "gather" else None
        options: dict[str, Any] = {"causal": True, "algorithm": algorithm, "head_groups": groups}
        a, b = (max(simulate(each, None, shape, **options).forward) for each in (free, dear))
        assert b - a == pytest.approx(transfers * 1e-3, rel=0.1), algorithm
    alone = simulate(Topology(1, transfer=1.0), None, shape, causal=True)
    assert max(alone.forward) < 1e-2


@pytest.mark.parametrize("seed", range(20))
def test_common_tokens_are_counted_as_by_sets(seed: int) -> None:
    draw = random.Random(seed)

    def spans() -> list[tuple[int, int]]:
        ends = sorted(draw.sample(range(60), 2 * draw.randrange(6)))
        return list(zip(ends[::2], ends[1::2]))

    a, b = spans(), spans()
    tokens = [{token for span in each for token in range(*span)} for each in (a, b)]
    assert Cover(a).common(b) == len(tokens[0] & tokens[1])


def test_a_thousand_ranks_take_no_long_time() -> None:
    """Documents over 1024 ranks took two minutes when each pair of spans was compared."""
    begin = time.process_time()
    bounds = log_normal(64, 1.0, 1 << 20)
    simulated = simulate(Topology(1024), None, (1, 1 << 20, 32, 8, 128), causal=True, documents=bounds)
    assert time.process_time() - begin < 20
    assert simulated.balance > 0.8


def test_a_calibration_gives_its_rates(tmp_path: Path) -> None:
    rates = dict.fromkeys(MEASURED, 3.0)
    file = tmp_path / "calibration.json"
    file.write_text(json.dumps({"format": FORMAT, "topology": rates}))
    topology = Topology.calibrated(file, 16, node=4, call=5.0)
    assert (topology.ranks, topology.node, topology.call, topology.fast, topology.network) == (16, 4, 5.0, 3.0, 45e9)
    file.write_text("{}")
    with pytest.raises(ValueError, match=r"is no file of benchmarks/calibrate_parallel\.py"):
        Topology.calibrated(file, 2)
