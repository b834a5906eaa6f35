"""BlockSparse beside a matrix of conditions that is written out by rows and columns, in every kind of call."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import tileattn
from tests.tools.tile_counts import exact_kinds
from tests.variant.intervals.test_no_host_reads import OnDevice
from tileattn import BlockSparse, Causal, FunctionMask, Mask, SlidingWindow
from tileattn.variant.intervals.tiles import grid, numbers, tile_kinds, traced
from tileattn.variant.key import encode
from tileattn.variant.sparse import block_lists
from tileattn.variant.sparse.blocks import RowBlocks, for_call, for_tensors

examples = settings(deadline=None, derandomize=True, max_examples=40)
HEADS, KV_HEADS = 4, 2


def expanded(blocks: Tensor, size: tuple[int, int], seqlen_q: int, seqlen_k: int, batch: int) -> Tensor:
    """Whether row i sees key j: bool (batch, HEADS, seqlen_q, seqlen_k)."""
    seen = torch.zeros(batch, HEADS, seqlen_q, seqlen_k, dtype=torch.bool)
    for b in range(batch):
        for h in range(HEADS):
            of_head = {1: 0, HEADS: h, KV_HEADS: h // (HEADS // KV_HEADS)}[blocks.shape[1]]
            for i in range(seqlen_q):
                for block in blocks[b % blocks.shape[0], of_head, i // size[0]].nonzero()[:, 0].tolist():
                    seen[b, h, i, block * size[1] : (block + 1) * size[1]] = True
    return seen


def expected(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, dim=2).transpose(1, 2) for x in (k, v))
    scores = (q.transpose(1, 2) @ k.mT * q.shape[3] ** -0.5).masked_fill(~seen, -torch.inf)
    empty = ~seen.any(-1, keepdim=True)
    weights = scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
    return (weights @ v).transpose(1, 2), scores.logsumexp(-1).masked_fill(empty[..., 0], -torch.inf)


def drawn(seed: int, seqlen_q: int, seqlen_k: int, batch: int = 2, dim: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    shapes = (seqlen_q, HEADS), (seqlen_k, KV_HEADS), (seqlen_k, KV_HEADS)
    q, k, v = (
        torch.randn(batch, *shape, dim, generator=random, dtype=torch.float64).requires_grad_() for shape in shapes
    )
    return q, k, v


def random_blocks(seed: int, size: tuple[int, int], seqlen_q: int, seqlen_k: int, heads: int, more: int = 0) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    rows, columns = (-(-length // each) + more for length, each in zip((seqlen_q, seqlen_k), size))
    blocks = torch.rand(2 if seed % 3 else 1, heads, rows, columns, generator=random) < 0.4
    blocks[:, :, seed % rows] = False  # an empty row and an empty column
    blocks[..., seed % columns] = False
    return blocks


def lists_of(blocks: Tensor, seed: int, counted: bool) -> tuple[Tensor, Tensor | None]:
    """The numbers of the blocks that are seen, shuffled, some twice; with counts anything behind them."""
    random = torch.Generator().manual_seed(seed)
    columns = blocks.shape[3]
    lists = torch.full((*blocks.shape[:3], 2 * columns + 1), 10**6 if counted else -1)
    counts = torch.zeros(blocks.shape[:3], dtype=torch.int32)
    for place in torch.cartesian_prod(*(torch.arange(size) for size in blocks.shape[:3])).tolist():
        at = tuple(place)
        names = blocks[at].nonzero()[:, 0]
        names = torch.cat([names, names[: seed % 3]])
        names = names[torch.randperm(len(names), generator=random)]
        counts[at] = len(names)
        if counted:
            lists[at][: len(names)] = names
        else:  # -1 between them, too
            lists[at][torch.randperm(lists.shape[3], generator=random)[: len(names)]] = names
    return lists.to(torch.int32), counts if counted else None


calls = given(
    seed=st.integers(0, 2**20),
    size=st.sampled_from([(1, 16), (7, 32), (16, 48), (64, 64), (100, 16), (128, 256)]),
    lengths=st.sampled_from([(70, 70), (33, 120), (120, 33), (1, 50), (64, 1), (129, 129)]),
    heads=st.sampled_from([1, KV_HEADS, HEADS]),
    kind=st.sampled_from(["bools", "lists", "counted"]),
    joined=st.sampled_from(["alone", "and", "or", "causal"]),
)


@examples
@calls
def test_dense(seed: int, size: tuple[int, int], lengths: tuple[int, int], heads: int, kind: str, joined: str) -> None:
    seqlen_q, seqlen_k = lengths
    q, k, v = drawn(seed, seqlen_q, seqlen_k)
    blocks = random_blocks(seed, size, seqlen_q, seqlen_k, heads, more=seed % 2 if kind == "bools" else 0)
    mask: Mask = (
        BlockSparse(blocks, size)
        if kind == "bools"
        else BlockSparse(*_arguments(blocks, size, seed, kind == "counted"))
    )
    seen = expanded(blocks, size, seqlen_q, seqlen_k, 2)
    position = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q
    near = (torch.arange(seqlen_k) - position).abs() <= 5
    if joined == "and":
        mask, seen = (
            FunctionMask(lambda b, h, q, k: (q - k) % 3 != h % 2) & mask,
            seen & ((position - torch.arange(seqlen_k)) % 3 != torch.arange(HEADS)[:, None, None] % 2),
        )
    elif joined == "or":
        mask, seen = mask | SlidingWindow(5, 5), seen | near
    elif joined == "causal":
        seen = seen & (torch.arange(seqlen_k) <= position)
    o, lse = tileattn.attention(q, k, v, mask=mask, causal=joined == "causal", return_lse=True)
    o_expected, lse_expected = expected(q, k, v, seen)
    torch.testing.assert_close(o, o_expected)
    torch.testing.assert_close(lse, lse_expected)
    do = torch.randn(o.shape, dtype=o.dtype)
    gradients = torch.autograd.grad(o, (q, k, v), do)
    for got, wanted in zip(gradients, torch.autograd.grad(o_expected, (q, k, v), do)):
        torch.testing.assert_close(got, wanted)


def _arguments(blocks: Tensor, size: Any, seed: int, counted: bool) -> tuple[Any, ...]:
    lists, counts = lists_of(blocks, seed, counted)
    return lists, size, counts


def test_rows_without_a_block() -> None:
    q, k, v = drawn(0, 64, 64)
    o, lse = tileattn.attention(
        q, k, v, mask=BlockSparse(torch.zeros(1, 1, 4, 4, dtype=torch.bool), 16), return_lse=True
    )
    assert (o == 0).all()
    assert (lse == -math.inf).all()


@pytest.mark.parametrize("heads", [1, KV_HEADS, HEADS])
def test_packed(heads: int) -> None:
    """Each sequence counts its rows from its own start, and the blocks are for the longest."""
    lengths_q, lengths_k, size = (50, 0, 70, 1), (60, 20, 33, 64), (16, 32)
    q, k, v = (x[0] for x in drawn(1, sum(lengths_q), sum(lengths_k), batch=1))
    ends = [torch.tensor([0, *each]).cumsum(0).int() for each in (lengths_q, lengths_k)]
    blocks = torch.rand(4, heads, 5, 2, generator=torch.Generator().manual_seed(3)) < 0.5
    o, lse = tileattn.varlen_attention(q, k, v, *ends, 70, 64, mask=BlockSparse(blocks, size), return_lse=True)
    for i, (rows, keys) in enumerate(zip(lengths_q, lengths_k)):
        of_q, of_k = slice(ends[0][i], ends[0][i + 1]), slice(ends[1][i], ends[1][i + 1])
        seen = expanded(blocks[i : i + 1], size, rows, keys, 1)
        o_expected, lse_expected = expected(q[None, of_q], k[None, of_k], v[None, of_k], seen)
        torch.testing.assert_close(o[None, of_q], o_expected)
        torch.testing.assert_close(lse[None, :, of_q], lse_expected)


def test_a_cache() -> None:
    """Rows of q are the call's own, and blocks of keys those of the cache."""
    q, k, v = (x.detach() for x in drawn(2, 3, 100))
    lengths = torch.tensor([70, 100], dtype=torch.int32)
    blocks = torch.rand(2, KV_HEADS, 3, 7, generator=torch.Generator().manual_seed(4)) < 0.5
    o = tileattn.decode(q, k, v, lengths, mask=BlockSparse(blocks, (1, 16)))
    for i, length in enumerate(lengths.tolist()):
        seen = expanded(blocks[i : i + 1], (1, 16), 3, length, 1)
        seen = seen & (torch.arange(length) <= torch.arange(length - 3, length)[:, None])
        torch.testing.assert_close(
            o[i : i + 1], expected(q[i : i + 1], k[i : i + 1, :length], v[i : i + 1, :length], seen)[0]
        )


def test_blocks_that_are_written_in_place_are_read_again() -> None:
    q, k, v = (x.detach() for x in drawn(5, 64, 64))
    blocks, lists = torch.zeros(1, 1, 4, 4, dtype=torch.bool), torch.full((1, 1, 4, 2), -1)
    masks = BlockSparse(blocks, 16), BlockSparse(lists, 16)
    assert all((tileattn.attention(q, k, v, mask=mask) == 0).all() for mask in masks)
    blocks[..., 2], lists[..., 1] = True, 2
    wanted = tileattn.attention(q, k, v, mask=FunctionMask(lambda b, h, q, k: (k >= 32) & (k < 48)))
    for mask in masks:
        torch.testing.assert_close(tileattn.attention(q, k, v, mask=mask), wanted)


def test_under_torch_compile() -> None:
    q, k, v = (x.detach() for x in drawn(6, 64, 64))
    blocks = random_blocks(4, (16, 32), 64, 64, HEADS)
    lists, _ = lists_of(blocks, 1, False)

    def call(q: Tensor, k: Tensor, v: Tensor, tensor: Tensor) -> Tensor:
        return tileattn.attention(q, k, v, mask=BlockSparse(tensor, (16, 32)) & Causal())  # type: ignore[return-value]

    compiled = torch.compile(call, backend="eager", fullgraph=True)
    for tensor in (blocks, lists):
        torch.testing.assert_close(compiled(q, k, v, tensor), call(q, k, v, tensor))


# --- What kernels know of tiles ---


def in_call(blocks: Tensor, size: tuple[int, int], seqlen_q: int, seqlen_k: int) -> Mask:
    mask = for_call(
        BlockSparse(blocks, size), lambda: (2, HEADS, KV_HEADS, seqlen_q, seqlen_k), lambda: seqlen_k - seqlen_q
    )
    assert isinstance(mask, RowBlocks)
    return mask


@examples
@given(
    seed=st.integers(0, 2**20),
    size=st.sampled_from([(1, 16), (5, 16), (24, 48), (64, 64)]),
    lengths=st.sampled_from([(70, 70), (33, 120), (120, 33)]),
    tile=st.sampled_from([(16, 16), (64, 32), (20, 48)]),
    heads=st.sampled_from([1, KV_HEADS, HEADS]),
)
def test_intervals_are_exact(
    seed: int, size: tuple[int, int], lengths: tuple[int, int], tile: tuple[int, int], heads: int
) -> None:
    seqlen_q, seqlen_k = lengths
    blocks = random_blocks(seed, size, seqlen_q, seqlen_k, heads)
    mask = in_call(blocks, size, seqlen_q, seqlen_k)
    q, k = grid(seqlen_q, seqlen_k, *tile)
    kinds = tile_kinds(*traced(mask), q, k, numbers(2, 4), numbers(HEADS, 3))
    seen = expanded(blocks, size, seqlen_q, seqlen_k, 2)
    rows = tuple(end - (seqlen_k - seqlen_q) for end in q[:2])
    for b in range(2):
        for h in range(HEADS):
            of_head = kinds[b if kinds.shape[0] > 1 else 0, h if kinds.shape[1] > 1 else 0]
            assert torch.equal(of_head, exact_kinds(seen[b, h], rows, k[:2]))  # type: ignore[arg-type]


@examples
@given(
    seed=st.integers(0, 2**20),
    size=st.sampled_from([(1, 16), (5, 16), (24, 48)]),
    lengths=st.sampled_from([(70, 70), (33, 120), (120, 33)]),
    heads=st.sampled_from([1, KV_HEADS, HEADS]),
)
def test_ranges_contain_what_is_seen(seed: int, size: tuple[int, int], lengths: tuple[int, int], heads: int) -> None:
    seqlen_q, seqlen_k = lengths
    first = seqlen_k - seqlen_q
    blocks = random_blocks(seed, size, seqlen_q, seqlen_k, heads)
    mask, seen = in_call(blocks, size, seqlen_q, seqlen_k), expanded(blocks, size, seqlen_q, seqlen_k, 2)
    b, h = torch.arange(2)[:, None], torch.arange(HEADS)
    place_q, place_k = torch.arange(seqlen_q) + first, torch.arange(seqlen_k)
    for start in range(0, seqlen_q, 8):
        stop = min(start + 11, seqlen_q)
        lo, hi = mask.kv_range(b, h, torch.tensor(start + first), torch.tensor(stop - 1 + first), seqlen_k)
        inside = (place_k >= lo[..., None]) & (place_k < hi[..., None])
        assert not (seen[:, :, start:stop].any(2) & ~inside).any()
    for start in range(0, seqlen_k, 8):
        stop = min(start + 11, seqlen_k)
        lo, hi = mask.q_range(b, h, torch.tensor(start), torch.tensor(stop - 1), seqlen_k)
        inside = (place_q >= lo[..., None]) & (place_q < hi[..., None])
        assert not (seen[..., start:stop].any(3) & ~inside).any()


def test_ranges_leave_out_the_ends() -> None:
    blocks = torch.eye(4, dtype=torch.bool)[None, None]
    mask = in_call(blocks, (16, 16), 64, 64)
    zero = torch.tensor(0)
    assert [int(x) for x in mask.kv_range(zero, zero, torch.tensor(16), torch.tensor(47), 64)] == [16, 48]
    assert [int(x) for x in mask.q_range(zero, zero, torch.tensor(32), torch.tensor(47), 64)] == [32, 48]


def test_nothing_is_read_on_the_host() -> None:
    q, k = torch.empty(2, 64, HEADS, 16, device="meta"), torch.empty(2, 80, KV_HEADS, 16, device="meta")
    for blocks in (
        torch.empty(2, HEADS, 4, 5, dtype=torch.bool, device="meta"),
        torch.empty(2, HEADS, 4, 9, dtype=torch.int32, device="meta"),
    ):
        with OnDevice("meta") as mode:
            assert for_tensors(BlockSparse(blocks, 16) & Causal(), q, k) is not None
        assert mode.count <= 55


def test_sizes_of_blocks_are_in_the_key_and_nothing_else() -> None:
    blocks = torch.ones(2, 4, 4, 4, dtype=torch.bool)
    keys = [
        encode(in_call(blocks, size, *lengths), ())[0]
        for size, lengths in (((16, 32), (64, 64)), ((16, 32), (50, 60)), ((16, 48), (64, 64)))
    ]
    assert keys[0] == keys[1] != keys[2]
    assert keys[0].endswith("i,-,=16,=32)")


# --- Errors ---

BOOLS = torch.ones(1, 1, 4, 4, dtype=torch.bool)
LISTS = torch.zeros(1, 1, 4, 4, dtype=torch.int32)


@pytest.mark.parametrize(
    ("error", "arguments", "text"),
    [
        (TypeError, ([[True]], 16), "blocks must be a bool tensor (batch or 1, heads, kv heads or 1, blocks of q, bl"),
        (TypeError, (BOOLS.float(), 16), "got torch.float32"),
        (ValueError, (BOOLS[0], 16), "got shape (1, 4, 4)"),
        (ValueError, (BOOLS, 8), "k a multiple of 16 from 16 to 256 (so is an int for both), got 8"),
        (ValueError, (BOOLS, (16, 24)), "got (16, 24)"),
        (ValueError, (BOOLS, (16, 272)), "got (16, 272)"),
        (ValueError, (BOOLS, (0, 16)), "block_size must lie in 1 .. 2**30 - 1, got 0"),
        (ValueError, (BOOLS, (16, 16, 16)), "got (16, 16, 16)"),
        (TypeError, (BOOLS, 16.0), "got 16.0"),
        (ValueError, (BOOLS, 16, LISTS[..., 0]), "counts is for blocks that are lists of numbers"),
        (TypeError, (LISTS, 16, [1]), "counts must be an integer tensor (1, 1, 4), as blocks is, got list"),
        (ValueError, (LISTS, 16, LISTS), "counts must have the shape (1, 1, 4) of blocks, got (1, 1, 4, 4)"),
    ],
)
def test_wrong_arguments(error: type[Exception], arguments: tuple[Any, ...], text: str) -> None:
    with pytest.raises(error, match=f"^BlockSparse: .*{re.escape(text)}"):
        BlockSparse(*arguments)


@pytest.mark.parametrize("shape", [(3, 1, 4, 4), (1, 3, 4, 4), (1, 1, 3, 4), (1, 1, 4, 3)])
def test_blocks_that_do_not_fit_a_call(shape: tuple[int, ...]) -> None:
    q, k, v = drawn(0, 64, 64)
    text = (
        r"BlockSparse: blocks must have shape \(batch or 1, heads, kv heads or 1, blocks of q, blocks of k\), with "
        r"batch 2, 4 heads, 2 kv heads, at least 4 blocks of 16 rows of q and at least 4 blocks of 16 rows of k, got \("
    )
    with pytest.raises(ValueError, match=text):
        tileattn.attention(q, k, v, mask=BlockSparse(torch.ones(shape, dtype=torch.bool), 16))


def test_lists_need_no_number_of_columns() -> None:
    q, k, v = drawn(0, 64, 64)
    lists = torch.zeros(1, 1, 3, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match="at least 4 blocks of 16 rows of q, got"):
        tileattn.attention(q, k, v, mask=BlockSparse(lists, 16))


@pytest.mark.parametrize("wrong", [4, -2, 2**31 - 1])
def test_numbers_out_of_range(wrong: int) -> None:
    q, k, v = drawn(0, 64, 64)
    lists = torch.zeros(2, 1, 4, 2, dtype=torch.int32)
    lists[1, 0, 2, 1] = wrong
    text = rf"numbers in 0 \.\. 3 \(ceil\(seqlen_k / block_size\) - 1\), or -1, got {wrong} at \(1, 0, 2, 1\)"
    with pytest.raises(ValueError, match=text):
        tileattn.attention(q, k, v, mask=BlockSparse(lists, 16))
    counts = torch.ones(2, 1, 4, dtype=torch.int64)
    tileattn.attention(q, k, v, mask=BlockSparse(lists, 16, counts))  # it does not count


def test_numbers_out_of_range_are_left_out_and_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, whose numbers the host does not read."""
    status = torch.zeros(1, dtype=torch.int32)
    monkeypatch.setattr(block_lists, "STATUS", _Status(status))
    lists = torch.tensor([[3, -1, 1], [1, 4, -7], [0, 0, -1]])[:, None, None]
    monkeypatch.setattr(block_lists, "is_on_host", lambda x: False)
    named = block_lists.as_conditions(lists, None, 4)
    assert named[:, 0, 0].tolist() == [[False, True, False, True], [False, True, False, False], [True] + [False] * 3]
    assert status.tolist() == [2]
    block_lists.as_conditions(lists[2:], None, 4)
    assert status.tolist() == [2]


class _Status:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def raise_pending(self) -> None:
        pass

    def of(self, device: torch.device) -> Tensor:
        return self.tensor

    def report(self, device: torch.device) -> None:
        pass
