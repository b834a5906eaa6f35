"""Lists of tiles, on a CPU, beside lists by brute force: of every pair of a query and a key."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tileattn import (
    BlockSparse,
    Causal,
    Dilated,
    Documents,
    FunctionMask,
    GlobalTokens,
    ImageTextDocuments,
    KeyPadding,
    Mask,
    Neighborhood,
    PrefixLM,
    SlidingWindow,
    SoftCap,
    Strided,
)
from tileattn.call.facts import AttentionCall
from tileattn.compat.transformers.patterns import ShiftedWindow
from tileattn.kernels import kept_lists
from tileattn.kernels.kept_lists import arguments_of, forget_lists, lists_of
from tileattn.kernels.tile_lists import (
    Cut,
    Sizes,
    TileLists,
    fill_lists,
    is_listed,
    make_lists,
    pays,
    tensors_of,
)
from tileattn.kernels.tilelang.lists.launch import make
from tileattn.math import load, minimum
from tileattn.variant.intervals.tiles import Kind
from tileattn.variant.key import encode
from tileattn.variant.sparse.blocks import CallSizes


@dataclass(frozen=True, eq=False)
class Even(Mask):
    """A user's class, without ranges."""

    def allows(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return k % 2 == 0


CPU = torch.device("cpu")
LENGTHS = torch.tensor([300, 417, 63, 100, 333])
DOCUMENTS = torch.arange(len(LENGTHS)).repeat_interleave(LENGTHS)
PLACE = torch.arange(len(DOCUMENTS)) - (LENGTHS.cumsum(0) - LENGTHS)[DOCUMENTS]
IMAGES = torch.where(PLACE % 200 < 150, PLACE // 200, -1)
WINDOWS = torch.tensor([64, 250, 700], dtype=torch.int32)
LIMITS = torch.tensor([900, 300], dtype=torch.int32)

# Masks that tensors of 1213 elements, 3 heads and 2 batch elements fit.
MASKS: dict[str, Mask] = {
    "dilated": Dilated(511, dilation=4),
    "strided": Strided(128, 63),
    "local-global": SlidingWindow(150, 20) | GlobalTokens(64),
    "image": Neighborhood((36, 34), (9, 9)),
    "images-text": ImageTextDocuments(DOCUMENTS, IMAGES),
    "by-head": FunctionMask(lambda b, h, q, k: (k <= q) & (q - k < 64 * (h + 1) * (h + 1))),
    "loaded-windows": Causal() & FunctionMask(lambda b, h, q, k: q - k <= load(WINDOWS, h)),
    "loaded-ids": FunctionMask(lambda b, h, q, k: load(DOCUMENTS, q) == load(DOCUMENTS, k)),
    "by-batch": FunctionMask(lambda b, h, q, k: (k < load(LIMITS, b)) & (abs(q - k) < 200)),
    "by-both": FunctionMask(lambda b, h, q, k: (k < load(LIMITS, b)) & (q - k < load(WINDOWS, h)) & (k <= q)),
    "documents-or-window": Documents(DOCUMENTS) | SlidingWindow(40, 40),
    "nothing": FunctionMask(lambda b, h, q, k: (k > q) & (k < q)),
    "everything": FunctionMask(lambda b, h, q, k: k >= 0),
    "far-only": FunctionMask(lambda b, h, q, k: q - k > 500),
}
SIZES = {
    "square": Sizes(2, 3, 1213, 1213),
    "whole": Sizes(2, 3, 1024, 1024),
    "more-keys": Sizes(1, 3, 500, 1213),
    "more-queries": Sizes(2, 1, 1213, 700),
    "one-query": Sizes(1, 3, 1, 1213),
}
CUTS = {
    "forward": Cut(128, 128),
    "narrow": Cut(192, 80),
    "keys": Cut(64, 128, by_keys=True, masks_queries=True),
    "queries": Cut(128, 96, masks_queries=True),
    "sorted": Cut(128, 128, longest_first=True),
}


def key_and_operands(mask: Mask, *mods: Any) -> tuple[str, Any]:
    return encode(mask, mods)


def made(mask: Mask, sizes: Sizes, cut: Cut) -> TileLists:
    return make_lists(*key_and_operands(mask), sizes, cut, CPU)


def seen(mask: Mask, sizes: Sizes, b: int, h: int) -> Tensor:
    """Every pair of a plane: bool (seqlen_q, seqlen_k)."""
    q = torch.arange(sizes.seqlen_q)[:, None] + sizes.seqlen_k - sizes.seqlen_q
    allowed = mask.allows(torch.tensor(b), torch.tensor(h), q, torch.arange(sizes.seqlen_k)[None])
    return torch.as_tensor(allowed).expand(sizes.seqlen_q, sizes.seqlen_k)


def exact(pairs: Tensor, cut: Cut) -> Tensor:
    """The kinds of tiles of a plane, from its pairs; int8 (lines, capacity)."""
    rows = []
    for part in pairs.split(cut.block_M):
        rows.append([int(tile.any()) + int(tile.all()) for tile in part.split(cut.block_N, dim=1)])
    kinds = torch.tensor(rows, dtype=torch.int8)
    return kinds.T if cut.by_keys else kinds


WALKS = [
    *(("square", cut) for cut in CUTS),
    *(("more-keys", cut) for cut in ("forward", "keys")),
    *(("more-queries", cut) for cut in ("keys", "queries")),
    *(("one-query", cut) for cut in ("narrow", "keys", "sorted")),
]


@pytest.mark.parametrize(("sizes", "cut"), WALKS)
@pytest.mark.parametrize("name", MASKS)
def test_lists_beside_every_pair(name: str, sizes: str, cut: str) -> None:
    mask, size, tiles = MASKS[name], SIZES[sizes], CUTS[cut]
    lists = made(mask, size, tiles)
    for b in range(size.batch):
        for h in range(size.heads):
            kinds = exact(seen(mask, size, b, h), tiles)
            first = b * lists.batch_step + h * lists.head_step
            rows_of_lines = range(len(kinds))
            if tiles.longest_first:
                assert lists.rows is not None
                rows_of_lines = lists.rows[first : first + len(kinds)].tolist()
                assert sorted(rows_of_lines) == list(range(len(kinds)))
            for line, row in enumerate(rows_of_lines):
                of_line = kinds[row]
                mixed, visited = lists.counts[first + line].tolist()
                listed = lists.tiles[first + line].tolist()
                assert sorted(listed) == list(range(len(of_line)))
                assert listed[:mixed] == sorted(listed[:mixed])
                assert listed[mixed:visited] == sorted(listed[mixed:visited])
                # Never wrong: what is left out is hidden, and what is not masked is whole, to the ends of both.
                assert all(of_line[tile] == Kind.HIDDEN for tile in listed[visited:])
                for tile in listed[mixed:visited]:
                    assert of_line[tile] == Kind.WHOLE
                    rows, columns = (tile, row) if tiles.by_keys else (row, tile)
                    assert (columns + 1) * tiles.block_N <= size.seqlen_k
                    assert not tiles.masks_queries or (rows + 1) * tiles.block_M <= size.seqlen_q


@pytest.mark.parametrize("name", MASKS)
def test_sorted_lines_are_those_of_the_rows(name: str) -> None:
    """The longest first, a mixed tile counted twice; equal ones from the last row to the first."""
    size = SIZES["square"]
    lists, usual = made(MASKS[name], size, CUTS["sorted"]), made(MASKS[name], size, CUTS["forward"])
    assert lists.rows is not None
    assert usual.rows is None
    assert lists.rows.dtype == torch.int32
    planes = len(lists.counts) // 10
    rows = lists.rows.reshape(planes, 10)
    lines = (rows.long() + 10 * torch.arange(planes)[:, None]).reshape(-1)
    assert torch.equal(lists.counts, usual.counts[lines])
    assert torch.equal(lists.tiles, usual.tiles[lines])
    cost = lists.counts.sum(1).reshape(planes, 10)
    for of_plane, numbers in zip(cost.tolist(), rows.tolist(), strict=True):
        pairs = list(zip(of_plane, numbers, strict=True))
        assert pairs == sorted(pairs, reverse=True)


@dataclass(frozen=True, eq=False)
class SameBlock(Mask):
    """Queries and keys of the same block of 128. Of tiles that begin within a block bounds of `q ^ k` tell little."""

    def allows(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q ^ k) < 128

    def kv_range(self, b: Any, h: Any, q_lo: Any, q_hi: Any, seqlen_k: Any) -> Any:
        return q_lo // 128 * 128, minimum((q_hi // 128 + 1) * 128, seqlen_k)


def test_ranges_hide_what_an_expression_cannot_tell() -> None:
    mask = SameBlock() & FunctionMask(lambda b, h, q, k: k % 2 == 0)
    lists = made(mask, Sizes(1, 1, 1152, 1152), CUTS["narrow"])
    blocks = [(row * 192 // 128, (row * 192 + 191) // 128) for row in range(6)]
    keys = [(first * 128, last * 128 + 127) for first, last in blocks]
    assert lists.counts[:, 1].tolist() == [last // 80 - first // 80 + 1 for first, last in keys]


@pytest.mark.parametrize("name", [name for name in MASKS if name not in ("image", "by-batch", "by-both", "nothing")])
def test_no_tile_is_listed_needlessly(name: str) -> None:
    """But where two conditions hold in a tile, if at no pair together."""
    mask, size, cut = MASKS[name], SIZES["whole"], CUTS["forward"]
    lists = made(mask, size, cut)
    for b in range(size.batch):
        for h in range(size.heads):
            kinds = exact(seen(mask, size, b, h), cut)
            first = b * lists.batch_step + h * lists.head_step
            counts = lists.counts[first : first + len(kinds)]
            assert counts[:, 1].tolist() == (kinds != Kind.HIDDEN).sum(1).tolist()
            assert counts[:, 0].tolist() == (kinds == Kind.MIXED).sum(1).tolist()


@pytest.mark.parametrize(
    ("name", "planes"), [("dilated", (1, 1)), ("by-head", (1, 3)), ("by-batch", (2, 1)), ("by-both", (2, 3))]
)
def test_a_plane_for_what_the_mask_depends_on(name: str, planes: tuple[int, int]) -> None:
    lists = made(MASKS[name], SIZES["square"], CUTS["forward"])
    of_batch, of_head = planes
    assert lists.tiles.shape == (of_batch * of_head * 10, 10)
    assert lists.counts.shape == (of_batch * of_head * 10, 2)
    assert lists.tiles.dtype == lists.counts.dtype == torch.int32
    assert lists.head_step == (10 if of_head > 1 else 0)
    assert lists.batch_step == (10 * of_head if of_batch > 1 else 0)


def test_planes_are_made_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many planes bounds in 64 bits would take much memory at once."""
    cuts = CUTS["keys"], CUTS["sorted"]
    together = [made(MASKS["by-both"], SIZES["square"], cut) for cut in cuts]
    monkeypatch.setattr("tileattn.kernels.tile_lists.MOST_AT_ONCE", 450)
    apart = [made(MASKS["by-both"], SIZES["square"], cut) for cut in cuts]
    for one, other in zip(together, apart, strict=True):
        assert torch.equal(one.tiles, other.tiles)
        assert torch.equal(one.counts, other.counts)
    assert together[1].rows is not None
    assert apart[1].rows is not None
    assert torch.equal(together[1].rows, apart[1].rows)


def test_hidden_tiles_lie_behind_the_counts() -> None:
    """A kernel must not read them; a test may overwrite them with anything."""
    kinds = torch.tensor([[0, 2, 1, 0, 1], [0] * 5, [2] * 5], dtype=torch.int8)
    tiles, counts = torch.full((3, 5), -7, dtype=torch.int32), torch.full((3, 2), -7, dtype=torch.int32)
    fill_lists(kinds, tiles, counts)
    assert counts.tolist() == [[2, 3], [0, 0], [0, 5]]
    assert tiles.tolist() == [[2, 4, 1, 0, 3], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]


def test_memory_of_a_long_plane() -> None:
    """What the page and the module say: 4 bytes a tile, 8 a row."""
    lists = made(Dilated(4095, dilation=4), Sizes(1, 1, 131072, 131072), Cut(128, 128))
    assert lists.tiles.nbytes == 4 * 1024 * 1024
    assert lists.counts.nbytes == 8 * 1024
    ordered = made(Dilated(4095, dilation=4), Sizes(1, 1, 131072, 131072), CUTS["sorted"])
    assert ordered.rows is not None
    assert ordered.rows.nbytes == 4 * 1024


# --- Which calls ---


@pytest.mark.parametrize("name", MASKS)
def test_functions_and_joined_masks_are_listed(name: str) -> None:
    assert is_listed(key_and_operands(MASKS[name])[0])
    assert is_listed(key_and_operands(MASKS[name], SoftCap(3.0))[0])


@pytest.mark.parametrize(
    "mask",
    [
        Causal(),
        SlidingWindow(3, 4),
        Documents(DOCUMENTS),
        Causal() & Documents(DOCUMENTS),
        PrefixLM(3) & KeyPadding(torch.ones(2, 9, dtype=torch.bool)),
    ],
)
def test_masks_that_know_their_ranges_are_not(mask: Mask) -> None:
    assert not is_listed(key_and_operands(mask)[0])


def test_a_class_that_defines_its_ranges_is_not() -> None:
    """One that leaves them out is."""
    window = ShiftedWindow(40, 0, torch.zeros(1, dtype=torch.int32))
    assert not is_listed(key_and_operands(window & Causal())[0])
    assert is_listed(key_and_operands(window & MASKS["dilated"])[0])
    assert is_listed(key_and_operands(Even())[0])


def test_without_a_mask_and_of_a_matrix_nothing_is_listed() -> None:
    matrix = torch.ones(9, 9, dtype=torch.bool)
    assert not is_listed("")
    assert not is_listed(encode(None, (SoftCap(3.0),))[0])
    assert not is_listed(key_and_operands(FunctionMask(lambda b, h, q, k: load(matrix, q, k)))[0])


@pytest.mark.parametrize("block_size", [128, (1, 64), (64, 16), 200])
def test_blocks_of_a_model_are_listed(block_size: int | tuple[int, int]) -> None:
    """A matrix, but of blocks. Kinds of 128 by 128 tiles are those of all pairs."""
    block_q, block_k = block_size if isinstance(block_size, tuple) else (block_size, block_size)
    if block_k % 16:
        with pytest.raises(ValueError, match="block_size"):
            BlockSparse(torch.ones(1, 1, 8, 8, dtype=torch.bool), block_size)
        return
    torch.manual_seed(0)
    blocks = torch.rand(1, 2, -(-600 // block_q), -(-1000 // block_k)) < 0.1
    mask = BlockSparse(blocks, block_size).in_call(CallSizes(1, 4, 2, 600, 1000, 400))
    variant, operands = encode(mask, ())
    assert is_listed(variant)
    lists = make_lists(variant, operands, Sizes(1, 4, 600, 1000), Cut(128, 128), CPU)
    pairs = blocks.repeat_interleave(block_q, 2)[:, :, :600].repeat_interleave(block_k, 3)[..., :1000]
    whole = (
        torch.nn.functional.pad(pairs.repeat_interleave(2, 1), (0, 24, 0, 40)).unfold(2, 128, 128).unfold(3, 128, 128)
    )
    visited = whole.any(-1).any(-1).sum(-1).flatten()
    assert lists.counts[:, 1].tolist() == visited.tolist()


def test_short_packed_and_fp8_calls_walk_over_ranges() -> None:
    call = AttentionCall(torch.bfloat16, 64, 64, key_and_operands(MASKS["dilated"])[0], arch="sm_90a")

    def shape(seqlen: int) -> torch.Size:
        return torch.Size((1, seqlen, 4, 64))

    assert pays(call, shape(1024), shape(1024))
    assert pays(call, shape(1), shape(8192))
    assert not pays(call, shape(896), shape(1024))
    assert not pays(dataclasses.replace(call, packed=True), shape(4096), shape(4096))
    assert not pays(dataclasses.replace(call, dtype=torch.float8_e4m3fn), shape(4096), shape(4096))
    assert not pays(dataclasses.replace(call, variant=""), shape(4096), shape(4096))


def test_tensors_that_a_mask_reads() -> None:
    slopes = torch.ones(3)
    mods = (lambda score, b, h, q, k: score * slopes[h],)
    assert tensors_of(encode(MASKS["by-both"], mods)[0]) == (0, 1)
    assert tensors_of(encode(MASKS["dilated"], mods)[0]) == ()


# --- What is kept ---


@pytest.fixture(autouse=True)
def _nothing_kept() -> Iterator[None]:
    forget_lists()
    yield
    forget_lists()


def found(mask: Mask, **changed: Any) -> TileLists:
    sizes = SIZES["square"]._replace(**changed)
    return lists_of(make, *key_and_operands(mask), sizes, CUTS["forward"], CPU)


def test_the_same_call_finds_its_lists() -> None:
    assert found(MASKS["dilated"]).tiles is found(MASKS["dilated"]).tiles
    assert found(Dilated(511, dilation=4)).tiles is found(MASKS["dilated"]).tiles
    assert found(MASKS["loaded-ids"]).tiles is found(MASKS["loaded-ids"]).tiles


def test_other_numbers_sizes_and_tensors_do_not() -> None:
    first = found(MASKS["dilated"])
    assert found(Dilated(255, dilation=4)).tiles is not first.tiles
    assert found(MASKS["dilated"], seqlen_q=1212).tiles is not first.tiles
    ids = DOCUMENTS.clone()
    other = FunctionMask(lambda b, h, q, k: load(ids, q) == load(ids, k))
    assert found(other).tiles is not found(MASKS["loaded-ids"]).tiles


def test_a_write_in_place_is_seen() -> None:
    ids = DOCUMENTS.clone()
    mask = FunctionMask(lambda b, h, q, k: load(ids, q) == load(ids, k))
    before = found(mask)
    ids.zero_()
    after = found(mask)
    assert before.counts[:, 1].sum() < 100
    assert after.counts[:, 1].tolist() == [10] * 10


def test_a_dead_tensor_is_not_taken_for_another() -> None:
    for limit in (100, 1000, 500):
        # The next tensor may get the id of the one before.
        table = torch.tensor([limit], dtype=torch.int32)
        lists = found(FunctionMask(lambda b, h, q, k, table=table: (q - k < load(table, 0)) & (k <= q)))
        least = made(
            FunctionMask(lambda b, h, q, k, limit=limit: (q - k < limit) & (k <= q)), SIZES["square"], CUTS["forward"]
        )
        assert torch.equal(lists.counts, least.counts)
        del table
        gc.collect()


def test_the_lists_of_a_dead_tensor_are_not_found() -> None:
    """The id and the version of the new tensor are those of one that is gone."""
    tables = [torch.tensor([limit], dtype=torch.int32) for limit in (100, 1000)]
    masks = [FunctionMask(lambda b, h, q, k, table=table: (q - k < load(table, 0)) & (k <= q)) for table in tables]
    first = found(masks[0])
    (key, kept), *_ = kept_lists._kept.items()
    other = (*key[:-1], (id(tables[1]),))  # type: ignore[index]
    kept_lists._kept[other] = kept._replace(tensors=(weakref.ref(torch.tensor([0])),))
    assert not torch.equal(found(masks[1]).counts, first.counts)


def test_lists_of_tensors_that_are_gone_are_dropped() -> None:
    kept = found(MASKS["dilated"])
    for limit in range(3):
        table = torch.tensor([limit], dtype=torch.int32)
        found(FunctionMask(lambda b, h, q, k, table=table: q - k < load(table, 0)))
        del table
        gc.collect()
        assert len(kept_lists._kept) == 2
    assert found(MASKS["dilated"]).tiles is kept.tiles


def test_tensors_of_inference_mode_are_read_in_every_call() -> None:
    with torch.inference_mode():
        ids = DOCUMENTS.clone()
        mask = FunctionMask(lambda b, h, q, k: load(ids, q) == load(ids, k))
        assert found(mask).tiles is not found(mask).tiles


def test_few_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_lists, "MOST_KEPT", 2)
    first = found(MASKS["dilated"])
    found(MASKS["strided"])
    assert found(MASKS["dilated"]).tiles is first.tiles
    found(MASKS["image"])  # drops the one that was not used for longest
    assert found(MASKS["dilated"]).tiles is first.tiles
    assert len(kept_lists._kept) == 2
    monkeypatch.setattr(kept_lists, "MOST_BYTES", 1)
    found(MASKS["far-only"])
    assert len(kept_lists._kept) == 1


def test_arguments() -> None:
    lists = found(MASKS["by-head"])
    assert arguments_of(lists) == ((lists.tiles, lists.counts), (0, 10))
    assert arguments_of(None) == ((), ())
    ordered = made(MASKS["by-head"], SIZES["square"], CUTS["sorted"])
    assert arguments_of(ordered) == ((ordered.tiles, ordered.counts, ordered.rows), (0, 10))


# --- No value of a tensor comes to the host ---


class NoHostReads(TorchDispatchMode):
    """Raises where an operation passes values of a tensor to the host, or has a result of a size that depends on them.

    The device is "meta", whose tensors have no values: what this class does not know raises there.
    """

    READS = ("_local_scalar_dense", "item", "nonzero", "unique", "_unique2", "masked_select", "is_nonzero")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in self.READS, f"the host reads a tensor: {func}"
        return func(*args, **(kwargs or {}))


@contextmanager
def no_host_reads() -> Iterator[None]:
    """Inside, nothing may happen that a CUDA graph cannot capture: also no copy of a number from the host."""

    def copies(*_: Any, **__: Any) -> NoReturn:
        raise AssertionError("the device reads a number of the host; torch.full writes one")

    names = ("tensor", "as_tensor", "asarray", "from_numpy")
    with NoHostReads(), mock.patch.multiple(torch, **dict.fromkeys(names, copies)):
        yield


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", MASKS)
def test_nothing_comes_to_the_host_or_from_it(name: str, cut: str) -> None:
    """So that lists can be made while a CUDA graph is captured."""
    key, operands = key_and_operands(MASKS[name])
    operands = dataclasses.replace(operands, tensors=[tensor.to("meta") for tensor in operands.tensors])
    expected = made(MASKS[name], SIZES["square"], CUTS[cut])
    with no_host_reads():
        lists = make_lists(key, operands, SIZES["square"], CUTS[cut], torch.device("meta"))
    assert lists.tiles.shape == expected.tiles.shape
    assert lists.counts.shape == expected.counts.shape
    assert lists[2:4] == expected[2:4]
    assert (lists.rows is None) == (expected.rows is None)


@pytest.mark.parametrize(
    "read",
    [
        lambda x: int(x.sum()),
        lambda x: bool((x > 1).any()),
        lambda x: x.nonzero(),
        lambda x: torch.as_tensor(1, device="meta") + x,
    ],
)
def test_the_check_itself_finds_a_read(read: Any) -> None:
    x = torch.ones(3, device="meta")
    with pytest.raises(AssertionError, match="reads"), no_host_reads():
        read(x)
