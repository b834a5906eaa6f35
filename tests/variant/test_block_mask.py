"""block_mask beside an evaluation of all pairs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tileattn
from tests.tools.tile_counts import exact_kinds
from tileattn import BlockSparse, Causal, FunctionMask, Mask, SlidingWindow
from tileattn.variant.intervals.tiles import Kind, grid, numbers, tile_kinds, traced
from tileattn.variant.sparse import known_blocks
from tileattn.variant.sparse.known_blocks import KnownBlocks

BATCH, HEADS = 2, 3
TABLE = torch.randperm(150, generator=torch.Generator().manual_seed(0)) // 30
BITS = torch.rand(HEADS, 150, generator=torch.Generator().manual_seed(1)) < 0.95
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "bits": lambda b, h, q, k: ((q ^ k) & 96) == 0,
    "gathers": lambda b, h, q, k: TABLE[TABLE[k] * 7] == TABLE[TABLE[TABLE[k]]],
    "by head": lambda b, h, q, k: BITS[h, k] & (k // 40 != h),
    "by batch element": lambda b, h, q, k: (k * k + b) % (64 + q - q) < 60,
    "all": lambda b, h, q, k: q == q,
    "none": lambda b, h, q, k: ((q ^ k) & 1) == 2,
}


def matrix(fn: Callable[..., Any], seqlen_q: int, seqlen_k: int) -> Tensor:
    b, h = torch.arange(BATCH)[:, None, None, None], torch.arange(HEADS)[:, None, None]
    q, k = torch.arange(seqlen_k - seqlen_q, seqlen_k)[:, None], torch.arange(seqlen_k)
    return torch.as_tensor(fn(b, h, q, k)).expand(BATCH, HEADS, seqlen_q, seqlen_k)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("lengths", [(150, 150), (70, 140), (140, 70)])
@pytest.mark.parametrize("most", [known_blocks.MOST_PAIRS, 3000])
def test_kinds_are_exact(name: str, lengths: tuple[int, int], most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_blocks, "MOST_PAIRS", most)
    seen = matrix(FUNCTIONS[name], *lengths)
    mask = tileattn.block_mask(FUNCTIONS[name], BATCH, HEADS, *lengths, block_size=(24, 32))
    assert isinstance(mask, KnownBlocks)
    assert mask.kinds.blocks.shape[:2] == (2 if "batch" in name else 1, 3 if name == "by head" else 1)
    q, k = grid(*lengths, 24, 32)
    rows = tuple(end - (lengths[1] - lengths[0]) for end in q[:2])
    found = tile_kinds(*traced(mask), q, k, numbers(BATCH, 4), numbers(HEADS, 3)).expand(BATCH, HEADS, -1, -1)
    for b in range(BATCH):
        for h in range(HEADS):
            assert torch.equal(found[b, h], exact_kinds(seen[b, h], rows, k[:2]))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_attention_is_that_of_the_mask(name: str) -> None:
    random = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(BATCH, length, HEADS, 16, dtype=torch.float64, generator=random).requires_grad_()
        for length in (100, 150, 150)
    )
    other = SlidingWindow(90, 90)
    for joined in (lambda mask: mask, lambda mask: mask & other, lambda mask: other | mask):
        results = []
        for mask in (FunctionMask(FUNCTIONS[name]), tileattn.block_mask(FUNCTIONS[name], BATCH, HEADS, 100, 150, 32)):
            o, lse = tileattn.attention(q, k, v, mask=joined(mask), return_lse=True)
            results.append((o, lse, *torch.autograd.grad(o.square().sum(), (q, k, v))))
        for got, expected in zip(*results):
            torch.testing.assert_close(got, expected)


def test_of_masks_with_blocks_and_tensors() -> None:
    blocks = torch.eye(5, dtype=torch.bool).expand(BATCH, HEADS, 5, 5)
    mask = tileattn.block_mask(BlockSparse(blocks, 32) & Causal(), BATCH, HEADS, 150, 150, 32)
    assert isinstance(mask, KnownBlocks)
    assert torch.equal(mask.kinds.blocks == Kind.MIXED, blocks)


def test_a_call_of_other_sizes() -> None:
    q, k, v = (torch.randn(BATCH, 64, HEADS, 16) for _ in range(3))
    text = r"block_mask was made for \(batch, .*\) = \(1, 3, 60, 64\), .* got a call of \(2, 3, 64, 64\)"
    with pytest.raises(ValueError, match=text):
        tileattn.attention(q, k, v, mask=tileattn.block_mask(FUNCTIONS["by head"], BATCH, HEADS, 60, 64))


@pytest.mark.parametrize(
    ("error", "changed", "text"),
    [
        (TypeError, {"mask": None}, "block_mask: mask must be a tileattn mask or a function"),
        (TypeError, {"mask": 3}, "mask must be a tileattn mask or a function"),
        (TypeError, {"heads": 2.0}, "block_mask: heads must be an int of at least 1, got 2.0"),
        (ValueError, {"seqlen_k": 0}, "block_mask: seqlen_k must be an int of at least 1, got 0"),
        (ValueError, {"block_size": 8}, "block_mask: block_size must be an int or a tuple of two"),
        (ValueError, {"mask": BlockSparse(torch.ones(1, 1, 1, 1, dtype=torch.bool), 16)}, "BlockSparse: blocks must"),
    ],
)
def test_wrong_arguments(error: type[Exception], changed: dict[str, Any], text: str) -> None:
    given: dict[str, Any] = {"mask": FUNCTIONS["bits"], "batch": 1, "heads": 2, "seqlen_q": 64, "seqlen_k": 64}
    with pytest.raises(error, match=text):
        tileattn.block_mask(**(given | changed))


def test_ranges_are_those_of_the_mask_and_of_the_blocks() -> None:
    mask: Mask = Causal() & FunctionMask(FUNCTIONS["bits"])
    known = tileattn.block_mask(mask, 1, 1, 128, 128, 32)
    zero = torch.tensor(0)
    assert [int(x) for x in known.kv_range(zero, zero, torch.tensor(32), torch.tensor(63), 128)] == [32, 64]


def test_its_text_has_no_tensors() -> None:
    mask = tileattn.block_mask(tileattn.SlidingWindow(5, 0), 1, 1, 4096, 4096, block_size=16)
    assert repr(mask) == f"KnownBlocks({tileattn.SlidingWindow(5, 0)!r}, block_size=(16, 16))"
