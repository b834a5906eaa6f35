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
from tileattn.kernels import tile_lists
from tileattn.kernels.kept_lists import forget_lists, packed_lists_of
from tileattn.kernels.tile_lists import Cut, Sizes, TileLists, make_lists
from tileattn.kernels.tilelang.lists.launch import make_packed
from tileattn.kernels.tilelang.packed.work_list import WIDTH, capacity
from tileattn.kernels.tilelang.packed_lists import PackedSizes, bytes_of, make_packed_lists, packed_pays
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

    def __init__(self, lengths: str) -> None:
        self.q, self.k, rest = LENGTHS[lengths]
        self.packed = Packed(bounds(self.q), bounds(self.k), max(self.q), max(self.k))
        self.totals = sum(self.q) + rest, sum(self.k) + rest
        self.sizes = PackedSizes.of(self.packed, *self.totals, HEADS)

    def entries(self, cut: Cut) -> Tensor:
        return model(self.q, self.k, *self.totals, cut.block_N if cut.by_keys else cut.block_M, cut.by_keys)

    def work(self, cut: Cut) -> Tensor:
        """The work list; behind its end lies anything."""
        tile, rows = (cut.block_N, self.totals[1]) if cut.by_keys else (cut.block_M, self.totals[0])
        entries = self.entries(cut)
        work = torch.full((1 + capacity(rows, len(self.q), tile), WIDTH), 77, dtype=torch.int32)
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


WALKS = [
    *(("cross", cut) for cut in CUTS),
    *(
        pytest.param(*walk, marks=pytest.mark.slow)
        for walk in (("self", "narrow"), ("one", "keys"), ("self", "queries"))
    ),
]


@pytest.mark.parametrize(("lengths", "cut"), WALKS)
@pytest.mark.parametrize("name", MASKS)
def test_lists_beside_every_pair(name: str, lengths: str, cut: str) -> None:
    call, mask, tiles = Call(lengths), MASKS[name], CUTS[cut]
    lists = call.lists(mask, tiles)
    assert lists.batch_step == 0
    entries = call.entries(tiles).tolist()
    seen = set()
    for h in range(HEADS):
        # What lies behind the last entry, here numbers that could be those of one, is the line of nothing.
        behind = slice(h * lists.head_step + len(entries), (lists.head_step and (h + 1) * lists.head_step) or None)
        assert not lists.counts[behind].any()
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


def kinds_of_line(lists: TileLists, line: int) -> Tensor:
    """The kinds of a line's tiles, as lists tell them."""
    mixed, visited = lists.counts[line].tolist()
    kinds = torch.full(lists.tiles.shape[1:], int(Kind.HIDDEN))
    kinds[lists.tiles[line, :visited].long()] = int(Kind.WHOLE)
    kinds[lists.tiles[line, :mixed].long()] = int(Kind.MIXED)
    return kinds


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", ["dilated", "by-head", "far-only"])
def test_lines_are_those_of_dense_calls(name: str, cut: str) -> None:
    """Of each sequence by itself, but for the last keys, which lines of queries judge by whole tiles."""
    call, tiles = Call("cross"), CUTS[cut]
    lists, variant = call.lists(MASKS[name], tiles), encode(MASKS[name], ())
    for entry, (_, first, _, seqlen_q, _, seqlen_k, *_) in enumerate(call.entries(tiles).tolist()):
        if 0 in (seqlen_q, seqlen_k):
            continue
        sizes, usual = Sizes(1, HEADS, seqlen_q, seqlen_k), tiles._replace(longest_first=False)
        dense = make_lists(*variant, sizes, usual, torch.device("cpu"))
        exact_tiles = dense.tiles.shape[1] if tiles.by_keys else seqlen_k // tiles.block_N
        for h in range(HEADS):
            packed = kinds_of_line(lists, h * lists.head_step + entry)
            alone = kinds_of_line(dense, h * dense.head_step + entry - first)
            assert torch.equal(packed[:exact_tiles], alone[:exact_tiles])


@pytest.mark.parametrize("name", ["local-global", "by-both", "nothing"])
def test_tiles_of_a_run_ascend_by_length(name: str) -> None:
    """A mixed tile counted twice; kernels begin at the end, with equal lines from the last row on."""
    call, cut = Call("cross"), CUTS["forward"]
    lists, entries = call.lists(MASKS[name], cut), call.entries(CUTS["forward"]).tolist()
    assert lists.rows is not None
    assert lists.rows.dtype == torch.int32
    cost = lists.counts.sum(1).tolist()
    for h in range(HEADS):
        begin = h * lists.head_step
        for first in {entry[1] for entry in entries}:
            count = sum(entry[1] == first for entry in entries)
            numbers = lists.rows[begin + first : begin + first + count].tolist()
            assert sorted(numbers) == list(range(count))
            by_cost = [(cost[begin + first + number], number) for number in numbers]
            assert by_cost == sorted(by_cost)


@pytest.mark.parametrize(("name", "at_once"), [("by-both", 40), ("by-both", 200), ("by-sequence", 40)])
def test_lists_are_made_in_parts(name: str, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many lines bounds in 64 bits would take much memory at once."""
    call = Call("cross")
    together = [call.lists(MASKS[name], cut) for cut in CUTS.values()]
    monkeypatch.setattr(tile_lists, "MOST_AT_ONCE", at_once)
    for one, cut in zip(together, CUTS.values(), strict=True):
        other = call.lists(MASKS[name], cut)
        assert torch.equal(one.tiles, other.tiles)
        assert torch.equal(one.counts, other.counts)
        assert one.rows is None or torch.equal(one.rows, other.rows)  # type: ignore[arg-type]


def test_blocks_of_a_model() -> None:
    """A table that has the positions of each sequence's rows."""
    call, cut = Call("cross"), CUTS["forward"]
    blocks = torch.rand(len(call.q), HEADS, 4, 8, generator=TABLE) < 0.3
    mask = BlockSparse(blocks, 64)
    offsets = call.packed.cu_seqlens_k.diff() - call.packed.cu_seqlens_q.diff()
    bound = mask.in_call(CallSizes(len(call.q), HEADS, HEADS, 250, 512, offsets))
    lists = call.lists(bound, cut)
    for entry, (sequence, first, _, seqlen_q, _, seqlen_k, *_) in enumerate(call.entries(cut).tolist()):
        for h in range(HEADS):
            visited = int(lists.counts[h * lists.head_step + entry, 1])
            rows = slice(2 * (entry - first), min(2 * (entry - first) + 2, -(-seqlen_q // 64)))
            seen = blocks[sequence, h, rows, : -(-seqlen_k // 64)].any(0).nonzero() // 2
            assert visited == (0 if 0 in (seqlen_q, seqlen_k) else len(seen.unique()))


# --- Which calls, and how much memory ---


def sizes_of(total: int, longest: int, sequences: int = 8, heads: int = 16) -> PackedSizes:
    bound = torch.zeros(sequences + 1, dtype=torch.int32)
    return PackedSizes.of(Packed(bound, bound, longest, longest), total, total, heads)


def test_which_calls() -> None:
    call = AttentionCall(torch.bfloat16, 64, 64, encode(MASKS["dilated"], ())[0], arch="sm_90a", packed=True)
    cuts = (CUTS["forward"],)
    assert packed_pays(call, sizes_of(8192, 1024), cuts)
    assert not packed_pays(call, sizes_of(8192, 896), cuts)
    assert not packed_pays(call, sizes_of(896, 10**6), cuts)  # no sequence is longer than the tensors
    assert not packed_pays(dataclasses.replace(call, packed=False), sizes_of(8192, 1024), cuts)
    assert not packed_pays(dataclasses.replace(call, dtype=torch.float8_e4m3fn), sizes_of(8192, 1024), cuts)
    for variant in ("", encode(Causal(), ())[0]):
        assert not packed_pays(dataclasses.replace(call, variant=variant), sizes_of(8192, 1024), cuts)


def test_memory_is_bounded() -> None:
    """What the page says: 4 bytes an entry and tile of the longest sequence; too much of it, and ranges are walked."""
    by_head = encode(MASKS["by-head"], ())[0]
    for name, cut in (("dilated", "forward"), ("by-head", "keys"), ("by-both", "queries")):
        given = Call("cross")
        lists = given.lists(MASKS[name], CUTS[cut])
        tensors = [lists.tiles, lists.counts, *([] if lists.rows is None else [lists.rows])]
        assert bytes_of(encode(MASKS[name], ())[0], given.sizes, CUTS[cut]) == sum(each.nbytes for each in tensors)
    long = sizes_of(131072, 16384)
    assert bytes_of(encode(MASKS["dilated"], ())[0], long, CUTS["forward"]) == 4 * (1024 + 8 + 1) * (128 + 3)
    call = AttentionCall(torch.bfloat16, 64, 64, by_head, arch="sm_90a", packed=True)
    assert packed_pays(call, long, (CUTS["forward"], CUTS["keys"]))
    assert not packed_pays(call, sizes_of(2**20, 2**20), (CUTS["forward"],))
    assert packed_pays(call, sizes_of(2**20, 2**14), (CUTS["forward"],))


# --- What is kept ---


@pytest.fixture(autouse=True)
def _nothing_kept() -> Iterator[None]:
    forget_lists()
    yield
    forget_lists()


def found(call: Call, mask: Mask, cut: str = "forward", **changed: Any) -> TileLists:
    packed = call.packed._replace(**changed)
    sizes = PackedSizes.of(packed, *call.totals, HEADS)
    return packed_lists_of(make_packed, *encode(mask, ()), packed, sizes, CUTS[cut], call.work(CUTS[cut]))


def test_the_same_call_finds_its_lists() -> None:
    call = Call("cross")
    first = found(call, MASKS["dilated"])
    assert found(call, MASKS["dilated"]).tiles is first.tiles
    assert found(call, MASKS["dilated"], "queries").tiles is not first.tiles
    assert found(call, MASKS["dilated"], max_seqlen_k=513).tiles is not first.tiles
    assert found(Call("cross"), MASKS["dilated"]).tiles is not first.tiles  # other tensors of lengths
    assert found(call, MASKS["dilated"]).tiles is first.tiles


def test_lengths_that_were_written_in_place_are_seen() -> None:
    for which in range(2):
        call = Call("cross")
        first = found(call, MASKS["dilated"])
        (call.packed.cu_seqlens_q, call.packed.cu_seqlens_k)[which].add_(0)
        assert found(call, MASKS["dilated"]).tiles is not first.tiles


# --- No value of a tensor comes to the host ---


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", ["images-text", "by-both"])
def test_nothing_comes_to_the_host_or_from_it(name: str, cut: str) -> None:
    """So that lists can be made while a CUDA graph is captured."""
    call = Call("cross")
    variant, operands = encode(MASKS[name], ())
    operands = dataclasses.replace(operands, tensors=[tensor.to("meta") for tensor in operands.tensors])
    expected, work = call.lists(MASKS[name], CUTS[cut]), call.work(CUTS[cut]).to("meta")
    with no_host_reads():
        lists = make_packed_lists(variant, operands, call.sizes, CUTS[cut], work)
    assert lists.tiles.shape == expected.tiles.shape
    assert lists.counts.shape == expected.counts.shape
    assert lists[2:4] == expected[2:4]
    assert (lists.rows is None) == (expected.rows is None)
