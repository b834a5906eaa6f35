"""Dropout on shards: one device's pattern, bit by bit, whichever way ranks divide the work."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tileattn
from tests.parallel import ranks_dropout
from tests.tools.ranks.pools import Raised, pool, returned
from tileattn.testing import assert_accurate

WAYS: list[dict[str, Any]] = [
    {"algorithm": "gather", "head_groups": 2},
    {"algorithm": "ulysses"},
    {"algorithm": "2d"},
    {"algorithm": "ring"},
]


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize(("ranks", "seqlen"), [(2, 70), (4, 131), (8, 9)])
def test_the_pattern_is_that_of_one_device(ranks: int, seqlen: int, layout: str) -> None:
    """Runs begin anywhere, and ranks have other generators: rank 0's counts."""
    for wrong in returned(pool(ranks).run(ranks_dropout.patterns, seqlen, layout, WAYS)):
        assert wrong == []


def test_the_pattern_of_documents() -> None:
    """Rows and keys are counted within a document, and its number is the batch element's."""
    ways = [way for way in WAYS if way["algorithm"] != "2d"]
    for wrong in returned(pool(2).run(ranks_dropout.patterns, 130, "documents", ways, [0, 75, 75, 90, 121, 130])):
        assert wrong == []


MASKS = {
    "full": None,
    "causal": tileattn.Causal(),
    "window": tileattn.SlidingWindow(20, 3),
    "documents": tileattn.Causal() & tileattn.Documents(torch.arange(131) // 30),
}


@pytest.mark.slow_except(
    "causal-zigzag-False-ring",
    "full-contiguous-True-ulysses",
    "window-contiguous-False-gather",
    "documents-zigzag-True-2d",
    "documents-zigzag-True-ring",
    reason="0.4 s each",
)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way["algorithm"])
@pytest.mark.parametrize(
    ("mask", "layout", "biased"),
    [
        ("causal", "zigzag", False),
        ("full", "contiguous", True),
        ("window", "contiguous", False),
        ("documents", "zigzag", True),
    ],
)
def test_both_passes(way: dict[str, Any], mask: str, layout: str, biased: bool) -> None:
    """With a sink and its gradient, that of lse and that of a bias; foreign memory is NaN."""
    results = returned(pool(4).run(ranks_dropout.beside_one_device, 131, layout, way, MASKS[mask], biased))
    for result in results:
        for name, (got, oracle, eager) in result.items():
            assert_accurate(name, got, oracle, [eager], gradient=name not in ("o", "lse"))


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way["algorithm"])
def test_recomputation_drops_the_same(way: dict[str, Any]) -> None:
    returned(pool(2).run(ranks_dropout.checkpointed, 45, way))


def test_a_bias_of_local_rows() -> None:
    returned(pool(4).run(ranks_dropout.local_bias))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (([{"dropout_p": 1.5}],), "ValueError: dropout_p must be a probability, a number from 0 to 1, got 1.5"),
        (
            ([{"dropout_p": 0.5}, {"dropout_p": 0.25}],),
            "RankError: tileattn.parallel, call 1 of this plan: ranks must make the same call, but dropout_p is 0.25 "
            "on rank 1 and 0.5 on rank 0",
        ),
        (
            ([{"dropout_p": 0.5}], True),
            "NotImplementedError: a Bias with the rows of one rank goes with dropout_p only where the runs of all "
            "ranks begin at multiples of 16, and one of rank 0 begins at 27",
        ),
    ],
)
def test_what_is_refused(arguments: tuple[Any, ...], text: str) -> None:
    for result in pool(2).run(ranks_dropout.given, *arguments):
        assert isinstance(result, Raised)
        assert repr(result).startswith(text)
