"""append_kv on a GPU, by all backends: ``pytest -m gpu``."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tools.append_cases import CASES, FLOAT64, AppendCase, Built, check, inputs_of
from tileattn import append_kv, check_caches
from tileattn.call.appending import make_append_call
from tileattn.kernels.tilelang.append.job import AppendJob
from tileattn.kernels.tilelang.append.library import append_function
from tileattn.kernels.tilelang.build.batch import CORES, compile_all
from tileattn.testing import poisoned_memory

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
BACKENDS = ("tilelang", "triton", "torch")
BY_ID = {case.id: case for case in CASES}
PACKED, PAGED = BY_ID["packed"], BY_ID["halves-pages"]


@pytest.fixture(autouse=True)
def no_error_is_left() -> Iterator[None]:
    check_caches()
    yield
    check_caches()


def append(built: Built, **more: Any) -> Tensor | None:
    places, options = built.arguments
    return append_kv(*places, **options, **more)


@pytest.fixture(scope="module", autouse=True)
def compiled_ahead() -> None:
    """All kernels of the cases, in parallel: each takes some seconds."""
    jobs = {AppendJob(make_append_call(*inputs_of(Built(case, DEVICE)))) for case in CASES}
    assert [done.error for done in compile_all(list(jobs), CORES) if done.error] == []


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_case(case: AppendCase, backend: str) -> None:
    built = Built(case, DEVICE)
    with poisoned_memory():
        rotated = append(built, backend=backend)
    check(built, rotated)


def test_float64_runs_without_being_named() -> None:
    built = Built(FLOAT64, DEVICE)
    check(built, append(built))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", [PACKED, PAGED], ids=["packed", "paged"])
def test_no_synchronisation(case: AppendCase, backend: str) -> None:
    built = Built(case, DEVICE)
    append(built, backend=backend)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            rotated = append(built, backend=backend)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    check(built, rotated)


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_graph_serves_all_lengths(backend: str) -> None:
    """Captured at length 1; lengths, pages and new rows change before each replay."""
    case = BY_ID["partial"]
    first, others = Built(case, DEVICE), [Built(case, DEVICE, seed) for seed in (1, 2)]
    places, options = first.arguments
    lengths = first.seqlens_k.clone()
    first.seqlens_k.fill_(1)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    first.k_cache.fill_(torch.nan)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        append_kv(*places, **options, backend=backend)
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        rotated = append_kv(*places, **options, backend=backend)
    first.seqlens_k.copy_(lengths)
    for other in others:
        for name in ("k", "v", "q", "seqlens_k", "cos", "sin"):
            getattr(first, name).copy_(getattr(other, name))
        assert first.table is not None
        assert other.table is not None
        first.table.copy_(other.table)
        first.k_cache.fill_(torch.nan)
        first.v_cache.fill_(torch.nan)
        graph.replay()
        check(first, rotated)


WRONG: dict[str, tuple[Callable[[Built], Any], str]] = {
    "too long": (lambda built: built.seqlens_k[3:].fill_(2**31 - 1), "seqlens_k must be from 0 .* sequence 3"),
    "negative": (lambda built: built.seqlens_k[1:2].fill_(-(2**31)), "seqlens_k must be from 0 .* sequence 1"),
    "page": (lambda built: built.table[1].fill_(-(2**31)), "page_table's entries .* sequence 1"),
    "page beyond": (lambda built: built.table[1].fill_(2**31 - 1), "page_table's entries .* sequence 1"),
    "start": (lambda built: built.cu_seqlens_q[:1].fill_(-7), "cu_seqlens_q must start at 0, .* sequence 0"),
    "total": (lambda built: built.cu_seqlens_q[4:].fill_(10**9), "cu_seqlens_q must start at 0, .* sequence 3"),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", WRONG)
def test_wrong_values_are_reported_later(name: str, backend: str) -> None:
    """By a later call, or by check_caches; memory around the caches stays."""
    change, says = WRONG[name]
    built = Built(PACKED, DEVICE)
    around = torch.full((3, *built.k_cache.shape), torch.nan, dtype=built.case.dtype, device=DEVICE)
    built.k_cache = around[1]
    change(built)
    append(built, backend=backend)
    with pytest.raises(ValueError, match=says):
        check_caches()
    assert around[::2].isnan().all()
    append(built, backend=backend)
    torch.cuda.synchronize()
    with pytest.raises(ValueError, match=says):
        append_until_it_raises(backend)
    # The calls meanwhile were right.


def append_until_it_raises(backend: str) -> None:
    """Copies of the status begin at least a millisecond apart."""
    for _ in range(20):
        append(Built(BY_ID["plain"], DEVICE), backend=backend)
        torch.cuda.synchronize()
        time.sleep(2e-3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_addresses_beyond_2_to_the_31(backend: str) -> None:
    """Elements of one cache, and of its pages; K and V are views of one buffer of 9 GiB."""
    pages, page, heads, dim = 1200, 1024, 8, 256
    buffer = torch.empty(pages, 2, page, heads, dim, dtype=torch.bfloat16, device=DEVICE)
    assert buffer[:, 0].stride(0) * (pages - 1) > 2**32
    k = torch.randn(2, 1, heads, dim, device=DEVICE).bfloat16()
    table = torch.tensor([[0, pages - 1], [1, pages // 2]], dtype=torch.int32, device=DEVICE)
    lengths = torch.tensor([2 * page, 2 * page - 3], dtype=torch.int32, device=DEVICE)
    append_kv(k, -k, buffer[:, 0], buffer[:, 1], lengths, page_table=table, backend=backend)
    for b, (row, token) in enumerate(((pages - 1, page - 1), (pages // 2, page - 4))):
        assert torch.equal(buffer[row, 0, token], k[b, 0])
        assert torch.equal(buffer[row, 1, token], -k[b, 0])


def test_many_rows() -> None:
    """More than 65535 rows of k: a long prefill."""
    total, page = 70001, 16
    k = torch.randn(total, 2, 64, device=DEVICE).bfloat16()
    pages = -(-total // page)
    k_cache, v_cache = (torch.full((pages, page, 2, 64), torch.nan, device=DEVICE).bfloat16() for _ in range(2))
    table = torch.randperm(pages, device=DEVICE).int()[None]
    bounds, lengths = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ((0, total), (total,)))
    for backend in BACKENDS:
        k_cache.fill_(torch.nan)
        append_kv(k, -k, k_cache, v_cache, lengths, page_table=table, cu_seqlens_q=bounds, backend=backend)
        assert torch.equal(k_cache[table[0].long()].flatten(0, 1)[:total], k)
        assert torch.equal(v_cache[table[0].long()].flatten(0, 1)[:total], -k)
        assert k_cache[table[0].long()].flatten(0, 1)[total:].isnan().all()


def test_compiled() -> None:
    """In one graph with what comes before and after; the caches are not copied."""
    torch._dynamo.reset()
    built = Built(PAGED, DEVICE)
    places, options = built.arguments

    def step(places: tuple[Tensor, ...], options: dict[str, Any]) -> Tensor | None:
        k, v, *rest = places
        return append_kv(k * 1, v * 1, *rest, **options)

    check(built, torch.compile(step, fullgraph=True)(places, options))
    torch._dynamo.reset()


def test_no_compilation_for_new_sizes() -> None:
    case = BY_ID["partial"]
    append(Built(case, DEVICE), backend="tilelang")
    known = append_function.cache_info().misses
    for seqlens, heads, page in itertools.product(((1,), (300, 2, 9)), (2, 6), (1, 16)):
        other = AppendCase("other", seqlens, 1, case.dtype, 2 * heads, heads, case.head_dim, None, 32, False, page=page)
        built = Built(other, DEVICE)
        check(built, append(built, backend="tilelang"))
    assert append_function.cache_info().misses == known
