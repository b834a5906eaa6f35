"""Conformance cases on the ranks of a gloo group, by the tolerance rule of one device.

Each rank holds its shards alone, in memory that is NaN around them, and all new memory is NaN: what a rank reads
without having received it shows. Outputs of all ranks are put together by their tokens.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parallel.ranks_conformance import attend
from tests.tools.ranks.pools import pool, returned
from tileattn.testing import (
    ConformanceCase,
    assert_forward_accurate,
    assert_gradients_accurate,
    build,
    conformance_cases,
    expected_forward,
    expected_gradients,
    output_gradients,
)

RANKS = (1, 2, 4, 8)
WAYS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("zigzag", {"algorithm": "gather"}),
    ("zigzag", {"algorithm": "gather", "head_groups": 2}),
    ("contiguous", {"algorithm": "gather"}),
    ("zigzag", {"algorithm": "ulysses"}),
    ("contiguous", {"algorithm": "2d"}),
    ("zigzag", {"algorithm": "ring"}),
    ("contiguous", {"algorithm": "ring"}),
    ("zigzag", {"algorithm": "2d"}),
    ("contiguous", {"algorithm": "ulysses"}),
    ("zigzag", {"algorithm": "auto"}),
)
MOST_SCORES = 2**20  # with more, a case takes many seconds on a CPU
MANY_SCORES = 2**15  # with more, it takes some


def cases() -> list[ConformanceCase]:
    """Self-attention of all structures; lengths 1 to 257, many of which divide by no number of ranks."""
    quick = [case for case in conformance_cases("quick") if case.shape.seqlen_q == case.shape.seqlen_k]
    return [case for case in quick if case.structure.dtype != "fp8" and case.shape.seqlen_q**2 < MOST_SCORES]


def _parameters() -> list[Any]:
    """Every case on some number of ranks, by one of the ways; all come in turn. A tenth is not slow."""
    parameters = []
    for number, case in enumerate(cases()):
        ranks = RANKS[number % 4]
        # 4 and 10 are not coprime: the quotient moves the ways along.
        layout, options = WAYS[(number + number // 20) % len(WAYS)]
        if options.get("head_groups", 1) > case.shape.kv_heads:
            options = {"algorithm": "gather"}
        name = "-".join([case.id, str(ranks), layout, *map(str, options.values())])
        drawn = number % 10 == number // 10 % 10 and case.shape.seqlen_q**2 < MANY_SCORES
        marks = [] if drawn else [pytest.mark.slow]
        parameters.append(pytest.param(case, ranks, layout, options, id=name, marks=marks))
    return parameters


def together(results: list[dict[str, Any]], name: str, dim: int) -> Tensor:
    """The whole tensor from the shards of all ranks; each row comes from exactly one."""
    tokens = torch.cat([result["tokens"] for result in results])
    assert sorted(tokens.tolist()) == list(range(len(tokens)))
    parts = [result["gradients"][name] if name.startswith("d") else result[name] for result in results]
    shards = torch.cat(parts, dim)
    return torch.empty_like(shards).index_copy_(dim, tokens, shards)


def check(case: ConformanceCase, results: list[dict[str, Any]], device: str = "cpu") -> None:
    """Outputs and gradients of all ranks together are right by the rule; gradients of whole tensors are equal."""
    arguments = build(case, device)
    got = together(results, "o", 1).to(device), together(results, "lse", 2).to(device)
    assert_forward_accurate(case.id, got, *expected_forward(arguments))
    arguments = build(case, device)
    do, dlse = output_gradients(case, arguments)
    gradients = {name: together(results, name, 1) for name in ("dq", "dk", "dv")}
    for name in arguments.leaves():
        if name not in gradients:
            first, *others = [result["gradients"][name] for result in results]
            assert all(torch.equal(first, other) for other in others), f"{name} differs between ranks"
            gradients[name] = first
    gradients = {name: gradients[name].to(device) for name in arguments.leaves()}
    assert_gradients_accurate(case.id, gradients, *expected_gradients(arguments, do, dlse), case.dtype)


@pytest.mark.slow_cases("fp16-d40-none-b2h4kv2-q111k111-packed-8-zigzag-2d", reason="eight ranks, 4 s")
@pytest.mark.parametrize(("case", "ranks", "layout", "options"), _parameters())
def test_conformance(case: ConformanceCase, ranks: int, layout: str, options: dict[str, Any]) -> None:
    check(case, returned(pool(ranks).run(attend, case, layout, max(1, ranks // 2), options)))
