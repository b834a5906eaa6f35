"""The kernel that makes the bits of mixed tiles, run on the CPU by emulate(): the mask on every pair of a tile."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("tilelang")

from tileattn import Causal, Dilated, FunctionMask, GlobalTokens, Mask, Neighborhood, SlidingWindow, Strided
from tileattn.kernels.tile_lists import Cut, Sizes, TileLists, make_lists
from tileattn.kernels.tilelang.lists import bits as bits_of_tiles
from tileattn.kernels.tilelang.lists.bits import by_function, operations
from tileattn.kernels.tilelang.lists.bits_kernel import bits_kernel
from tileattn.kernels.tilelang.lists.library import read_by_mask
from tileattn.math import load
from tileattn.testing.emulator.kernel import COMPILER, Kernel
from tileattn.variant.key import encode
from tileattn.variant.program import program

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")

CPU = torch.device("cpu")
SQUARE, WIDE, TALL = Sizes(2, 3, 150, 150), Sizes(2, 3, 90, 210), Sizes(2, 3, 210, 90)
CUTS = {
    "rows": Cut(16, 32),
    "sorted": Cut(64, 64, longest_first=True),
    "two words": Cut(32, 176, longest_first=True),
    "keys": Cut(64, 32, by_keys=True, masks_queries=True),
}
WALKS = [(SQUARE, "rows"), (WIDE, "sorted"), (TALL, "two words"), (SQUARE, "keys"), (WIDE, "keys"), (TALL, "keys")]
IDS = torch.arange(210, dtype=torch.int64) // 37
TABLE = torch.rand(2, 14, 14, generator=torch.Generator().manual_seed(0)) < 0.5


def loaded(b: Any, h: Any, q: Any, k: Any) -> Any:
    """Loads by both positions, of int64 and booleans, one nested; the batch element and the head."""
    near = load(IDS, load(IDS, q) * 30 + 20) >= load(IDS, k)
    return near & (load(TABLE, b, q // 16, k // 16) | ((q + h) % 3 == 0)) & (q - k != 7)


MASKS: dict[str, Mask] = {
    "dilated": Dilated(95, dilation=3),
    "loaded": FunctionMask(loaded),
    "strided": Strided(16, 5),
    "local-global": SlidingWindow(20, 7) | GlobalTokens(33),
    "neighborhood": Neighborhood((10, 15), (5, 7)),
    "floats": FunctionMask(lambda b, h, q, k: 0.5 * q + 3.0 > 1.0 * k),
    "causal": Causal() & FunctionMask(lambda b, h, q, k: (q ^ k) % 5 != 0),
}


@functools.cache
def kernel_of(variant: str) -> Callable[..., Any]:
    traced = program(variant)
    return Kernel(bits_kernel(traced, read_by_mask(traced)))


def made(mask: Mask, sizes: Sizes, cut: Cut) -> TileLists:
    variant, operands = encode(mask, ())
    lists = make_lists(variant, operands, sizes, cut, CPU)
    return by_function(kernel_of(variant), program(variant), operands, sizes, cut, lists)


def seen(mask: Mask, sizes: Sizes) -> Tensor:
    """The mask on every pair: (batch, heads, queries, keys)."""
    b, h = torch.arange(sizes.batch)[:, None, None, None], torch.arange(sizes.heads)[:, None, None]
    q = torch.arange(sizes.seqlen_q)[:, None] + sizes.seqlen_k - sizes.seqlen_q
    allowed = mask.allows(b, h, q, torch.arange(sizes.seqlen_k))
    return allowed.expand(sizes.batch, sizes.heads, sizes.seqlen_q, sizes.seqlen_k)


def unpacked(words: Tensor) -> Tensor:
    """The bits of one tile, (words, rows, 4), as conditions (rows, columns)."""
    count, rows, _ = words.shape
    bits = words.to(torch.int64)[..., None] >> torch.arange(32) & 1  # (words, rows, t, j)
    pairs = bits.view(count, rows, 4, 16, 2)  # column j // 2 * 8 + 2t + j % 2
    return pairs.permute(1, 0, 3, 2, 4).reshape(rows, count * 128).bool()


def check(mask: Mask, sizes: Sizes, cut: Cut) -> int:
    """Compares all tiles that have bits with the mask, in all planes; how many there are."""
    return compare(made(mask, sizes, cut), mask, sizes, cut)


def compare(lists: TileLists, mask: Mask, sizes: Sizes, cut: Cut) -> int:
    """The same of lists on the CPU."""
    every = seen(mask, sizes)
    assert lists.bits is not None
    assert lists.before is not None
    rows, columns = (cut.block_N, cut.block_M) if cut.by_keys else (cut.block_M, cut.block_N)
    lines = -(-(sizes.seqlen_k if cut.by_keys else sizes.seqlen_q) // rows)
    for b in range(sizes.batch):
        for h in range(sizes.heads):
            plane = every[b, h].T if cut.by_keys else every[b, h]
            hidden = torch.nn.functional.pad(plane, (0, 256, 0, 256))
            for i in range(lines):
                line = b * lists.batch_step + h * lists.head_step + i
                number = i if lists.rows is None else int(lists.rows[line])
                for step in range(int(lists.counts[line, 0])):
                    place, tile = int(lists.before[line]) + step, int(lists.tiles[line, step])
                    if place < len(lists.bits):
                        expected = hidden[number * rows :, tile * columns :][:rows, :columns]
                        assert torch.equal(unpacked(lists.bits[place])[:, :columns], expected), (b, h, line, step)
    return min(int(lists.counts[:, 0].sum()), len(lists.bits))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in ("dilated", "loaded"))) for name in MASKS]
)
def test_every_pair(name: str) -> None:
    for sizes, cut in WALKS:
        if name != "neighborhood" or sizes.seqlen_k == sizes.seqlen_q:
            assert check(MASKS[name], sizes, CUTS[cut]) > 0


def test_as_many_tiles_as_the_budget_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first mixed tiles have bits; nothing is written behind them, and no tile is missing where all fit."""
    mask = MASKS["dilated"]
    whole = made(mask, SQUARE, CUTS["sorted"])
    assert whole.bits is not None
    assert whole.bits.shape == (9, 1, 64, 4)  # no more than there are tiles
    monkeypatch.setattr(bits_of_tiles, "MOST_BYTES", 3 * 64 * 16)
    assert check(mask, SQUARE, CUTS["sorted"]) == 3
    few = made(mask, SQUARE, CUTS["sorted"])
    assert few.bits is not None
    assert torch.equal(few.bits, whole.bits[:3])
    for blocks in (1, 2):
        monkeypatch.setattr(bits_of_tiles, "BLOCKS", blocks)
        assert check(mask, SQUARE, CUTS["keys"]) == 6  # of half the size


def test_masks_without_mixed_tiles() -> None:
    whole = FunctionMask(lambda b, h, q, k: (q >= 0) & (k >= 0) & (q + k >= 0))
    assert operations(program(encode(whole, ())[0]).allows) > 0
    assert check(whole, Sizes(1, 1, 128, 128), CUTS["sorted"]) == 0
