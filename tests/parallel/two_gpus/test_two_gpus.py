"""Conformance cases on two GPUs with NCCL, by the tolerance rule of one: test_conformance.py says how.

Many of these calls need kernels of their own: ``python benchmarks/precompile.py parallel`` compiles them ahead.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.parallel.ranks_conformance import attend, plan_of
from tests.parallel.ranks_plan import documents
from tests.parallel.test_conformance import WAYS, check
from tests.parallel.test_documents import LENGTHS, VARIANTS, packed_case
from tests.tools.ranks.two_gpus import MARKS, on_both
from tileattn.testing import ConformanceCase, conformance_cases

pytestmark = MARKS
DTYPES = ("bf16", "fp16", "fp32")


def drawn() -> list[ConformanceCase]:
    """Self-attention: every structure in 16 bits, and a third of those in float32, whose kernels Triton compiles."""
    cases = [case for case in conformance_cases("quick") if case.shape.seqlen_q == case.shape.seqlen_k]
    of = {dtype: [case for case in cases if case.structure.dtype == dtype] for dtype in DTYPES}
    return [*of["bf16"], *of["fp16"], *of["fp32"][::3]]


def dense() -> Iterator[tuple[ConformanceCase, str, int, dict[str, Any]]]:
    """Cases, each by one of the ways: case, layout, ranks of a node, options."""
    for number, case in enumerate(drawn()):
        layout, options = WAYS[(number + number // 20) % len(WAYS)]
        if options.get("head_groups", 1) > case.shape.kv_heads:
            options = {"algorithm": "gather"}
        yield case, layout, 1 + number // 2 % 2, options


def packed() -> Iterator[tuple[ConformanceCase, dict[str, Any]]]:
    for number, (lengths, variant) in enumerate(itertools.product(LENGTHS, VARIANTS)):
        case = packed_case(lengths, variant)
        if case.structure.dtype in DTYPES:
            yield case, {"algorithm": ("gather", "ulysses", "ring")[number % 3]}


@pytest.mark.parametrize(
    ("case", "layout", "node", "options"),
    [
        pytest.param(*each, id="-".join([each[0].id, each[1], *map(str, each[3].values())])) for each in dense()
    ],
)  # fmt: skip
def test_conformance(case: ConformanceCase, layout: str, node: int, options: dict[str, Any]) -> None:
    check(case, on_both(attend, case, layout, node, options, "cuda"), "cuda")


@pytest.mark.parametrize(
    ("case", "options"),
    [
        pytest.param(case, options, id=f"{case.id}-{max(case.shape.lengths_q)}-{options['algorithm']}")  # type: ignore[union-attr]
        for case, options in packed()
    ],
)
def test_documents(case: ConformanceCase, options: dict[str, Any]) -> None:
    check(case, on_both(documents, case, options, "cuda"), "cuda")


def calls() -> Iterator[Callable[[], object]]:
    """The calls of these tests, on tensors of a CPU, for benchmarks/precompile.py."""
    yield plan_of.cache_clear  # of another rank
    for each in dense():
        yield functools.partial(attend, *each)
    for case, options in packed():
        yield functools.partial(documents, case, options)
    yield plan_of.cache_clear
