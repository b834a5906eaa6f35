"""Blocks and the interval analysis on a GPU: nothing waits for the device, and a CUDA graph reads tensors again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import tileattn
from tests.variant.intervals.test_patterns import PATTERNS
from tests.variant.test_blocks import HEADS, KV_HEADS, expanded, expected, lists_of, random_blocks
from tileattn import BlockSparse, Mask
from tileattn.variant.intervals.tiles import grid, numbers, tile_kinds, traced

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
SIZES = [(128, 128), (64, 32), (1, 16)]
LONG = (1100, 1300)


@pytest.fixture
def without_waiting() -> Iterator[None]:
    """Any wait of the host for the device raises."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def drawn(seqlen_q: int, seqlen_k: int) -> tuple[Tensor, Tensor, Tensor]:
    shapes = (seqlen_q, HEADS), (seqlen_k, KV_HEADS), (seqlen_k, KV_HEADS)
    q, k, v = (torch.randn(2, *shape, 64, device=DEVICE, dtype=torch.bfloat16) for shape in shapes)
    return q, k, v


# Short calls walk over ranges; TileLang's kernels take the tiles of long ones from lists.
@pytest.mark.parametrize(
    ("backend", "lengths"),
    [(backend, lengths) for backend in ("tilelang", "triton") for lengths in ((300, 300), (100, 400), (400, 100))]
    + [("tilelang", LONG)],
)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("heads", [1, KV_HEADS, HEADS])
def test_both_passes(backend: str, size: tuple[int, int], heads: int, lengths: tuple[int, int]) -> None:
    q, k, v = (x.requires_grad_() for x in drawn(*lengths))
    blocks = random_blocks(7, size, *lengths, heads)
    o = tileattn.attention(q, k, v, mask=BlockSparse(blocks.cuda(), size), backend=backend)
    of_doubles = [x.detach().double().cpu().requires_grad_() for x in (q, k, v)]
    o_expected, _ = expected(*of_doubles, expanded(blocks, size, *lengths, 2))  # type: ignore[call-arg, arg-type]
    torch.testing.assert_close(o.double().cpu(), o_expected, atol=2e-2, rtol=2e-2)
    do = torch.randn_like(o)
    gradients = torch.autograd.grad(o, (q, k, v), do)
    for got, wanted in zip(gradients, torch.autograd.grad(o_expected, of_doubles, do.double().cpu())):
        torch.testing.assert_close(got.double().cpu(), wanted, atol=6e-2, rtol=4e-2)


@pytest.mark.parametrize("kind", ["bools", "lists"])
def test_a_graph_reads_blocks_again(kind: str) -> None:
    q, k, v = drawn(256, 256)
    blocks = [random_blocks(seed, (64, 32), 256, 256, HEADS).cuda() for seed in (1, 2, 4)]
    tensors = blocks if kind == "bools" else [lists_of(x.cpu(), 0, False)[0].cuda() for x in blocks]
    held = tensors[0].clone()

    def call() -> Any:
        return tileattn.attention(q, k, v, mask=BlockSparse(held, (64, 32)), causal=True)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = call()
    for tensor in tensors[1:]:
        held.copy_(tensor)
        graph.replay()
        assert torch.equal(o, call())


@pytest.mark.usefixtures("without_waiting")
@pytest.mark.parametrize("kind", ["bools", "lists"])
def test_a_call_waits_for_nothing(kind: str) -> None:
    torch.cuda.set_sync_debug_mode("default")
    q, k, v = drawn(256, 256)
    blocks = random_blocks(1, (64, 32), 256, 256, HEADS)
    tensor = (blocks if kind == "bools" else lists_of(blocks, 0, False)[0]).cuda()
    mask = BlockSparse(tensor, (64, 32))
    tileattn.attention(q, k, v, mask=mask)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    tileattn.attention(q, k, v, mask=mask)


def test_numbers_out_of_range_are_told_later() -> None:
    tileattn.check_blocks()
    q, k, v = drawn(256, 256)
    lists = torch.zeros(2, 1, 4, 2, dtype=torch.int32, device="cuda")
    right = tileattn.attention(q, k, v, mask=BlockSparse(lists, (64, 32)))
    lists[1, 0, 3, 0] = 8
    assert torch.equal(tileattn.attention(q, k, v, mask=BlockSparse(lists, (64, 32))), right)
    with pytest.raises(ValueError, match=r"BlockSparse: blocks must hold numbers .* wrong at sequence 1"):
        tileattn.check_blocks()
    tileattn.check_blocks()


def calls() -> Iterator[Callable[[], Any]]:
    """All calls whose kernels these tests need of TileLang, for benchmarks/precompile.py; with gradients."""

    def attend(lengths: tuple[int, int], size: tuple[int, int], heads: int, **options: Any) -> Any:
        q, k, v = (x.requires_grad_() for x in drawn(*lengths))
        mask = BlockSparse(random_blocks(7, size, *lengths, heads).to(DEVICE), size)
        o = tileattn.attention(q, k, v, mask=mask, backend="tilelang", **options)
        return torch.autograd.grad(o, (q, k, v), torch.empty_like(o))

    for size in SIZES:
        for heads in (1, KV_HEADS, HEADS):
            yield from (partial(attend, lengths, size, heads) for lengths in ((300, 300), LONG))
    yield partial(attend, (256, 256), (64, 32), HEADS, causal=True)


# --- The interval analysis ---


def on_gpu(mask: Mask) -> tuple[Any, dict[str, Any]]:
    allows, values = traced(mask)
    return allows, {name: x.cuda() if isinstance(x, Tensor) else x for name, x in values.items()}


@pytest.mark.parametrize("name", PATTERNS)
def test_kinds_are_those_of_a_cpu_and_wait_for_nothing(name: str, without_waiting: None) -> None:
    torch.cuda.set_sync_debug_mode("default")
    allows, values = on_gpu(PATTERNS[name])
    torch.cuda.set_sync_debug_mode("error")
    found = tile_kinds(allows, values, *grid(4096, 4096, 128, 128, "cuda"), 0, numbers(4, 3, "cuda"))
    torch.cuda.set_sync_debug_mode("default")
    on_cpu = tile_kinds(*traced(PATTERNS[name]), *grid(4096, 4096, 128, 128), 0, numbers(4, 3))
    assert torch.equal(found.cpu(), on_cpu)


def test_a_graph_of_the_analysis_reads_tables_again() -> None:
    ids = torch.zeros(4096, dtype=torch.int64, device="cuda")
    mask: Callable[..., Any] = lambda b, h, q, k: ids[q] == ids[k]  # noqa: E731
    allows, values = traced(tileattn.FunctionMask(mask))
    positions = grid(4096, 4096, 128, 128, "cuda")
    tile_kinds(allows, values, *positions)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kinds = tile_kinds(allows, values, *positions)
    for size in (700, 128, 5000):
        ids.copy_(torch.arange(4096, device="cuda") // size)
        graph.replay()
        assert torch.equal(kinds, tile_kinds(allows, values, *positions))
