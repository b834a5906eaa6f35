"""Which calls have bits of their mixed tiles, how much room these take, and what keeps them; on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tileattn import BlockSparse, Causal, Dilated, FunctionMask, Mask, SlidingWindow, SoftCap
from tileattn.bench import warmup
from tileattn.bench.sparse_masks import NAMES, pattern
from tileattn.call.facts import AttentionCall, BackwardCall
from tileattn.kernels import kept_lists
from tileattn.kernels.kept_lists import arguments_of, forget_lists, lists_of
from tileattn.kernels.tile_lists import Cut, Sizes, make_lists
from tileattn.kernels.tilelang.backward import launch as backward_launch
from tileattn.kernels.tilelang.backward import listed
from tileattn.kernels.tilelang.forward import defaults
from tileattn.kernels.tilelang.forward.config import HopperConfig
from tileattn.kernels.tilelang.forward.launch import launched
from tileattn.kernels.tilelang.lists import bits
from tileattn.kernels.tilelang.lists.bits import bits_jobs, bits_pay, may_have_bits, new_bits
from tileattn.kernels.tilelang.lists.library import BitsJob, bits_key
from tileattn.math import load
from tileattn.variant.key import encode
from tileattn.variant.sparse.blocks import CallSizes

CPU = torch.device("cpu")
DILATED = Dilated(511, dilation=4)
IDS, LIMITS = torch.arange(4096) // 100, torch.tensor([9, 8])
BY_BATCH = FunctionMask(lambda b, h, q, k: (k < load(LIMITS, b)) & ((q - k) % 3 != 0))


def call_of(mask: Mask | None, dim: int = 64, **flags: Any) -> AttentionCall:
    return AttentionCall(torch.bfloat16, dim, dim, encode(mask, ())[0], arch="sm_90a", **flags)


def shape(heads: int = 4, batch: int = 1, seqlen: int = 4096, dim: int = 64) -> torch.Size:
    return torch.Size((batch, seqlen, heads, dim))


# --- Which calls ---


def test_enough_heads_and_batch_elements_share_a_plane() -> None:
    for mask, rows, expected in (
        (DILATED, shape(4), True),
        (DILATED, shape(3), False),
        (DILATED, shape(1, 4), True),
        (pattern("windows-by-head", 512, 8, "cpu").mask, shape(8), False),
        (pattern("windows-by-head", 512, 8, "cpu").mask, shape(8, 4), True),
        (BY_BATCH, shape(2, 8), False),
        (BY_BATCH, shape(4, 8), True),
    ):
        assert bits_pay(call_of(mask), rows) == expected
    assert not bits_pay(call_of(DILATED, packed=True), shape(16))


def test_masks_that_cost_enough() -> None:
    """Not one comparison, and not blocks, whose tiles are whole or hidden."""
    for name in NAMES:
        assert may_have_bits(encode(pattern(name, 512, 2, "cpu").mask, ())[0]) == (name != "blocks")
    blocks = BlockSparse(torch.ones(1, 1, 8, 8, dtype=torch.bool), 128).in_call(CallSizes(1, 4, 4, 1024, 1024, 0))
    for mask in (blocks, FunctionMask(lambda b, h, q, k: k <= q), Causal(), SlidingWindow(9, 0)):
        assert not may_have_bits(encode(mask, ())[0])
    assert may_have_bits(encode(FunctionMask(lambda b, h, q, k: load(IDS, q) == load(IDS, k)), ())[0])


def test_the_forward_pass_is_launched_with_bits() -> None:
    call = call_of(DILATED)
    usual = defaults.default(call)
    assert isinstance(usual, HopperConfig)
    for heads, expected in ((4, True), (2, False)):
        config = launched(usual, call, shape(heads), shape(heads))
        assert isinstance(config, HopperConfig)
        assert (config.listed, config.bits) == (True, expected)
    assert not launched(usual, call, shape(4, 1, 100), shape(4)).bits  # type: ignore[union-attr]
    images = call_of(pattern("images-text", 512, 4, "cpu").mask)
    with_words = HopperConfig(128, 128, mask_words=True)
    for heads, expected in ((8, True), (2, False)):  # a row's range is not looked for where there are bits
        config = launched(with_words, images, shape(heads), shape(heads))
        assert isinstance(config, HopperConfig)
        assert (config.bits, config.mask_words) == (expected, not expected)


def test_words_by_the_expression_need_no_bits() -> None:
    call = call_of(FunctionMask(lambda b, h, q, k: (k <= q) & (k > q - 100)))
    config = HopperConfig(128, 128, mask_words=True)
    assert defaults.with_lists(config, call, True) == defaults.with_lists(config, call)
    assert defaults.with_lists(HopperConfig(128, 128), call, True).bits


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_the_backward_pass_is_launched_with_bits(dim: int) -> None:
    """Not the kernels of wide heads, nor that for dq alone."""
    for heads, mask in ((4, DILATED), (2, DILATED), (4, pattern("loaded-ids", 512, 4, "cpu").mask)):
        call = BackwardCall(call_of(mask, dim, needs_grad=True), (True, True, True, False))
        config, _ = backward_launch.configured(call, shape(heads, dim=dim), shape(heads, dim=dim))
        assert config is not None
        assert config.listed  # type: ignore[union-attr]
        assert config.bits == (heads == 4 and dim <= 128)  # type: ignore[union-attr]
        main, queries = listed.cuts_of(call, config)
        assert main.bits == config.bits  # type: ignore[union-attr]
        assert queries is None or not queries.bits


def test_defaults_have_both() -> None:
    """So that `tileattn warmup` compiles what calls of any size take."""
    found = {each.bits for each in defaults.defaults(call_of(DILATED)) if isinstance(each, HopperConfig)}
    assert found == {False, True}
    packed = call_of(DILATED, packed=True)
    assert not any(each.bits for each in defaults.defaults(packed) if isinstance(each, HopperConfig))
    for call, expected in ((call_of(DILATED), [BitsJob(call_of(DILATED).variant, "sm_90a")]), (packed, [])):
        assert [job for job in warmup.jobs([call]) if isinstance(job, BitsJob)] == expected


# --- Kernels ---


def test_one_kernel_for_all_numbers_and_modifications() -> None:
    given = (DILATED, ()), (Dilated(77, dilation=9), ()), (DILATED, (SoftCap(9.0),))
    plain, other, capped = (encode(mask, mods)[0] for mask, mods in given)
    assert bits_key(plain, "sm_90a") == bits_key(other, "sm_90a") == bits_key(capped, "sm_90a")
    strided = encode(pattern("strided", 512, 1, "cpu").mask, ())[0]
    assert bits_key(plain, "sm_90a") != bits_key(strided, "sm_90a")
    (job,) = bits_jobs(plain, "sm_90a")
    assert job.key == bits_key(plain, "sm_90a")
    assert "Dilated" in str(job)
    assert bits_jobs(plain, "sm_80") == bits_jobs("", "sm_90a") == bits_jobs(call_of(Causal()).variant, "sm_90a") == ()


# --- Room ---


def test_room_for_all_tiles_or_as_many_as_the_budget_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    variant, operands = encode(DILATED, ())
    for cut, shape_of_tile in (
        (Cut(128, 128, longest_first=True), (1, 128, 4)),
        (Cut(192, 176), (2, 192, 4)),
        (Cut(64, 128, by_keys=True, masks_queries=True), (1, 128, 4)),
    ):
        lists = make_lists(variant, operands, Sizes(1, 4, 1000, 1100), cut, CPU)
        words, before = new_bits(cut, lists)
        assert words.shape == (lists.tiles.numel(), *shape_of_tile)
        assert words.dtype == torch.uint32
        mixed = lists.counts[:, 0].tolist()
        assert before.tolist() == [sum(mixed[:line]) for line in range(len(mixed))]
        assert before.dtype == torch.int32
        with monkeypatch.context() as patch:
            patch.setattr(bits, "MOST_BYTES", 3 * words[0].nbytes + 5)
            assert new_bits(cut, lists)[0].shape == (3, *shape_of_tile)
            patch.setattr(bits, "MOST_BYTES", 5)
            assert len(new_bits(cut, lists)[0]) == 1


def test_the_budget_is_a_part_of_what_is_kept() -> None:
    assert 2 * bits.MOST_BYTES < kept_lists.MOST_BYTES  # those of both passes stay


# --- What is kept ---


@pytest.fixture
def _nothing_kept() -> Iterator[None]:
    forget_lists()
    yield
    forget_lists()


@pytest.mark.usefixtures("_nothing_kept")
def test_bits_are_kept_with_their_lists() -> None:
    """Found again at the same versions; a launch gets them behind the lists; their bytes count."""
    ids = torch.arange(1000) // 100
    variant, operands = encode(FunctionMask(lambda b, h, q, k: load(ids, q) == load(ids, k)), ())
    sizes, cut = Sizes(1, 4, 1000, 1000), Cut(128, 128, longest_first=True, bits=True)

    def make(*given: Any) -> Any:
        lists = make_lists(*given)
        if not given[3].bits:
            return lists
        words, before = new_bits(given[3], lists)
        return lists._replace(before=before, bits=words)

    first = lists_of(make, variant, operands, sizes, cut, CPU)
    assert lists_of(make, variant, operands, sizes, cut, CPU) is first
    tensors, _ = arguments_of(first)
    assert [id(each) for each in tensors] == [
        id(each) for each in (first.tiles, first.counts, first.rows, first.before, first.bits)
    ]
    (kept,) = kept_lists._kept.values()
    assert kept.bytes == sum(each.nbytes for each in tensors)
    without = lists_of(make, variant, operands, sizes, cut._replace(bits=False), CPU)
    assert without.bits is None
    assert len(arguments_of(without)[0]) == 3
    ids[0] = 7
    assert lists_of(make, variant, operands, sizes, cut, CPU) is not first
