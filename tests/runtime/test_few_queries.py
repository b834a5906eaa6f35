"""Attention with few queries and many keys: which calls the decode phase runs, and that their results are right."""

from __future__ import annotations

import itertools
from unittest import mock

import pytest
import torch

import tileattn
from tests.tools.conformance_call import run
from tileattn.call.facts import AttentionCall
from tileattn.call.fp8 import FP8
from tileattn.runtime import few_queries
from tileattn.testing import ConformanceCase, assert_forward_accurate, build, expected_forward
from tileattn.testing.call_arguments import Structure
from tileattn.testing.shapes import Shape

CALL = AttentionCall(torch.bfloat16, 128, 128, "Causal()", arch="sm_90a")


def are_few(q_len: int, keys: int, heads: int = 8, kv_heads: int = 2, batch: int = 2, **facts: object) -> bool:
    call = AttentionCall(**{**vars(CALL), **facts})  # type: ignore[arg-type]
    return few_queries.are_few(call, torch.Size((batch, q_len, heads, 128)), torch.Size((batch, keys, kv_heads, 128)))


def test_shapes_decide():
    assert are_few(1, 512)
    assert are_few(16, 100_000)
    assert are_few(1, 512, 64, 1)
    assert are_few(1, 600, variant="")
    assert not are_few(17, 100_000)
    assert not are_few(1, 511)
    assert not are_few(2, 512, 64, 1), "128 rows: more than a tile"
    assert not are_few(0, 512)
    assert not are_few(1, 512, batch=0)


@pytest.mark.parametrize("facts", [{"needs_grad": True}, {"dropout": True}, {"packed": True}, {"dtype": FP8}], ids=str)
def test_what_keeps_the_forward_kernels(facts: dict[str, object]) -> None:
    assert not are_few(1, 4096, **facts)


STRUCTURES = [
    Structure("bf16", 64, 64, "causal", (), sink=False, aligned=True),
    Structure("fp16", 128, 64, "none", ("softcap",), sink=True, aligned=True),
    Structure("bf16", 64, 64, "window", ("alibi",), sink=False, aligned=False),
    Structure("fp16", 64, 64, "causal", ("bias_bh",), sink=False, aligned=True),
    Structure("bf16", 128, 128, "documents", ("user",), sink=True, aligned=True),
]
SHAPES = [Shape(2, 4, 1, 1, 513), Shape(1, 4, 4, 3, 700), Shape(2, 16, 2, 8, 1025, layout="bhsd")]
CASES = [ConformanceCase(*each) for each in itertools.product(STRUCTURES, SHAPES)]


def _places() -> list[object]:
    on_cpu = [pytest.param("triton", "cpu", case, id=f"{case.id}-triton") for case in CASES[::2]]
    on_gpu = [
        pytest.param(name, "cuda", case, id=f"{case.id}-{name}-cuda", marks=pytest.mark.gpu)
        for case in CASES
        for name in ("tilelang", "triton")
    ]
    return on_gpu if torch.cuda.is_available() else on_cpu


@pytest.mark.parametrize(("backend", "device", "case"), _places())
def test_results_are_right(backend: str, device: str, case: ConformanceCase) -> None:
    pytest.importorskip("triton")
    arguments = build(case, device)
    original = few_queries.FewQueries.__call__
    with mock.patch.object(few_queries.FewQueries, "__call__", autospec=True, side_effect=original) as taken:
        got = run(arguments, backend)
    assert taken.called, "the call was not taken for one of few queries"
    assert_forward_accurate(case.id, got, *expected_forward(arguments))


def test_keys_that_are_expanded_over_the_batch_take_the_forward_kernel() -> None:
    pytest.importorskip("triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    q = torch.randn(3, 1, 4, 32, device=device, dtype=torch.float16)
    k, v = (torch.randn(1, 520, 2, 32, device=device, dtype=torch.float16) for _ in range(2))
    one = tileattn.attention(q, k.expand(3, -1, -1, -1), v.expand(3, -1, -1, -1), backend="triton")
    other = tileattn.attention(q, k.repeat(3, 1, 1, 1), v.repeat(3, 1, 1, 1), backend="triton")
    torch.testing.assert_close(one, other, rtol=0, atol=2e-3)
