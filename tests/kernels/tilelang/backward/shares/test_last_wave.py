"""Where groups are shared in the last wave alone. No GPU, no compiler."""

from __future__ import annotations

import pytest
import torch

from tileattn import Causal, SlidingWindow
from tileattn.call.facts import AttentionCall, BackwardCall
from tileattn.kernels.tilelang.backward.defaults import default
from tileattn.kernels.tilelang.backward.hopper.config import HopperBackwardConfig, HopperWideConfig
from tileattn.kernels.tilelang.backward.jobs import all_jobs
from tileattn.kernels.tilelang.backward.library import BackwardJob
from tileattn.kernels.tilelang.backward.shares import last_wave
from tileattn.kernels.tilelang.backward.shares.choice import split, workspace_bytes
from tileattn.kernels.tilelang.backward.shares.last_wave import (
    Dealt,
    dealt,
    first_keys,
    later_keys,
    whole_part,
)
from tileattn.variant.key import encode

SLOTS = 132


def call_of(dim: int, mask: Causal | SlidingWindow | None = None, deterministic: bool = False) -> BackwardCall:
    variant, _ = encode(mask, ())
    forward = AttentionCall(torch.bfloat16, dim, dim, variant, needs_grad=True, arch="sm_90a")
    return BackwardCall(forward, (True, True, True, False), False, deterministic)


def of(call: BackwardCall, batch: int, seqlen_q: int, heads: int, kv_heads: int, seqlen_k: int = 0) -> Dealt:
    dim = call.forward.head_dim
    k_shape = torch.Size((batch, seqlen_k or seqlen_q, kv_heads, dim))
    return dealt(call, default(call), torch.Size((batch, seqlen_q, heads, dim)), k_shape, SLOTS)


def test_the_keys_of_full_waves_stay_whole() -> None:
    # 414 tiles of keys: three waves of 132 = 3 heads x 44 tiles each, and 18 tiles more.
    assert of(call_of(64), 1, 17608, 12, 3) == Dealt(4, 3 * 44 * 128)
    # 1344 tiles, 10 waves and 24: a multiple of 64 tiles is cut off.
    shares, whole_keys = of(call_of(96), 8, 2688, 32, 8)
    assert shares > 1
    assert whole_keys == 20 * 128


@pytest.mark.parametrize(
    ("batch", "seqlen", "heads", "kv_heads"),
    [
        (1, 4224, 28, 4),  # one full wave
        (1, 3072, 28, 4),  # less than a wave: all keys are shared
        (1, 17608, 3, 3),  # no groups
        (8, 16384, 32, 8),  # many waves
        (1, 2122 * 128, 8, 1),  # 16 waves and 10 tiles
    ],
)
def test_other_calls_are_not_cut(batch: int, seqlen: int, heads: int, kv_heads: int) -> None:
    assert of(call_of(64), batch, seqlen, heads, kv_heads).whole_keys == 0


def test_under_a_causal_mask_all_queries_see_the_first_keys() -> None:
    causal = call_of(128, Causal())
    assert of(causal, 1, 1225, 16, 1, 19349) == Dealt(3, 132 * 128)
    # The first query sees 16,895 keys, then 16,896.
    assert of(causal, 1, 1225, 16, 1, 16895 + 1225 - 1).whole_keys == 0
    assert of(causal, 1, 1225, 16, 1, 16896 + 1225 - 1).whole_keys == 132 * 128
    assert of(causal, 1, 19349, 16, 1).whole_keys == 0
    # One query sees all keys. They fill two waves, so none would be left.
    assert of(causal, 1, 1, 8, 1, 2 * 132 * 128) == Dealt()


def test_masks_whose_tiles_are_guessed_are_not_cut() -> None:
    assert of(call_of(128, SlidingWindow(100, 0)), 1, 1225, 16, 1, 19349).whole_keys == 0


def test_the_workspace_is_at_most_as_large_as_q_in_float32() -> None:
    torch.manual_seed(0)
    cut = 0
    for _ in range(300):
        batch, kv_heads, group = (int(torch.randint(1, most, ())) for most in (5, 6, 9))
        seqlen_q, seqlen_k = (int(torch.randint(100, 9000, ())) for _ in range(2))
        call = call_of(64)
        q_shape = torch.Size((batch, seqlen_q, kv_heads * group, 64))
        k_shape = torch.Size((batch, seqlen_k, kv_heads, 64))
        shares, whole_keys = dealt(call, default(call), q_shape, k_shape, SLOTS)
        assert whole_keys % 128 == 0
        assert 0 <= whole_keys < seqlen_k
        assert shares > 1 or whole_keys == 0
        assert workspace_bytes(call, later_keys(k_shape, whole_keys), shares) <= 4 * q_shape.numel()
        cut += whole_keys > 0
    assert cut > 20


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dim", [64, 80, 96, 112, 128, 160])
def test_both_launches_agree_on_the_sums_of_dq(dim: int, deterministic: bool) -> None:
    for mask in (None, Causal()):
        call = call_of(dim, mask, deterministic)
        of_first, config = whole_part(call, default(call), 2)
        assert of_first == call_of(dim, None, deterministic)
        shared = split(call, default(call), 2)
        assert isinstance(config, HopperBackwardConfig)
        assert isinstance(shared, HopperBackwardConfig)
        assert config.is_valid(of_first.forward)
        assert config.adds_dq == shared.adds_dq == (not deterministic and dim <= 128)
        assert config.order(of_first.forward) == shared.order(call.forward)
        assert config.block_M == shared.block_M


@pytest.mark.parametrize("dim", [192, 256])
def test_first_keys_of_wide_heads(dim: int) -> None:
    """Without a mask; dq is computed once, by another kernel."""
    for mask in (None, Causal()):
        call = call_of(dim, mask)
        of_first, config = whole_part(call, default(call), 2)
        assert (of_first, config) == (call_of(dim), HopperWideConfig())
        assert config.is_valid(of_first.forward)


@pytest.mark.parametrize(
    ("mask", "sizes"), [(None, (2, 3389, 32, 8, 3389)), (Causal(), (4, 1200, 8, 1, 7661))], ids=["full", "causal"]
)
def test_wide_heads_are_not_cut(mask: Causal | None, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """By the model alone these would be."""
    call = call_of(192, mask)
    assert of(call, *sizes).whole_keys == 0
    assert not any(job.call != call for job in all_jobs(call) if isinstance(job, BackwardJob))
    monkeypatch.setattr(last_wave, "is_cut", lambda config: True)
    assert of(call, *sizes).whole_keys > 0


def test_the_kernel_of_the_first_keys_is_compiled_ahead() -> None:
    causal = call_of(128, Causal())
    first, config = whole_part(causal, default(causal), 2)
    assert BackwardJob(first, "main", config) in all_jobs(causal)
    assert {job.call for job in all_jobs(causal) if isinstance(job, BackwardJob)} == {causal, first}
    window = call_of(128, SlidingWindow(100, 0))
    assert {job.call for job in all_jobs(window) if isinstance(job, BackwardJob)} == {window}


def test_shapes_of_keys() -> None:
    k_shape = torch.Size((2, 1000, 3, 64))
    assert first_keys(k_shape, 384) == (2, 384, 3, 64)
    assert later_keys(k_shape, 384) == (2, 616, 3, 64)
    assert later_keys(k_shape, 0) == k_shape
