"""Ranks under masks that read tensors: results and bytes while the tensors change, agreement, captures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.parallel import ranks_contents
from tests.parallel.ranks_contents import SEQLEN, WIDTHS, inputs, window
from tests.parallel.test_windows import ROW
from tests.tools.ranks.pools import Pool, pool, returned
from tileattn import FunctionMask
from tileattn.parallel.sharding.visible import BLOCK
from tileattn.testing import (
    assert_forward_accurate,
    assert_gradients_accurate,
    eager_attention,
    eager_gradients,
    oracle_attention,
    oracle_gradients,
)

TOKEN = 2 * 16 * 4  # bytes of k and v: a head of 16 floats
NAMES = ("dq", "dk", "dv")


@pytest.mark.parametrize(
    "options",
    [pytest.param({"algorithm": "gather"}, id="gather")]
    + [pytest.param({"algorithm": name}, id=name, marks=pytest.mark.slow) for name in ("ring", "ulysses", "auto")],
)
def test_a_tensor_that_is_written_between_calls(options: dict[str, Any]) -> None:
    ranks = returned(pool(2).run(ranks_contents.written_in_place, options))
    *rows, do = inputs()
    for place, width in enumerate(WIDTHS):
        got = {
            name: torch.cat([rank[place][name] for rank in ranks], 2 if name == "lse" else 1)
            for name in ("o", "lse", *NAMES)
        }
        mask = FunctionMask(window(torch.full((SEQLEN,), width)))
        exact = [x.double().requires_grad_() for x in rows]
        same = [x.clone().requires_grad_() for x in rows]
        (q, k, v), (oracle_q, oracle_k, oracle_v) = same, exact
        oracle, sizes = oracle_gradients(dict(zip(NAMES, exact)), do.double(), None, oracle_q, oracle_k, oracle_v, mask)
        eager = eager_gradients(dict(zip(NAMES, same)), do, None, q, k, v, mask)
        of_one = oracle_attention(oracle_q, oracle_k, oracle_v, mask), eager_attention(q, k, v, mask)
        assert_forward_accurate(f"width {width}", (got["o"], got["lse"]), *of_one)
        gradients = {name: got[name] for name in NAMES}
        assert_gradients_accurate(f"width {width}", gradients, oracle, eager, sizes, torch.float32)
    if options["algorithm"] == "gather":
        # Rank 1 holds the second half. A window of 40 reaches a block of the other rank, one of 400 all of them.
        bytes_of = [[each["bytes"] for each in rank] for rank in ranks]
        assert bytes_of == [[0] * 3, [BLOCK * TOKEN, 2 * BLOCK * TOKEN, 0]]


def test_what_masks_fetch() -> None:
    first, second = returned(pool(2).run(ranks_contents.several_masks))
    block = BLOCK * ROW
    assert first == {"blocks": 0, "joined": 0, "causal": 0, "written": 0}
    assert second == {"blocks": block, "joined": block, "causal": block, "written": 2 * block}


def test_a_capture_fetches_what_a_later_write_may_need() -> None:
    whole = 2 * BLOCK * ROW
    assert returned(pool(2).run(ranks_contents.in_a_capture, "gather")) == [(0, whole), (whole // 2, whole)]
    returned(pool(2).run(ranks_contents.in_a_capture, "auto"))
    assert returned(pool(2).run(ranks_contents.inference)) == [whole, whole]


def test_ranks_whose_tensors_differ() -> None:
    for check, good in (("first", 0), ("always", 2)):
        for text in returned(pool(2).run(ranks_contents.other_contents, 1, check, good)):
            assert "ranks must make the same call, but the keys that the mask reaches (" in text


@pytest.fixture
def own_pool() -> Iterator[Pool]:
    """A pool of its own: what a test leaves behind it is no longer a group."""
    own = Pool(2)
    yield own
    own.close()


@pytest.mark.parametrize("by_operator", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_tensor_of_one_rank_that_is_written_before_the_backward_pass(by_operator: bool, own_pool: Pool) -> None:
    """That rank has none, since PyTorch raises; the other does not wait for it for ever."""
    first, second = returned(own_pool.run(ranks_contents.written_before_backward, 1, by_operator))
    assert first.startswith("RankError: tileattn.parallel, call 1 of this plan: RuntimeError: one of the variables")
    assert second.startswith("RuntimeError: one of the variables needed for gradient computation has been modified")


@pytest.mark.slow
def test_a_tensor_of_one_rank_that_is_written_later(own_pool: Pool) -> None:
    """The other rank already waits for tensors of a call that was agreed on; nothing hangs."""
    first, second = returned(own_pool.run(ranks_contents.other_contents, 1, "first", 2, limit=30.0))
    assert "rank 1 makes a call that this rank does not make" in first
    assert "rank 1 makes a call that this rank does not make" in second


@pytest.mark.slow  # Dynamo is imported on each rank
def test_compiled_code() -> None:
    returned(pool(2).run(ranks_contents.compiled, limit=120.0))
