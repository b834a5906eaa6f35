"""Lists of tiles of packed calls, on a CPU, beside lists by brute force: of every pair of each sequence."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("tilelang")

from tests.kernels.tilelang.packed.test_plan_kernel import bounds, model
from tests.kernels.tilelang.test_tile_lists import exact, no_host_reads
from tileattn import (
    BlockSparse,
    Causal,
    Dilated,
    Documents,
    FunctionMask,
    GlobalTokens,
    ImageTextDocuments,
    Mask,
    Neighborhood,
    SlidingWindow,
    Strided,
)
from tileattn.call.facts import AttentionCall, Packed
from tileattn.kernels.tilelang import kept_lists, tile_lists
from tileattn.kernels.tilelang.kept_lists import forget_lists, packed_lists_of
from tileattn.kernels.tilelang.packed.work_list import WIDTH, capacity
from tileattn.kernels.tilelang.packed_lists import PackedSizes, bytes_of, make_packed_lists, packed_pays
from tileattn.kernels.tilelang.tile_lists import Cut, TileLists
from tileattn.math import load
from tileattn.variant.intervals.tiles import Kind
from tileattn.variant.key import encode
from tileattn.variant.sparse.blocks import CallSizes

HEADS = 2
# Queries and keys of each sequence, and unused rows behind them.
LENGTHS: dict[str, tuple[list[int], list[int], int]] = {
    "self": ([300, 0, 1, 417, 128, 64], [300, 0, 1, 417, 128, 64], 0),
    "cross": ([250, 40, 0, 129, 3], [100, 300, 77, 0, 512], 150),
    "one": ([700], [700], 0),
}
COUNT = max(len(lengths[0]) for lengths in LENGTHS.values())
TABLE = torch.Generator().manual_seed(0)
IDS = torch.randint(0, 3, (COUNT, 8), generator=TABLE).repeat_interleave(100, 1)
DOCUMENTS, IMAGES = IDS, torch.where(IDS == 1, 1, -1)
LIMITS = torch.tensor([100, 200, 5, 300, 0, 50], dtype=torch.int32)
WINDOWS = torch.tensor([30, 200], dtype=torch.int32)

MASKS: dict[str, Mask] = {
    "dilated": Dilated(255, dilation=4),
    "strided": Strided(64, 63),
    "local-global": SlidingWindow(50, 20) | GlobalTokens(64),
    "image": Neighborhood((16, 20), (5, 5)),
    "images-text": ImageTextDocuments(DOCUMENTS, IMAGES),
    "by-head": FunctionMask(lambda b, h, q, k: (k <= q) & (q - k < 64 * (h + 1) * (h + 1))),
    "by-sequence": FunctionMask(lambda b, h, q, k: (k < load(LIMITS, b)) & (abs(q - k) < 200)),
    "by-both": FunctionMask(lambda b, h, q, k: (k < load(LIMITS, b)) & (q - k < load(WINDOWS, h)) & (k <= q)),
    "loaded-ids": FunctionMask(lambda b, h, q, k: load(IDS, b, q) == load(IDS, b, k)),
    "documents-or-window": Documents(DOCUMENTS) | SlidingWindow(40, 40),
    "nothing": FunctionMask(lambda b, h, q, k: (k > q) & (k < q)),
    "everything": FunctionMask(lambda b, h, q, k: k >= 0),
    "far-only": FunctionMask(lambda b, h, q, k: q - k > 200),
}
CUTS = {
    "forward": Cut(128, 128, longest_first=True),
    "narrow": Cut(192, 80, longest_first=True),
    "keys": Cut(64, 128, by_keys=True, masks_queries=True),
    "queries": Cut(128, 96, masks_queries=True),
}


class Call:
    """A packed call of some lengths: its work lists and lists of tiles."""

    def __init__(self, lengths: str, longer: int = 0) -> None:
        self.q, self.k, rest = LENGTHS[lengths]
        self.packed = Packed(bounds(self.q), bounds(self.k), max(self.q) + longer, max(self.k) + longer)
        self.totals = sum(self.q) + rest, sum(self.k) + rest
        self.sizes = PackedSizes.of(self.packed, *self.totals, HEADS)

    def entries(self, cut: Cut) -> Tensor:
        return model(self.q, self.k, *self.totals, cut.block_N if cut.by_keys else cut.block_M, cut.by_keys)

    def work(self, cut: Cut) -> Tensor:
        """The work list; behind its end lies anything."""
        tile, rows = (cut.block_N, self.totals[1]) if cut.by_keys else (cut.block_M, self.totals[0])
        entries = self.entries(cut)
        work = torch.full((1 + capacity(rows, len(self.q), tile), WIDTH), -(2**31) + 77, dtype=torch.int32)
        work[0] = 0
        work[0, 0] = len(entries)
        work[1 : 1 + len(entries)] = entries
        return work

    def lists(self, mask: Mask, cut: Cut) -> TileLists:
        return make_packed_lists(*encode(mask, ()), self.sizes, cut, self.work(cut))

    def kinds(self, mask: Mask, sequence: int, h: int, cut: Cut) -> Tensor:
        """The kinds of the tiles of a sequence, from every pair; int8 (lines, capacity)."""
        seqlen_q, seqlen_k = self.q[sequence], self.k[sequence]
        q = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q
        allowed = mask.allows(torch.tensor(sequence), torch.tensor(h), q, torch.arange(seqlen_k)[None])
        return exact(torch.as_tensor(allowed).expand(seqlen_q, seqlen_k), cut)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("name", MASKS)
def test_lists_beside_every_pair(name: str, lengths: str, cut: str) -> None:
    call, mask, tiles = Call(lengths), MASKS[name], CUTS[cut]
    lists = call.lists(mask, tiles)
    assert lists.batch_step == 0
    entries = call.entries(tiles).tolist()
    seen = set()
    for h in range(HEADS):
        for entry, (sequence, first, _, seqlen_q, _, seqlen_k, *_) in enumerate(entries):
            line = h * lists.head_step + entry
            mixed, visited = lists.counts[line].tolist()
            listed = lists.tiles[line].tolist()
            assert sorted(listed) == list(range(lists.tiles.shape[1]))
            if 0 in (seqlen_q, seqlen_k):
                assert (mixed, visited) == (0, 0)
                continue
            of_line = call.kinds(mask, sequence, h, tiles)[entry - first]
            seen.add((sequence, entry - first))
            assert listed[:mixed] == sorted(listed[:mixed])
            assert listed[mixed:visited] == sorted(listed[mixed:visited])
            assert all(tile < len(of_line) for tile in listed[:visited])
            # Never wrong: what is left out is hidden, and what is not masked is whole, to the ends of both.
            assert all(of_line[tile] == Kind.HIDDEN for tile in listed[visited:] if tile < len(of_line))
            for tile in listed[mixed:visited]:
                assert of_line[tile] == Kind.WHOLE
                rows, columns = (tile, entry - first) if tiles.by_keys else (entry - first, tile)
                assert (columns + 1) * tiles.block_N <= seqlen_k
                assert not tiles.masks_queries or (rows + 1) * tiles.block_M <= seqlen_q
    block, own, others = (tiles.block_N, call.k, call.q) if tiles.by_keys else (tiles.block_M, call.q, call.k)
    assert seen == {(i, n) for i, rows in enumerate(own) if others[i] for n in range(-(-rows // block))}
