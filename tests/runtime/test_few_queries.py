"""Attention with few queries and many keys: which calls the decode phase runs, and that their results are right."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from unittest import mock

import pytest
import torch

import tileattn
from tests.tools.conformance_call import run
from tileattn.call.facts import AttentionCall
from tileattn.call.fp8 import FP8
from tileattn.kernels.torch.decode import backend as torch_decode
from tileattn.runtime import few_queries, prepared
from tileattn.testing import ConformanceCase, assert_forward_accurate, build, expected_forward
from tileattn.testing.call_arguments import Structure
from tileattn.testing.shapes import Shape

CALL = AttentionCall(torch.bfloat16, 128, 128, "Causal()", arch="sm_90a")


@pytest.fixture
def taken() -> Iterator[mock.Mock]:
    """Called for each call that the decode phase is to run."""
    original = few_queries.FewQueries.__call__
    with mock.patch.object(few_queries.FewQueries, "__call__", autospec=True, side_effect=original) as calls:
        yield calls


def are_few(q_len: int, keys: int, heads: int = 8, kv_heads: int = 2, batch: int = 2, **facts: object) -> bool:
    call = AttentionCall(**{**vars(CALL), **facts})  # type: ignore[arg-type]
    return few_queries.are_few(call, torch.Size((batch, q_len, heads, 128)), torch.Size((batch, keys, kv_heads, 128)))


def test_shapes_decide() -> None:
    assert are_few(1, 512)
    assert are_few(16, 100_000)
    assert are_few(1, 512, 64, 1)
    assert are_few(1, 600, variant="")
    assert are_few(1, 600, packed=True)
    assert not are_few(17, 100_000)
    assert not are_few(1, 511)
    assert not are_few(1, 2**31), "more than an int32 length can say"
    assert not are_few(2, 512, 64, 1), "128 rows: more than a tile"
    assert not are_few(0, 512)
    assert not are_few(1, 512, batch=0)


@pytest.mark.parametrize("facts", [{"needs_grad": True}, {"dropout": True}, {"dtype": FP8}], ids=str)
def test_what_keeps_the_forward_kernels(facts: dict[str, object]) -> None:
    assert not are_few(1, 4096, **facts)


STRUCTURES = [
    Structure("bf16", 64, 64, "causal", (), sink=False, aligned=True),
    Structure("fp16", 128, 64, "none", ("softcap",), sink=True, aligned=True),
    Structure("fp16", 64, 64, "window", ("alibi",), sink=False, aligned=False),
    Structure("fp16", 64, 64, "causal", ("bias_bh",), sink=False, aligned=True),
    Structure("bf16", 128, 128, "documents", ("user",), sink=True, aligned=True),
]
SHAPES = [Shape(2, 4, 1, 1, 513), Shape(1, 4, 4, 3, 700), Shape(2, 16, 2, 8, 1025, layout="bhsd")]
CASES = [ConformanceCase(*each) for each in itertools.product(STRUCTURES, SHAPES)]


def _places() -> list[object]:
    if torch.cuda.is_available():
        return [
            pytest.param(name, "cuda", case, id=f"{case.id}-{name}-cuda", marks=pytest.mark.gpu)
            for case in CASES
            for name in ("tilelang", "triton")
        ]
    halves = [case for case in CASES if case.structure.dtype == "fp16"]  # bfloat16: only one query without groups
    places = [("triton", case) for case in CASES[1::5]] + [("torch", case) for case in halves]
    return [pytest.param(name, "cpu", case, id=f"{case.id}-{name}") for name, case in places]


@pytest.mark.slow_cases("fp16-d64-causal-bias_bh-b2h16kv2-q8k1025-bhsd-triton", reason="2 s in Triton's interpreter")
@pytest.mark.parametrize(("backend", "device", "case"), _places())
def test_results_are_right(backend: str, device: str, case: ConformanceCase, taken: mock.Mock) -> None:
    if backend != "torch":
        pytest.importorskip(backend)
    arguments = build(case, device)
    got = run(arguments, backend)
    assert taken.called, "the decode phase did not run the call"
    assert_forward_accurate(case.id, got, *expected_forward(arguments))


def _drawn(batch: int, q_len: int, keys: int, heads: int, kv_heads: int, dim: int = 32) -> tuple[torch.Tensor, ...]:
    draw = torch.Generator().manual_seed(0)
    q = torch.randn(batch, q_len, heads, dim, generator=draw).half()
    k, v = (torch.randn(batch, keys, kv_heads, dim, generator=draw).half() for _ in "kv")
    return q, k, v


def test_only_calls_without_gradients_and_dropout_decode(taken: mock.Mock) -> None:
    q, k, v = _drawn(2, 1, 520, 4, 2)
    expected = tileattn.attention(q, k, v, dropout_p=1e-9)
    assert not taken.called
    o = tileattn.attention(q.requires_grad_(), k, v)
    assert not taken.called
    o.sum().backward()
    assert q.grad is not None
    with torch.no_grad():
        decoded = tileattn.attention(q, k, v)
    assert taken.call_count == 1
    for got in (o, decoded):
        torch.testing.assert_close(got, expected, rtol=0, atol=2e-3)


def test_bits_are_the_same_each_time_and_with_lse(taken: mock.Mock) -> None:
    q, k, v = _drawn(3, 2, 777, 4, 2)
    o = tileattn.attention(q, k, v, causal=True)
    for return_lse in (False, True):
        again = tileattn.attention(q, k, v, causal=True, return_lse=return_lse)
        assert torch.equal(again[0] if return_lse else again, o)  # type: ignore[arg-type]
    assert taken.call_count == 3


def test_compiled(taken: mock.Mock) -> None:
    q, k, v = _drawn(2, 1, 520, 4, 2)
    with torch.no_grad():
        compiled = torch.compile(tileattn.attention, backend="aot_eager", fullgraph=True)
        o = compiled(q, k, v, sink=torch.ones(4))
        assert taken.call_count == 1
        assert torch.equal(o, tileattn.attention(q, k, v, sink=torch.ones(4)))


def test_keys_that_are_expanded_over_the_batch_take_the_forward_kernel() -> None:
    q, k, v = _drawn(3, 1, 520, 4, 2)
    k, v = k[:1], v[:1]
    with mock.patch.object(torch_decode._Decode, "__call__") as decode:
        one = tileattn.attention(q, k.expand(3, -1, -1, -1), v.expand(3, -1, -1, -1))
    assert not decode.called
    other = tileattn.attention(q, k.repeat(3, 1, 1, 1), v.repeat(3, 1, 1, 1))
    torch.testing.assert_close(one, other, rtol=0, atol=2e-3)


@pytest.mark.parametrize(
    ("dtype", "heads", "few"),
    [(torch.float32, 4, False), (torch.bfloat16, 4, False), (torch.bfloat16, 2, True), (torch.float16, 4, True)],
)
def test_pytorch_decodes_where_its_fused_attention_is_slow(
    dtype: torch.dtype, heads: int, few: bool, taken: mock.Mock
) -> None:
    q, k, v = (x.to(dtype) for x in _drawn(1, 1, 600, heads, 2))
    tileattn.attention(q, k, v, backend="torch")
    assert taken.called == few


def test_errors_are_those_of_attention() -> None:
    q, k, v = _drawn(2, 1, 520, 4, 2)
    with pytest.raises(ValueError, match="k"):
        tileattn.attention(q, k[:, :, :1].repeat(1, 1, 3, 1), v)
    with pytest.raises(NotImplementedError, match="backend='tilelang' does not run this call"):
        tileattn.attention(q, k, v, backend="tilelang")


def test_lengths_are_filled_once_for_each_prepared_call(taken: mock.Mock) -> None:
    prepared.FORWARDS.clear()
    q, k, v = _drawn(2, 1, 531, 4, 2)
    for _ in range(3):
        tileattn.attention(q, k, v, backend="torch")
    assert len({id(call.args[0]) for call in taken.call_args_list}) == 1
