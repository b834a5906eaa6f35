"""BlockMask: PyTorch's own with their meaning, and lazy ones as PyTorch's."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import BlockMask

import tileattn
from tests.tools.flex_oracle import assert_same, expected, inputs, table_of
from tileattn.compat.flex_attention import create_block_mask, create_mask, flex_attention
from tileattn.compat.flex_attention.blocks import bounds_of, mask_of, states_of

BATCH, HEADS = 2, 4


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def check(block_mask: BlockMask) -> None:
    """out, lse and gradients with the pairs that the description of the format shows."""
    table = table_of(block_mask, BATCH, HEADS)
    q, k, v = leaves = inputs(block_mask.seq_lengths)
    got = flex_attention(q, k, v, block_mask=block_mask, return_lse=True)
    right = expected(q, k, v, None, lambda b, h, q_idx, kv_idx: table[b, h, q_idx, kv_idx])
    assert_same(got, right, leaves)  # type: ignore[arg-type]


def random_blocks(
    planes: tuple[int, int], lengths: tuple[int, int], size: tuple[int, int], seed: int = 0, full: bool = True
) -> BlockMask:
    """Each block is absent, partial or full at random, whatever its mask_mod says; the indices in random order."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns = (-(-length // each) for length, each in zip(lengths, size))
    states = torch.randint(0, 3, (*planes, rows, columns), generator=generator)
    states[:, :, 1:2] = 0  # a row of blocks without any
    lists = [listed(states == kind, generator) for kind in (1, 2)]
    return BlockMask.from_kv_blocks(*lists[0], *(lists[1] if full else (None, None)), size, causal, lengths)


def listed(seen: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Counts and indices. The indices behind the count are undefined, so they are nonsense here."""
    counts = seen.sum(-1).int()
    order = (torch.rand(seen.shape, generator=generator) + (~seen) * 2).argsort(-1).int()
    behind = torch.arange(seen.shape[-1]) >= counts[..., None]
    return counts, order.masked_fill(behind, 99)


@pytest.mark.parametrize("lengths", [(70, 70), (33, 90), (90, 33)])
@pytest.mark.parametrize("planes", [(1, 1), (2, 1), (1, 4), (2, 4)])
def test_blocks_made_by_hand(planes: tuple[int, int], lengths: tuple[int, int]) -> None:
    check(random_blocks(planes, lengths, (16, 8), full=planes != (2, 1)))


@pytest.mark.parametrize(
    ("size", "lengths"), [((1, 1), (20, 30)), ((128, 128), (150, 140)), ((7, 64), (150, 140)), ((64, 7), (150, 140))]
)
def test_sizes_of_blocks(size: tuple[int, int], lengths: tuple[int, int]) -> None:
    check(random_blocks((1, 1), lengths, size, seed=1))


def test_many_tiles() -> None:
    """More rows and keys than a tile of the kernels has, so that bounds of visited blocks skip some."""
    lengths = (280, 300)
    band = create_mask(lambda b, h, q, k: (q - k).abs() < 2, None, None, 18, 19, device="cpu")
    band[:, :, 5:9] = False
    counts, indices = listed(band, torch.Generator().manual_seed(0))
    check(BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=16, mask_mod=causal, seq_lengths=lengths))
    check(BlockMask.from_kv_blocks(counts * 0, indices, counts, indices, 16, causal, lengths))


def test_no_mask_mod() -> None:
    """All that is listed is seen."""
    blocks = random_blocks((1, 1), (48, 48), (16, 16))
    plain = BlockMask.from_kv_blocks(blocks.kv_num_blocks, blocks.kv_indices, BLOCK_SIZE=16)
    check(plain)


def test_pytorchs_mask_of_a_call_without_one() -> None:
    q, k, v = leaves = inputs((33, 90))
    empty = torch_flex._create_empty_block_mask(q, k)
    got = flex_attention(q, k, v, block_mask=empty, return_lse=True)
    assert_same(got, expected(q, k, v, None, None), leaves)  # type: ignore[arg-type]


def test_slices_and_a_new_mask_mod() -> None:
    """Rows 32 to 64 of a larger mask: the blocks are sliced, and the mask_mod is shifted by the user."""
    whole = create_block_mask(causal, None, None, 96, 96, device="cpu", BLOCK_SIZE=32)
    part = whole[:, :, 1]
    with pytest.raises(RuntimeError, match="sliced BlockMask"):
        flex_attention(*inputs((96, 96)), block_mask=part)
    part.mask_mod = lambda b, h, q_idx, kv_idx: whole.mask_mod(b, h, q_idx + 32, kv_idx)
    part.seq_lengths = (32, 96)
    q, k, v = leaves = inputs((32, 96))
    got = flex_attention(q, k, v, block_mask=part, return_lse=True)
    assert_same(got, expected(q, k, v, None, part.mask_mod), leaves)  # type: ignore[arg-type]


@pytest.mark.parametrize("change", ["mask_mod", "kv_num_blocks"])
def test_a_lazy_mask_that_is_changed_has_blocks(change: str) -> None:
    """Blocks of the old mask_mod with the new one, as in PyTorch."""
    lazy, eager = (
        create(causal, None, None, 64, 64, device="cpu", BLOCK_SIZE=16)
        for create in (create_block_mask, torch_flex.create_block_mask)
    )
    for mask in (lazy, eager):
        if change == "mask_mod":
            mask.mask_mod = lambda b, h, q_idx, kv_idx: q_idx > kv_idx + 3
        else:
            mask.kv_num_blocks = torch.tensor([[[1, 0, 1, 0]]], dtype=torch.int32)
    q, k, v = (x.detach() for x in inputs((64, 64)))
    torch.testing.assert_close(*(flex_attention(q, k, v, block_mask=mask) for mask in (lazy, eager)))
    check(eager)


def test_blocks_of_columns_are_not_needed() -> None:
    """PyTorch's backward pass reads them, and infers nothing where they are None."""
    block_mask = create_block_mask(causal, None, None, 64, 64, device="cpu", BLOCK_SIZE=16)
    block_mask.q_num_blocks = block_mask.q_indices = None
    block_mask.full_q_num_blocks = block_mask.full_q_indices = None
    check(block_mask)


@pytest.mark.parametrize("create", [create_block_mask, torch_flex.create_block_mask], ids=["lazy", "blocks"])
def test_pytorchs_paged_attention(create: Any) -> None:
    """PyTorch's experimental cache: its block masks and score functions are of pages; one batch element of keys."""
    paged = pytest.importorskip("torch.nn.attention.experimental._paged_attention")
    lengths, page, pages = (40, 64), 16, 12
    q, k, v = (x.detach() for x in inputs((64, 64)))
    cache = paged.PagedAttention(pages, page, BATCH, device="cpu")
    k_cache, v_cache = (torch.zeros(1, HEADS, pages * page, 8, dtype=q.dtype) for _ in range(2))
    for b, length in enumerate(lengths):
        cache.reserve(torch.tensor(b), torch.tensor(length))
        new = (x[b : b + 1, :, :length] for x in (k, v))
        cache.assign(torch.tensor([b]), torch.arange(length)[None], *new, k_cache, v_cache)
    block_mask = create(causal, BATCH, 1, 64, 64, device="cpu", BLOCK_SIZE=page)
    score = cache.get_score_mod(falling)
    out = flex_attention(q, k_cache, v_cache, score, cache.convert_logical_block_mask(block_mask))
    right = expected(q, k, v, falling, causal)[0]
    for b, length in enumerate(lengths):
        torch.testing.assert_close(out[b, :, :length], right[b, :, :length])  # type: ignore[index]


def falling(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score - (q_idx - kv_idx) * 0.125


def test_a_lazy_mask_is_pytorchs() -> None:
    lazy, eager = (
        create(causal, 2, 4, 70, 90, "cpu", (16, 32)) for create in (create_block_mask, torch_flex.create_block_mask)
    )
    assert isinstance(lazy, BlockMask)
    for question in (
        lambda mask: mask.shape,
        lambda mask: mask.seq_lengths,
        lambda mask: mask.BLOCK_SIZE,
        lambda mask: mask.numel(),
        lambda mask: mask.mask_mod,
        lambda mask: mask.sparsity(),
        lambda mask: mask.to_dense().tolist(),
        str,
        repr,
        lambda mask: str(mask[0, 1]),
        lambda mask: str(mask[:, :, :2]),
        lambda mask: mask._adjust(40, 40).to_dense().tolist(),  # PyTorch 2.11 rounds its lengths up to whole blocks
        lambda mask: str(mask.to("cpu")),
        lambda mask: [str(x) for x in mask.as_tuple()],
        lambda mask: pickle.loads(pickle.dumps(mask)).shape,
        lambda mask: copy.deepcopy(mask).shape,
    ):
        assert question(copy.copy(lazy)) == question(eager)
    assert not lazy.has_blocks  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="no_such"):
        lazy.no_such  # type: ignore[attr-defined]  # noqa: B018


def test_a_captured_tensor_that_is_written_in_place() -> None:
    seen = torch.ones(40, dtype=torch.bool)
    mask = create_block_mask(lambda b, h, q_idx, kv_idx: seen[kv_idx], None, None, 40, 40, device="cpu")
    q, k, v = (x.detach() for x in inputs((40, 40)))
    flex_attention(q, k, v, block_mask=mask)
    seen[::2] = False
    right = expected(q, k, v, None, mask.mask_mod)[0]
    torch.testing.assert_close(flex_attention(q, k, v, block_mask=mask), right)


def test_blocks_that_are_written_in_place() -> None:
    mask = random_blocks((1, 1), (64, 64), (16, 16))
    check(mask)
    mask.kv_num_blocks.zero_()
    check(mask)


@pytest.mark.parametrize("lengths", [(70, 70), (33, 90), (90, 33)])
def test_bounds_of_tiles(lengths: tuple[int, int]) -> None:
    """Tiles of any rows and keys, aligned to no block: what lies outside their bounds is hidden, in both directions."""
    block_mask, shift = random_blocks((2, 4), lengths, (16, 8)), lengths[1] - lengths[0]
    table = table_of(block_mask, BATCH, HEADS)
    bounds = bounds_of(states_of(block_mask, -(-lengths[0] // 16), -(-lengths[1] // 8)) != 0, 16, 8, shift)
    b, h = torch.arange(BATCH)[:, None], torch.arange(HEADS)
    skipped = 0
    for size in (1, 7, 64):
        for dim, length, first in ((2, lengths[0], shift), (3, lengths[1], 0)):
            other = torch.arange(table.shape[5 - dim]) + shift - first
            for lo in range(0, length, size):
                hi = min(lo + size, length)
                in_range = bounds.kv_range if dim == 2 else bounds.q_range
                begin, end = in_range(b, h, torch.tensor(lo + first), torch.tensor(hi - 1 + first), lengths[1])
                seen = table.narrow(dim, lo, hi - lo).any(dim)
                outside = (other < begin[..., None]) | (other >= end[..., None])
                assert not (seen & outside).any()
                skipped += int(outside.sum())
    assert skipped


def test_tritons_kernels() -> None:
    """Forward and backward, in Triton's interpreter: their tiles are those within the bounds of visited blocks."""
    pytest.importorskip("triton")
    block_mask = random_blocks((2, 4), (33, 90), (16, 8))
    table = table_of(block_mask, BATCH, HEADS)
    leaves = [
        torch.nn.functional.pad(x, (0, 8)).detach().requires_grad_() for x in inputs((33, 90), dtype=torch.float32)
    ]
    mask = mask_of(block_mask, *leaves[:2])
    o, lse = tileattn.attention(*leaves, mask=mask, layout="bhsd", return_lse=True, backend="triton")
    right = expected(*leaves, None, lambda b, h, q_idx, kv_idx: table[b, h, q_idx, kv_idx])
    assert_same((o, lse), right, leaves)
