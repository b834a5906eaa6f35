"""How many kv heads' tiles of keys start side by side in the backward pass. No GPU, no compiler."""

from __future__ import annotations

import pytest
import torch

from tileattn import Causal, SlidingWindow
from tileattn.call.facts import AttentionCall, BackwardCall
from tileattn.kernels.tilelang.backward.config import BackwardConfig
from tileattn.kernels.tilelang.backward.defaults import default
from tileattn.kernels.tilelang.backward.shares import order
from tileattn.kernels.tilelang.backward.shares.choice import chosen, split
from tileattn.kernels.tilelang.backward.shares.order import heads_together
from tileattn.kernels.tilelang.backward.shares.side_by_side import kv_heads_side_by_side
from tileattn.variant.key import encode

SLOTS = 132


def call_of(dim: int, dim_v: int, mask: object = None, packed: bool = False) -> BackwardCall:
    variant, _ = encode(mask, ())
    forward = AttentionCall(torch.bfloat16, dim, dim_v, variant, arch="sm_90a", needs_grad=True, packed=packed)
    return BackwardCall(forward, (True, True, True, False), False, False)


def together(call: BackwardCall, batch: int, seqlens: tuple[int, int], heads: int, kv_heads: int) -> tuple[int, int]:
    """By the cache alone, and as chosen."""
    q_shape = torch.Size((batch, seqlens[0], heads, call.forward.head_dim))
    k_shape = torch.Size((batch, seqlens[1], kv_heads, call.forward.head_dim))
    shares = chosen(call, default(call), q_shape, k_shape, SLOTS)
    config = split(call, default(call), shares)
    by_cache = kv_heads_side_by_side(call, q_shape, seqlens[1], shares * kv_heads)
    return by_cache, heads_together(call, config, q_shape, k_shape, shares, SLOTS)


@pytest.mark.parametrize(
    ("dims", "batch", "seqlens", "heads", "kv_heads", "by_cache", "side"),
    [
        ((64, 64), 2, (2141, 2141), 64, 16, 4, 8),  # 1.14 times as fast
        ((64, 64), 1, (2553, 6001), 64, 16, 4, 8),  # 1.05
        ((96, 96), 1, (15626, 15626), 14, 7, 1, 7),  # 1.14
        ((128, 128), 2, (6912, 6912), 7, 7, 2, 7),  # 1.13
        ((128, 128), 8, (2476, 2476), 20, 4, 4, 8),  # 1.07; 16: 1.02, 32: 0.97
        ((128, 128), 24, (741, 741), 20, 4, 8, 16),  # 1.05; 96: 0.80
        ((128, 128), 5, (1333, 1333), 32, 16, 10, 10),  # 20: 1.02, 80: 0.84
        ((192, 128), 4, (1408, 1408), 28, 7, 4, 14),  # 1.15
        ((192, 128), 8, (1718, 1718), 10, 5, 5, 20),  # 1.09
        ((192, 128), 2, (5957, 5957), 32, 8, 4, 8),  # 1.04
        ((160, 160), 2, (3449, 3449), 21, 3, 3, 18),  # 1.08
    ],
)
def test_heads_follow_the_cache_unless_the_end_costs_more(
    dims: tuple[int, int], batch: int, seqlens: tuple[int, int], heads: int, kv_heads: int, by_cache: int, side: int
) -> None:
    """As measured on an H200 (benchmarks/results/backward/order-h200.txt)."""
    assert together(call_of(*dims, Causal()), batch, seqlens, heads, kv_heads) == (by_cache, side)


@pytest.mark.parametrize(
    ("batch", "seqlen", "heads", "kv_heads", "by_cache", "side"),
    [
        (2, 3000, 28, 7, 4, 7),  # 14 would end as early, but share less of what they read
        (4, 6000, 16, 4, 4, 4),  # 8 would save less than 3 %
    ],
)
def test_more_heads_must_be_worth_it(
    batch: int, seqlen: int, heads: int, kv_heads: int, by_cache: int, side: int
) -> None:
    """By the model alone."""
    assert together(call_of(128, 128, Causal()), batch, (seqlen, seqlen), heads, kv_heads) == (by_cache, side)


def test_long_heads_stay_in_the_order_of_the_cache() -> None:
    assert together(call_of(128, 128, Causal()), 1, (131072, 131072), 4, 4) == (1, 1)


def test_of_many_blocks_nothing_is_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take the host longer than it could save."""
    monkeypatch.setattr(order, "run_time", None)
    assert together(call_of(128, 128, Causal()), 4, (8192, 8192), 32, 32) == (4, 4)


def test_other_masks_and_schedules_do_too() -> None:
    sizes = 2, (6912, 6912), 7, 7
    assert together(call_of(128, 128, Causal()), *sizes) == (2, 7)
    for other in (
        call_of(128, 128),
        call_of(128, 128, SlidingWindow(500, 0)),
        call_of(128, 128, Causal(), packed=True),
    ):
        by_cache, side = together(other, *sizes)
        assert by_cache == side
    causal, shape = call_of(128, 128, Causal()), torch.Size((2, 6912, 7, 128))
    assert heads_together(causal, BackwardConfig(64, 64, 2, 128), shape, shape, 1, SLOTS) == 2
