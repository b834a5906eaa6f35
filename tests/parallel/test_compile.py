"""Plans under torch.compile, and in a CUDA graph's capture."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parallel import ranks_compile
from tests.tools.ranks.pools import Raised, pool, returned

slow = pytest.mark.slow  # Dynamo is imported on each rank


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"algorithm": "gather", "dropout_p": 0.2, "head_groups": 2}, id="dropout"),
        pytest.param({"algorithm": "ulysses"}, id="ulysses", marks=slow),
        pytest.param({"algorithm": "ring", "scale": 0.5}, id="ring", marks=slow),
        pytest.param({}, id="auto", marks=slow),
    ],
)
def test_a_transformer_block(options: dict[str, Any]) -> None:
    returned(pool(2).run(ranks_compile.block, options, limit=120.0))


@slow
def test_tensors_of_a_mask() -> None:
    returned(pool(2).run(ranks_compile.tensors_of_a_mask, limit=120.0))


@slow
def test_an_error_of_one_rank() -> None:
    first, second = pool(2).run(ranks_compile.wrong, 1, limit=120.0)
    assert isinstance(first, Raised)
    assert isinstance(second, Raised)
    assert first.kind == "RankError"
    assert "rank 1 refused its arguments: ValueError: q must be a shard with the 20 rows of rank 1" in first.text
    assert repr(second).startswith("ValueError: q must be a shard with the 20 rows of rank 1, got 19 rows")


def test_a_plan_that_is_gone() -> None:
    for result in pool(2).run(ranks_compile.gone):
        assert repr(result).startswith(
            "RuntimeError: compiled code calls attention of a tileattn.parallel.Plan that is"
        )


@pytest.mark.parametrize("check", ["first", "always"])
def test_ranks_agree_before_a_capture(check: str) -> None:
    """No signature is new there; with check="always" no call is agreed on before."""
    call = {"first": 3, "always": 2}[check]
    for result in pool(2).run(ranks_compile.captured, check):
        assert repr(result).startswith(
            f"RuntimeError: tileattn.parallel, call {call} of this plan: ranks must agree on a call before a CUDA "
            f"graph captures it"
        )


def test_a_capture_of_one_rank() -> None:
    """The others do not wait for ever for its signature."""
    first, second = pool(2).run(ranks_compile.captured_by_one, 1, limit=20.0)
    for result in (first, second):
        assert "ranks must agree on a call before a CUDA graph captures it" in repr(result)
    assert repr(first).startswith("RankError: tileattn.parallel, call 1 of this plan: rank 1 refused its arguments")
