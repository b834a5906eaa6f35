"""Lists by the kernel on a GPU beside those by PyTorch's operations: ``pytest -m gpu tests/kernels/tilelang/lists``.

Equal bits for every mask, direction and size, and in a CUDA graph whose tensors are written between two replays.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tileattn import BlockSparse, Causal, FunctionMask, Mask, SlidingWindow
from tileattn.bench.sparse_masks import NAMES, pattern
from tileattn.kernels.tile_lists import Cut, Sizes, TileLists, make_lists
from tileattn.kernels.tilelang.lists import launch
from tileattn.kernels.tilelang.lists.analysis import analysis
from tileattn.math import load
from tileattn.variant.key import encode
from tileattn.variant.sparse.blocks import CallSizes

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
LONG, ODD, HEADS = 131072, 10007, 3
CUTS = {
    "forward": Cut(128, 128, longest_first=True),
    "cluster": Cut(256, 176, longest_first=True),
    "keys": Cut(64, 128, by_keys=True, masks_queries=True),
    "queries": Cut(128, 96, masks_queries=True),
}


def by_both_ways(mask: Mask, sizes: Sizes, cut: Cut) -> tuple[TileLists, TileLists]:
    variant, operands = encode(mask, ())
    with mock.patch.object(launch, "make_lists", side_effect=AssertionError("PyTorch made the lists")):
        by_kernel = launch.make(variant, operands, sizes, cut, DEVICE)
    return by_kernel, make_lists(variant, operands, sizes, cut, DEVICE)


def assert_equal(got: TileLists, expected: TileLists) -> None:
    assert got[2:4] == expected[2:4]
    for one, other in zip((*got[:2], got.rows), (*expected[:2], expected.rows), strict=True):
        assert (one is None) == (other is None)
        if other is not None:
            assert isinstance(one, Tensor)
            assert one.dtype == other.dtype
            assert torch.equal(one, other)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", NAMES)
def test_patterns(name: str, cut: str) -> None:
    for length in (LONG, ODD):
        mask = pattern(name, length, HEADS, DEVICE).mask
        assert_equal(*by_both_ways(mask, Sizes(2, HEADS, length, length), CUTS[cut]))


def masks() -> dict[str, Mask]:
    limits = torch.tensor([9000, 3000], dtype=torch.int32, device=DEVICE)
    widths = torch.tensor([64, 700, 5000], dtype=torch.int16, device=DEVICE)
    ends = torch.randint(ODD, (2, ODD), device=DEVICE).sort().values
    inner = torch.arange(ODD, device=DEVICE) // 300
    outer = torch.randint(40, (40,), device=DEVICE, dtype=torch.uint8)
    flags = torch.rand(HEADS, ODD, device=DEVICE) < 0.99
    return {
        "by-batch": FunctionMask(lambda b, h, q, k: (k < load(limits, b)) & (abs(q - k) < 200)),
        "by-both": FunctionMask(lambda b, h, q, k: (k < load(limits, b)) & (q - k < load(widths, h)) & (k <= q)),
        "a table of positions by batch element": FunctionMask(lambda b, h, q, k: k < load(ends, b, q)),
        "a table of a table": FunctionMask(lambda b, h, q, k: load(outer, load(inner, k)) <= load(inner, q)),
        "conditions in a table": FunctionMask(lambda b, h, q, k: load(flags, h, k) & (k <= q)),
        "bits": FunctionMask(lambda b, h, q, k: ((q // 128) & (k // 128)) == (k // 128)),
        "nothing": FunctionMask(lambda b, h, q, k: (k > q) & (k < q)),
        "everything": FunctionMask(lambda b, h, q, k: k >= 0),
        "ranges and a function": SlidingWindow(1000, 20) & FunctionMask(lambda b, h, q, k: (q + k) % 3 != 0),
    }


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(
    "name",
    [
        "by-batch", "by-both", "a table of positions by batch element", "a table of a table", "conditions in a table",
        "bits", "nothing", "everything", "ranges and a function",
    ],
)  # fmt: skip
def test_masks(name: str, cut: str) -> None:
    for seqlen_q, seqlen_k in ((ODD, ODD), (1000, ODD), (ODD, 2500), (1, ODD)):
        assert_equal(*by_both_ways(masks()[name], Sizes(2, HEADS, seqlen_q, seqlen_k), CUTS[cut]))


@pytest.mark.parametrize(("block_q", "block_k"), [(128, 128), (64, 64), (1, 64), (64, 16)])
def test_blocks(block_q: int, block_k: int) -> None:
    """Of blocks that are few in the largest tile; of smaller ones by PyTorch."""
    blocks = torch.rand(1, 2, -(-3000 // block_q), -(-5000 // block_k), device=DEVICE) < 0.1
    mask = BlockSparse(blocks, (block_q, block_k)).in_call(CallSizes(1, 4, 2, 3000, 5000, 2000))
    variant, operands = encode(mask, ())
    assert (analysis(variant) is not None) == (block_k == block_q)
    for cut in CUTS.values():
        sizes = Sizes(1, 4, 3000, 5000)
        expected = make_lists(variant, operands, sizes, cut, DEVICE)
        assert_equal(launch.make(variant, operands, sizes, cut, DEVICE), expected)


def test_many_planes() -> None:
    mask = pattern("windows-by-head", 65536, 64, DEVICE).mask
    for cut in CUTS.values():
        assert_equal(*by_both_ways(mask, Sizes(1, 64, 65536, 65536), cut))


def test_floats_are_left_to_pytorch() -> None:
    mask = FunctionMask(lambda b, h, q, k: 0.5 * q > k)
    variant, operands = encode(mask, ())
    assert analysis(variant) is None
    sizes = Sizes(1, 1, ODD, ODD)
    for cut in CUTS.values():
        assert_equal(
            launch.make(variant, operands, sizes, cut, DEVICE), make_lists(variant, operands, sizes, cut, DEVICE)
        )


@pytest.mark.parametrize("cut", CUTS)
def test_a_replay_reads_tables_again(cut: str) -> None:
    """A wide load, one by head, and one that a tile reads."""
    ids = torch.arange(ODD, device=DEVICE, dtype=torch.int32) // 500
    widths = torch.tensor([64, 700, 5000], dtype=torch.int32, device=DEVICE)
    blocks = torch.ones(79, 79, dtype=torch.bool, device=DEVICE)
    mask = Causal() & FunctionMask(
        lambda b, h, q, k: (load(ids, q) == load(ids, k)) & (q - k < load(widths, h)) & load(blocks, q // 128, k // 128)
    )
    variant, operands = encode(mask, ())
    sizes = Sizes(1, HEADS, ODD, ODD)
    assert_equal(*by_both_ways(mask, sizes, CUTS[cut]))  # compiles and loads
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        lists = launch.make(variant, operands, sizes, CUTS[cut], DEVICE)
    writes: list[Any] = [
        lambda: ids.zero_(),
        lambda: widths.copy_(torch.tensor([5000, 64, 0], dtype=torch.int32)),
        lambda: blocks.copy_(torch.rand(79, 79, device=DEVICE) < 0.3),
        lambda: ids.copy_(torch.arange(ODD, device=DEVICE) // 100),
    ]
    for write in writes:
        write()
        for _ in range(2):
            lists.tiles.fill_(-1)
            lists.counts.fill_(-1)
            graph.replay()
            assert_equal(lists, make_lists(variant, operands, sizes, CUTS[cut], DEVICE))
