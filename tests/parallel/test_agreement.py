"""One rank is wrong, another dies: every living rank gets an error in under 10 seconds, which names the rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.parallel.ranks_agreement import (
    backward_after_a_refusal,
    refused_often,
    slow_rank,
    stays_usable,
    wrong_at,
)
from tests.tools.ranks.pools import Ended, Pool, pool, returned

RANKS, WRONG = 4, 2
SECONDS = 10.0


@pytest.fixture
def broken_pool() -> Iterator[Pool]:
    """A pool of its own: what a test leaves behind it is no longer a group."""
    own = Pool(RANKS)
    yield own
    own.close()


def check(results: list[Any], own: str, others: str, ended: bool = False) -> None:
    """The wrong rank raised its own error, or has ended; all others raised one that names it, in time."""
    for rank, result in enumerate(results):
        if rank == WRONG and ended:
            assert isinstance(result, Ended)
            continue
        assert not isinstance(result, Ended), rank
        assert result["error"] is not None, f"rank {rank} raised nothing"
        assert result["seconds"] < SECONDS, result
        assert (own if rank == WRONG else others) in result["error"], (rank, result)
        if rank != WRONG:
            assert f"rank {WRONG}" in result["error"]
            assert (result["kind"], result["rank"]) == ("RankError", WRONG)


REFUSED = "the heads of q must be a multiple of the heads of k and v, got 3 and 2"


@pytest.mark.parametrize("mode", ["first", "always"])
def test_a_bad_argument_at_the_first_call(mode: str) -> None:
    results = returned(pool(RANKS).run(wrong_at, "argument", WRONG, 0, mode))
    check(results, REFUSED, REFUSED)


@pytest.mark.slow(reason="2 s")
def test_a_bad_argument_at_the_50th_call_with_check_always() -> None:
    results = returned(pool(RANKS).run(wrong_at, "argument", WRONG, 49, "always"))
    check(results, REFUSED, REFUSED)
    assert "call 50" in results[0]["error"]


def test_a_bad_argument_at_the_50th_call(broken_pool: Pool) -> None:
    """The others wait for its tensors by then."""
    results = returned(broken_pool.run(wrong_at, "argument", WRONG, 49, "first"))
    check(results, REFUSED, REFUSED)
    assert "call 50" in results[0]["error"]


def test_a_refused_call_between_the_passes_of_another() -> None:
    returned(pool(2).run(backward_after_a_refusal, 1))


def test_a_rank_that_refuses_several_calls_before_others_make_the_first() -> None:
    first, _ = returned(pool(2).run(refused_often, 1))
    assert first.startswith("tileattn.parallel, call 1 of this plan: rank 1 refused its arguments: ValueError: ")
    assert REFUSED in first


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("mask", "the mask and score modifications is SlidingWindow(i,i) on rank 2 and Causal() on rank 0"),
        ("window", "the numbers of the mask and score modifications is ([6, 0], []) on rank 2 and ([5, 0], [])"),
        ("dtype", "the dtype is torch.float64 on rank 2 and torch.float32 on rank 0"),
        ("backend", "backend is 'mma' on rank 2 and 'torch' on rank 0"),
    ],
)
def test_ranks_that_make_different_calls(what: str, text: str) -> None:
    results = returned(pool(RANKS).run(wrong_at, what, WRONG, 0, "first"))
    for result in results:  # also the odd one
        assert text in result["error"]
        assert result["rank"] == WRONG
        assert result["seconds"] < SECONDS


def test_a_new_call_on_one_rank_while_others_repeat_theirs(broken_pool: Pool) -> None:
    results = returned(broken_pool.run(wrong_at, "mask", WRONG, 3, "first"))
    for result in results:
        assert f"rank {WRONG} makes a call that this rank does not make" in result["error"]
        assert (result["kind"], result["rank"]) == ("RankError", WRONG)
        assert result["seconds"] < SECONDS


@pytest.mark.slow_cases("0", reason="a pool of its own, 6 s")
@pytest.mark.parametrize("good", [0, 49])
def test_a_rank_that_dies(broken_pool: Pool, good: int) -> None:
    results = broken_pool.run(wrong_at, "death", WRONG, good, "first")
    check(results, "", f"rank {WRONG} gives no sign of life", ended=True)


@pytest.mark.parametrize("mode", ["first", "always"])
def test_a_plan_is_usable_after_a_refused_call(mode: str) -> None:
    for what in ("argument", "mask"):
        texts = returned(pool(RANKS).run(stays_usable, what, WRONG, mode))
        assert all(text != "nothing" for text in texts)


@pytest.mark.slow  # it sleeps
@pytest.mark.parametrize("waits", [False, True], ids=["sleeps", "waits"])
def test_a_slow_rank_is_not_taken_for_a_dead_one(waits: bool) -> None:
    returned(pool(RANKS).run(slow_rank, waits))
