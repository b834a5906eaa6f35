"""Attention with few queries on a GPU: which kernel ran, by its backend; packed calls; CUDA graphs and streams."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch
from torch import Tensor

import tileattn
from tests.runtime.test_few_queries import CASES
from tests.tools.conformance_call import run
from tileattn import SlidingWindow, SoftCap
from tileattn.runtime import prepared
from tileattn.testing import ConformanceCase, assert_forward_accurate, build, expected_forward, poisoned_memory
from tileattn.testing.call_arguments import Structure
from tileattn.testing.shapes import PackedShape, Shape

pytestmark = pytest.mark.gpu

BACKENDS = ["tilelang", "triton"]


@pytest.fixture
def decoded() -> Iterator[dict[str, mock.Mock]]:
    """The calls of each backend's decode kernels."""
    from tileattn.kernels.tilelang.decode.launch import Decoding
    from tileattn.kernels.triton.decode.launch import Decode

    def counting(phase: type) -> mock._patch:
        return mock.patch.object(phase, "__call__", autospec=True, side_effect=phase.__call__)

    with counting(Decoding) as tilelang, counting(Decode) as triton:
        yield {"tilelang": tilelang, "triton": triton}


# The rows of SDPA's table of decoding calls, with fewer keys: (batch, keys, heads, kv heads, head dim, queries).
ROWS = [
    (1, 1025, 32, 8, 128, 1),
    (1, 4100, 32, 8, 128, 1),
    (16, 513, 32, 8, 128, 1),
    (5, 600, 64, 8, 128, 1),
    (3, 513, 32, 32, 128, 1),
    (2, 777, 64, 4, 128, 1),
    (3, 1025, 32, 8, 128, 4),
    (2, 641, 8, 1, 256, 1),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_decode_kernels_run_few_queries(row: tuple[int, ...], backend: str, decoded: dict[str, mock.Mock]) -> None:
    dim = row[4]
    for mask in ("none", "causal"):
        structure = Structure("bf16", dim, dim, mask, (), sink=False, aligned=True)
        case = ConformanceCase(structure, shape_of(row))
        arguments = build(case, "cuda")
        with poisoned_memory():
            got = run(arguments, backend)
        assert_forward_accurate(case.id, got, *expected_forward(arguments))
    assert decoded[backend].call_count == 2
    assert sum(calls.call_count for calls in decoded.values()) == 2


def calls() -> Iterator[Callable[[], object]]:
    """The calls of these tests and of test_few_queries.py on tensors of "meta", for benchmarks/precompile.py."""
    rows = [
        ConformanceCase(Structure("bf16", row[4], row[4], mask, (), sink=False, aligned=True), shape_of(row))
        for row in ROWS
        for mask in ("none", "causal")
    ]
    packed = [ConformanceCase(structure, PACKED[0]) for structure in STRUCTURES]
    for case in (*rows, *packed, *CASES):
        yield functools.partial(run, build(case, "meta"), "tilelang")
    q, k, v = (torch.empty(2, n, h, 64, dtype=torch.bfloat16, device="meta") for n, h in ((1, 8), (600, 2), (600, 2)))
    yield lambda: tileattn.attention(q, k, v)
    ends = torch.empty(3, dtype=torch.int32, device="meta")
    mod = SoftCap(10.0)
    for options in ({}, {"mask": SlidingWindow(600, 0), "score_mod": mod}):
        yield functools.partial(tileattn.varlen_attention, q[0], k[0], v[0], ends, ends, 1, 900, **options)  # type: ignore[arg-type]
        yield functools.partial(tileattn.attention, q, k, v, **options)  # type: ignore[arg-type]


def shape_of(row: tuple[int, ...]) -> Shape:
    batch, keys, heads, kv_heads, _, queries = row
    return Shape(batch, heads, kv_heads, queries, keys)


def drawn(batch: int, q_len: int, keys: int, heads: int, kv_heads: int, dim: int = 64) -> tuple[Tensor, ...]:
    draw = torch.Generator("cuda").manual_seed(0)
    q = torch.randn(batch, q_len, heads, dim, generator=draw, device="cuda").bfloat16()
    k, v = (torch.randn(batch, keys, kv_heads, dim, generator=draw, device="cuda").bfloat16() for _ in "kv")
    return q, k, v


@pytest.mark.parametrize("backend", BACKENDS)
def test_forward_kernels_keep_the_rest(backend: str, decoded: dict[str, mock.Mock]) -> None:
    q, k, v = drawn(2, 1, 600, 8, 2)
    tileattn.attention(q, k[:, :511], v[:, :511], backend=backend)
    tileattn.attention(q.requires_grad_(), k, v, backend=backend).sum().backward()
    tileattn.attention(*drawn(1, 17, 600, 8, 2), causal=True, backend=backend)
    assert not any(calls.called for calls in decoded.values())


def test_a_graph_outlives_the_prepared_call(decoded: dict[str, mock.Mock]) -> None:
    q, k, v = drawn(2, 1, 1025, 8, 2)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        expected = tileattn.attention(q, k, v)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = tileattn.attention(q, k, v)
    prepared.FORWARDS.clear()
    tileattn.runtime.dispatch._prepare.cache_clear()
    gc.collect()
    rest = [torch.full((256,), -1, dtype=torch.int32, device="cuda") for _ in range(64)]
    o.fill_(torch.nan)
    graph.replay()
    assert torch.equal(o, expected)
    assert decoded["tilelang"].call_count == 2
    del rest


STRUCTURES = [
    Structure("bf16", 128, 128, "causal", (), sink=False, aligned=True),
    Structure("fp16", 64, 64, "none", ("softcap",), sink=True, aligned=True),
    Structure("bf16", 64, 64, "window", ("alibi_b",), sink=False, aligned=True),
    Structure("bf16", 64, 64, "documents", ("bias_bh",), sink=False, aligned=True),
    Structure("bf16", 40, 40, "causal", (), sink=False, aligned=False),
    Structure("fp16", 192, 128, "causal", (), sink=True, aligned=True),
]
PACKED = [
    PackedShape("steps", 8, 2, (1,) * 7, (1025, 1, 64, 65, 0, 600, 129), behind=3),
    PackedShape("drafts", 4, 4, (5, 0, 16, 1, 3), (700, 40, 63, 513, 2), behind=5, slack=(0, 9), layout="island"),
    PackedShape("one", 32, 4, (1,), (4100,), slack=(1, 100)),
]


@pytest.mark.parametrize("shape", PACKED, ids=lambda shape: shape.label)
@pytest.mark.parametrize("structure", STRUCTURES, ids=lambda structure: structure.name)
def test_packed_calls(structure: Structure, shape: PackedShape, decoded: dict[str, mock.Mock]) -> None:
    case = ConformanceCase(structure, shape)
    arguments = build(case, "cuda")
    with poisoned_memory():
        got = run(arguments, "tilelang")
    assert decoded["tilelang"].call_count == 1
    assert_forward_accurate(case.id, got, *expected_forward(arguments))
    tileattn.check_packed()
    tileattn.check_caches()


def test_packed_calls_of_other_sizes_share_a_kernel(decoded: dict[str, mock.Mock]) -> None:
    """And with other numbers of rows a prepared call."""
    for rest in (0, 3, 0):
        for lengths in ([513, 7], [4, 900]):
            q, k, v = (x[0] for x in drawn(1, 2 + rest, sum(lengths) + rest, 8, 2))
            ends = torch.tensor([0, lengths[0], sum(lengths)], dtype=torch.int32, device="cuda")
            starts = torch.tensor([0, 1, 2], dtype=torch.int32, device="cuda")
            mod = SoftCap(10.0)
            with poisoned_memory():
                o = tileattn.varlen_attention(q, k, v, starts, ends, 1, 900, mask=SlidingWindow(600, 0), score_mod=mod)
            for i, (lo, hi) in enumerate(((0, lengths[0]), (lengths[0], sum(lengths)))):
                one = tileattn.attention(
                    q[None, i : i + 1], k[None, lo:hi], v[None, lo:hi], mask=SlidingWindow(600, 0), score_mod=mod
                )
                torch.testing.assert_close(o[i : i + 1], one[0], rtol=1e-2, atol=1e-2)
            assert (o[2:] == 0).all()
    assert decoded["tilelang"].call_count >= 6


@pytest.mark.parametrize(
    ("ends", "text"),
    [
        ([0, 600, 599], "cu_seqlens_k must start at 0"),
        ([0, 600, 1210], "cu_seqlens_k must start at 0"),
        ([0, 20, 1200], "max_seqlen_k must be at least the longest length"),
    ],
)
def test_wrong_lengths_are_errors_of_packed_calls(ends: list[int], text: str, decoded: dict[str, mock.Mock]) -> None:
    q, k, v = (x[0] for x in drawn(1, 2, 1200, 8, 2))
    starts = torch.tensor([0, 1, 2], dtype=torch.int32, device="cuda")
    o = tileattn.varlen_attention(q, k, v, starts, torch.tensor(ends, dtype=torch.int32, device="cuda"), 1, 1000)
    assert decoded["tilelang"].call_count == 1
    assert (o == 0).all()
    with pytest.raises(ValueError, match=text):
        tileattn.check_packed()
    tileattn.check_caches()
