"""Runs of the suite parallel on two ranks, with gloo on this CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.bench.parallel import ranks_bench
from tests.tools.ranks.pools import pool, returned
from tileattn.bench.parallel.results import load


@pytest.mark.slow(reason="starts ranks, 3 s")
def test_a_run_by_the_command(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    options = ["--rows", "32k,128k 8/2 causal,70%", "--baselines", "cudnn,tileattn-gather2,tileattn-ulysses"]
    (code, output), other = returned(pool(2).run(ranks_bench.command, [*options, "--json", str(path)]))
    assert code == 0, output
    assert other[0] == 0
    assert "results:" not in other[1]
    measured = load(path)
    names = ["32k 8/2 causal", "128k 8/2 causal", "128k 8/2 documents, one of 70%"]
    assert measured.done == measured.begun == names
    rows = {(row.case, row.backend, row.direction): row for row in measured.rows}
    own = ("tileattn", "tileattn-gather2", "tileattn-ulysses")
    assert set(rows) == {(case, each, way) for case in names for each in ("ideal", *own) for way in ("fwd", "fwdbwd")}
    for (_, backend, direction), row in rows.items():
        assert set(row.errors) == ({"o"} if direction == "fwd" else {"dq", "dk", "dv"})
        assert not row.wrong
        assert len(row.rounds) == 2
        assert min(row.ms, row.tflops, row.peak_bytes) > 0
        assert (row.sent_bytes is None) == (backend == "ideal")
    of_ulysses = rows[names[0], "tileattn-ulysses", "fwd"]
    # Half of the rows with half of the heads: of q, k, v and o (head dim 8, 2 bytes), and of lse in float32.
    assert of_ulysses.sent_bytes == 64 * (4 + 1 + 1 + 4) * 8 * 2 + 64 * 4 * 4
    assert {each.reason for each in measured.missing} == {
        "PyTorch's ring has kernels for GPUs only",
        "PyTorch's ring takes no mask but a causal one",
    }
    assert [cost.what.partition(",")[0] for cost in measured.host_costs] == [
        "tileattn.attention",
        *["plan.attention"] * 2,
    ]
    assert "check='always'" in output
    assert "128k 8/2 documents, one of 70%" in output
    assert path.with_suffix(".png").exists()


def test_a_run_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    options = ["--direction", "fwd", "--json", str(path), "--quiet"]
    returned(pool(2).run(ranks_bench.command, [*options, "--rows", "32k 8/2"]))
    (code, output), other = returned(pool(2).run(ranks_bench.command, [*options, "--rows", "32k 8/8"]))
    assert (code, other[0]) == (2, 2)
    assert "exists; give another name" in output
    assert other[1] == ""
    (code, _), _ = returned(pool(2).run(ranks_bench.command, [*options, "--rows", "32k", "--resume"]))
    assert code == 0
    content = json.loads(path.read_text())
    assert content["done"] == ["32k 8/2 causal", "32k 8/8 causal"]
    assert len(content["commands"]) == 2
    assert [row["case"] for row in content["rows"]] == ["32k 8/2 causal"] * 2 + ["32k 8/8 causal"] * 2


def test_what_fails_on_one_rank_is_given_up_on_all() -> None:
    found = returned(pool(2).run(ranks_bench.failures))
    assert found[0] == found[1]
    assert [row.backend for row in found[0].rows] == ["ideal", "tileattn"]
    assert [(each.backend, each.reason) for each in found[0].missing] == [
        ("prepared", "rank 1: MemoryError: too large"),
        ("first", "rank 1: RuntimeError: out of luck"),
        ("later", "rank 1: RuntimeError: out of luck"),
    ]


def test_failures_at_different_places_meet() -> None:
    texts = ["rank 0: ValueError: of rank 0", "rank 1: ValueError: of rank 1", "1"]
    assert returned(pool(2).run(ranks_bench.gives_up_together)) == [texts] * 2


def test_values_that_differ_are_found() -> None:
    for found in returned(pool(2).run(ranks_bench.wrong_values)):
        wrong = {row.backend: row.wrong for row in found.rows}
        assert wrong == {"ideal": "", "tileattn": "o"}
        assert found.failed()


def test_the_long_case_is_one_step_of_tileattn() -> None:
    for found in returned(pool(2).run(ranks_bench.long_case)):
        (row,) = found.rows
        assert (row.backend, row.direction, len(row.rounds), row.errors) == ("tileattn", "fwdbwd", 1, {})
        assert row.peak_bytes > 2**20


@pytest.mark.slow  # imports all of Dynamo in each rank
def test_flexattention_with_its_balancers() -> None:
    for found in returned(pool(2).run(ranks_bench.flex)):
        rows = {(row.case.partition("8/2 ")[2], row.backend): row for row in found.rows}
        assert {name for case, name in rows if case == "window 16"} == {"ideal", "tileattn", "flex"}
        assert {name for case, name in rows if case != "window 16"} == {"ideal", "tileattn", "flex", "flex-ptrr"}
        assert not any(row.wrong for row in found.rows)
        assert all("o" in row.errors for row in found.rows)


def test_a_ring_patches_sdpa_and_takes_the_tokens_that_pytorch_gives() -> None:
    for theirs, ours, found in returned(pool(2).run(ranks_bench.ring_context)):
        assert theirs == ours
        assert found == ["patched", "original", "original"]


def test_slow_ones_of_pytorch_leave() -> None:
    assert ranks_bench.slow_ones_leave() == ["ideal", "tileattn", "fa2-allgather", "left", "fa2-alltoall"]


@pytest.mark.parametrize("direction", ["fwd", "fwdbwd"])
def test_orders_are_equal_on_all_ranks(direction: str) -> None:
    orders = [ranks_bench.suite_run._order(4, f"{direction} {number}") for number in range(20)]
    assert orders == [ranks_bench.suite_run._order(4, f"{direction} {number}") for number in range(20)]
    assert all(sorted(order) == [0, 1, 2, 3] for order in orders)
    assert len(set(map(tuple, orders))) > 10
