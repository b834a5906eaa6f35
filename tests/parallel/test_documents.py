"""Packed documents over ranks: right by the tolerance rule, and dealt so that ranks have equal areas."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from tests.parallel.ranks_plan import documents
from tests.parallel.test_conformance import check
from tests.tools.ranks.pools import pool, returned
from tileattn import Causal, SlidingWindow
from tileattn.parallel.sharding.documents import documents_layout
from tileattn.parallel.sharding.layout import Layout
from tileattn.parallel.sharding.ranges import areas
from tileattn.testing import ConformanceCase
from tileattn.testing.call_arguments import Structure
from tileattn.testing.shapes import PackedShape

LENGTHS = ((40, 1, 0, 63, 17), (200, 3, 5), (9,), (31, 33, 30, 35, 29, 32, 34))
VARIANTS: tuple[tuple[str, tuple[str, ...], bool, str], ...] = (
    ("causal", (), False, "bf16"),
    ("window", ("softcap",), True, "fp32"),
    ("none", ("alibi_b",), False, "bf16"),
    ("prefix_b", ("bias_bh",), True, "fp32"),
    ("function", ("user",), False, "fp64"),
    ("causal", ("alibi", "bias"), False, "fp32"),
    ("blocks_kv", (), True, "fp32"),
)


def packed_case(lengths: tuple[int, ...], variant: tuple[str, tuple[str, ...], bool, str]) -> ConformanceCase:
    mask, scores, sink, dtype = variant
    structure = Structure(dtype, 16, 16, mask, scores, sink, aligned=True)
    return ConformanceCase(structure, PackedShape(f"{len(lengths)}documents", 4, 2, lengths, lengths))


def _parameters() -> list[Any]:
    parameters = []
    for number, (lengths, variant) in enumerate(itertools.product(LENGTHS, VARIANTS)):
        case = packed_case(lengths, variant)
        ranks, algorithm = (2, 4, 8)[number % 3], ("gather", "ulysses", "ring", "2d")[number // 2 % 4]
        marks = [] if number % 5 == 0 else [pytest.mark.slow]
        parameters.append(
            pytest.param(case, ranks, algorithm, id=f"{case.id}-{max(lengths)}-{ranks}-{algorithm}", marks=marks)
        )
    return parameters


@pytest.mark.parametrize(("case", "ranks", "algorithm"), _parameters())
def test_documents_conform(case: ConformanceCase, ranks: int, algorithm: str) -> None:
    results = returned(pool(ranks).run(documents, case, {"algorithm": algorithm}))
    check(case, results)
    assert isinstance(case.shape, PackedShape)
    positions = torch.cat([torch.arange(length) for length in case.shape.lengths_q])
    for result in results:
        assert torch.equal(result["positions"], positions[result["tokens"]])


# --- Balance ---


def log_normal(count: int, sigma: float, total: int) -> list[int]:
    """cu_seqlens of documents with log-normal lengths that add up to `total`."""
    weights = torch.exp(sigma * torch.randn(count, generator=torch.Generator().manual_seed(3), dtype=torch.float64))
    ends = (weights.cumsum(0) / weights.sum() * total).round().long().tolist()
    return [0, *ends]


def shares(layout: Layout, mask: Any) -> list[float]:
    """The area of each rank, over the mean."""
    of_ranks = [sum(areas(mask, layout, runs, 1, 1)) for runs in layout.runs]
    return [each * layout.ranks / sum(of_ranks) for each in of_ranks]


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("mask", [Causal(), SlidingWindow(1023), None], ids=["causal", "window", "full"])
@pytest.mark.parametrize("sigma", [1.0, 2.0])
def test_documents_are_dealt_by_area(sigma: float, mask: Any, ranks: int) -> None:
    bounds = log_normal(64, sigma, 2**17)
    layout = documents_layout(bounds, ranks, mask, 1)
    assert max(shares(layout, mask)) < 1.1
    tokens = torch.cat([layout.tokens_of(rank) for rank in range(ranks)])
    assert sorted(tokens.tolist()) == list(range(2**17))


def test_a_large_document_is_cut() -> None:
    """One document of 70 % of the tokens: dealt whole, one rank would have nearly all of the work."""
    bounds = [0, 91750, *range(91750 + 2046, 2**17, 2046), 2**17]
    layout = documents_layout(bounds, 4, Causal(), 1)
    assert max(shares(layout, Causal())) < 1.1
    assert all(runs[0].sequence == 0 for runs in layout.runs)


def test_a_document_is_cut_over_few_of_many_ranks() -> None:
    """Each of 64 equal documents needs 4 of 64 ranks, not all: at a quarter of the fair share no piece is larger."""
    layout = documents_layout(range(0, 65 * 4096, 4096), 64, Causal(), 1)
    assert max(shares(layout, Causal())) < 1.1
    for document in range(64):
        assert 2 <= sum(any(run.sequence == document for run in runs) for runs in layout.runs) <= 5


def test_documents_of_one_length_are_dealt_whole() -> None:
    layout = documents_layout(range(0, 65 * 128, 128), 4, Causal(), 1)
    assert all(run.start == 0 and run.stop == 128 for runs in layout.runs for run in runs)
    assert [len(runs) for runs in layout.runs] == [16] * 4
