"""Masks and modifications on a part of a call say what they say of the whole, and their ranges hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tileattn import ALiBi, Bias, Causal, Documents, FunctionMask, KeyPadding, Mask, PrefixLM, SlidingWindow, SoftCap
from tileattn.parallel.algorithms.shifted import Part, ShiftedMask, localized
from tileattn.variant.key import encode
from tileattn.variant.program import restore

SEQLEN, HEADS, BATCH = 40, 4, 2
IDS = torch.tensor([0] * 9 + [1] * 14 + [2] * 3 + [1] * 14)
MASKS: tuple[Mask, ...] = (
    Causal(),
    SlidingWindow(7),
    SlidingWindow(5, 6),
    SlidingWindow(None, 4),
    SlidingWindow(4, None),
    PrefixLM(11),
    PrefixLM(torch.tensor([5, 30])),
    Documents(IDS),
    Causal() & Documents(IDS),
    PrefixLM(9) | SlidingWindow(3),
    KeyPadding(torch.arange(SEQLEN)[None] < torch.tensor([[33], [21]])),
    FunctionMask(lambda b, h, q, k: ((h % 2 == b) & (k <= q)) | (k % 3 == 0)),
)
# (queries, keys, heads)
PARTS = (
    ((0, 40), (0, 40), (0, 4)),
    ((10, 20), (0, 20), (0, 4)),
    ((10, 20), (0, 40), (1, 3)),
    ((10, 20), (4, 27), (0, 2)),
    ((30, 40), (20, 30), (2, 4)),
    ((5, 6), (17, 40), (0, 4)),
    ((16, 32), (8, 32), (0, 4)),
    ((10, 20), (0, 12), (0, 4)),  # the first query of a causal mask does not see the last key
    ((10, 20), (0, 11), (0, 4)),  # and here it does
)


def part_of(queries: tuple[int, int], keys: tuple[int, int], heads: tuple[int, int]) -> Part:
    return Part(None, queries, keys, heads, None, SEQLEN)


def grid(batch: int, heads: tuple[int, int], queries: range, keys: range) -> tuple[torch.Tensor, ...]:
    """b, h, q and k that broadcast to (batch, heads, queries, keys)."""
    b, h = torch.arange(batch)[:, None, None, None], torch.arange(*heads)[:, None, None]
    return b, h, torch.tensor(queries)[:, None], torch.tensor(keys)


@pytest.mark.parametrize("part", PARTS, ids=str)
@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: type(mask).__name__)
def test_a_part_of_a_mask(mask: Mask, part: Any) -> None:
    queries, keys, heads = part
    variant = localized(mask, (), part_of(*part))
    local, _ = restore(variant.key, variant.operands(encode(mask, ())[1].tensors))
    count, rows = keys[1] - keys[0], queries[1] - queries[0]
    expected = mask.allows(*grid(BATCH, heads, range(*queries), range(*keys)))
    expected = torch.as_tensor(expected).broadcast_to(BATCH, heads[1] - heads[0], rows, count)
    # A part's last query is at the position of its last key.
    own = range(count - rows, count)
    if local is None:
        assert bool(expected.all())
        return
    found = torch.as_tensor(local.allows(*grid(BATCH, (0, heads[1] - heads[0]), own, range(count))))
    assert torch.equal(found.broadcast_to(expected.shape), expected)


@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: type(mask).__name__)
def test_ranges_of_a_shifted_mask_hold(mask: Mask) -> None:
    """Nothing outside a range of some is seen, all inside a range of all is, for every tile of a part."""
    b0, h0, q0, k0, count, rows = 0, 1, 13, 6, 27, 16
    shifted = ShiftedMask(mask, b0, h0, q0, k0, SEQLEN)
    queries, keys = range(count - rows, count), range(count)
    visible = torch.as_tensor(shifted.allows(*grid(BATCH, (0, 2), queries, keys))).broadcast_to(BATCH, 2, rows, count)
    for b in range(BATCH):
        for h in range(2):
            seen = visible[b, h]
            for lo in range(0, rows, 5):
                hi = min(lo + 4, rows - 1)
                tile, ends = seen[lo : hi + 1], (queries[lo], queries[hi])
                _holds(tile.any(0), tile.all(0), shifted.kv_range(b, h, *ends, count), keys, "some")
                _holds(tile.any(0), tile.all(0), shifted.full_range(b, h, *ends, count), keys, "all")
            for lo in range(0, count, 5):
                hi = min(lo + 4, count - 1)
                tile = seen[:, lo : hi + 1]
                _holds(tile.any(1), tile.all(1), shifted.q_range(b, h, lo, hi, count), queries, "some")
                _holds(tile.any(1), tile.all(1), shifted.full_q_range(b, h, lo, hi, count), queries, "all")


def _holds(some: torch.Tensor, every: torch.Tensor, bounds: Any, places: range, which: str) -> None:
    low, high = int(bounds[0]), int(bounds[1])
    inside = torch.tensor([low <= place < high for place in places])
    if which == "some":
        assert not bool((some & ~inside).any())
    else:
        assert not bool((inside & ~every).any())


@pytest.mark.parametrize("part", PARTS, ids=str)
def test_a_part_of_score_modifications(part: Any) -> None:
    queries, keys, heads = part
    slopes, bias = torch.rand(HEADS).double(), torch.randn(1, HEADS, SEQLEN, SEQLEN).double()
    table = torch.randn(HEADS, SEQLEN).double()
    mods = (ALiBi(slopes), Bias(bias), SoftCap(2.0), lambda s, b, h, q, k: s + table[h, k] * (q - k) + 0.5 * b)
    variant = localized(None, mods, part_of(*part))
    _, local = restore(variant.key, variant.operands([slopes, bias, table]), torch.float64)
    count, rows = keys[1] - keys[0], queries[1] - queries[0]
    own = range(count - rows, count)
    expected = found = torch.randn(BATCH, heads[1] - heads[0], rows, count).double()
    for mod in mods:
        expected = mod(expected, *grid(BATCH, heads, range(*queries), range(*keys)))
    for mod in local:
        found = mod(found, *grid(BATCH, (0, heads[1] - heads[0]), own, range(count)))
    assert torch.equal(found, expected)
