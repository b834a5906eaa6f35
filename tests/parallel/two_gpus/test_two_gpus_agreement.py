"""With NCCL, too, a rank that is wrong or dies ends in an error on both ranks, in under 10 seconds, that names it.

Here ranks agree before the call. A GPU waits for tensors by itself, so a rank that fails or dies at a call whose
signature was agreed before is found with ``check="always"`` alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.parallel.ranks_agreement import stays_usable, wrong_at
from tests.parallel.test_agreement import REFUSED, SECONDS
from tests.tools.ranks.pools import Ended, Pool
from tests.tools.ranks.two_gpus import LIMIT, MARKS, on_both

pytestmark = MARKS
WRONG = 1


@pytest.fixture
def broken_pool() -> Iterator[Pool]:
    own = Pool(2, "cuda")
    yield own
    own.close()


def check_named(result: dict[str, Any]) -> None:
    assert result["error"] is not None
    assert f"rank {WRONG}" in result["error"]
    assert (result["kind"], result["rank"]) == ("RankError", WRONG)
    assert result["seconds"] < SECONDS


@pytest.mark.parametrize(("good", "mode"), [(0, "first"), (0, "always"), (49, "always")])
def test_a_bad_argument(good: int, mode: str) -> None:
    right, wrong = on_both(wrong_at, "argument", WRONG, good, mode, "cuda")
    assert REFUSED in wrong["error"]
    assert REFUSED in right["error"]
    assert f"call {good + 1}" in right["error"]
    check_named(right)


@pytest.mark.parametrize("what", ["mask", "window", "dtype", "backend"])
def test_ranks_that_make_different_calls(what: str) -> None:
    """Of two ranks rank 0 counts as the usual one."""
    for result in on_both(wrong_at, what, WRONG, 0, "first", "cuda"):
        check_named(result)


@pytest.mark.parametrize(("good", "mode"), [(0, "first"), (49, "always")])
def test_a_rank_that_dies(broken_pool: Pool, good: int, mode: str) -> None:
    right, wrong = broken_pool.run(wrong_at, "death", WRONG, good, mode, "cuda", limit=LIMIT)
    assert isinstance(wrong, Ended)
    assert isinstance(right, dict), right
    assert "gives no sign of life" in right["error"]
    check_named(right)


@pytest.mark.parametrize("mode", ["first", "always"])
def test_a_plan_is_usable_after_a_refused_call(mode: str) -> None:
    for what in ("argument", "mask"):
        assert all(text != "nothing" for text in on_both(stays_usable, what, WRONG, mode, "cuda"))
