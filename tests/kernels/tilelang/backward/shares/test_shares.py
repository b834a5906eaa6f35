"""The number of blocks that share a group's heads: the model of waves, computed by hand here."""

from __future__ import annotations

import pytest
import torch

from tileattn.call.facts import CAUSAL, AttentionCall, BackwardCall
from tileattn.kernels.tilelang.backward.shares.side_by_side import kv_heads_side_by_side
from tileattn.kernels.tilelang.backward.shares.waves import (
    Costs,
    Groups,
    best_shares,
    costs_of,
    finish_time,
    heads_of_share,
    predicted,
    visible_tiles,
)

SLOTS = 132  # one block on each of an H200's multiprocessors
FREE = Costs()


def test_visible_tiles_of_a_causal_mask() -> None:
    # 300 queries in tiles of 128: three; those that see keys from 0, 128 and 256 on begin at row 0, 128 and 256.
    assert visible_tiles(300, 300, 128, 128, True) == (3, 2, 1)
    assert visible_tiles(300, 300, 128, 128, False) == (3, 3, 3)
    # The last 100 of 300 positions: all see the first 200 keys; keys from 256 on are seen from row 56 on.
    assert visible_tiles(100, 300, 64, 128, True) == (2, 2, 2)
    # Positions -200 .. 99: no query before row 200 sees a key.
    assert visible_tiles(300, 100, 64, 128, True) == (2,)
    # Beyond key 128 of 300, tiles of 64 rows begin with that of row 128.
    assert visible_tiles(300, 300, 64, 128, True) == (5, 3, 1)


def test_the_heads_of_a_group_are_dealt_evenly() -> None:
    assert [heads_of_share(7, 3, share) for share in range(3)] == [3, 2, 2]
    assert [heads_of_share(8, 4, share) for share in range(4)] == [2, 2, 2, 2]


def test_blocks_run_in_waves() -> None:
    assert finish_time([2.0] * 5, 2) == 6
    assert finish_time([5.0, 1, 1, 1, 1, 1], 2) == 5


def test_28_heads_over_4_at_3072_tokens() -> None:
    """96 blocks of 7 heads on 132 slots: one wave of 7 heads, where 672 / 132 = 5.1 would do."""
    groups = Groups(1, 4, 7, visible_tiles(3072, 3072, 128, 128, False))
    # Two shares: 96 of 4 heads, 96 of 3. 36 of the 3 start at once, 36 after 3, the last 24 after 4.
    assert predicted(groups, 2, SLOTS, FREE) == 24 * 7
    # Three: 96 of 3, 192 of 2. 36 at 0, 2 and 4, and 96 at 3: all 192 have started by 4.
    assert predicted(groups, 3, SLOTS, FREE) == 24 * 6
    assert predicted(groups, 7, SLOTS, FREE) == 24 * 6
    assert best_shares(groups, SLOTS, 3, FREE) == 3
    assert best_shares(groups, SLOTS, 2, FREE) == 1  # nothing gained
    assert best_shares(groups, SLOTS, 3, costs_of(128, 128, 64, 64, SLOTS, False)) == 3


def test_6_heads_over_1() -> None:
    """32 blocks of 6 heads: one wave on a quarter of the slots. Three shares of 2 heads are 96 blocks."""
    groups = Groups(1, 1, 6, visible_tiles(4096, 4096, 64, 128, False))
    assert predicted(groups, 1, SLOTS, FREE) == 64 * 6
    assert predicted(groups, 3, SLOTS, FREE) == 64 * 2
    assert best_shares(groups, SLOTS, 3, costs_of(64, 128, 128, 128, SLOTS, False)) == 3


def test_the_cost_of_adding_shares_may_exceed_what_they_save() -> None:
    groups = Groups(1, 1, 6, visible_tiles(256, 256, 128, 128, False))  # 2 blocks of 12 tiles
    assert predicted(groups, 3, SLOTS, Costs(split_start=2, launch=5, add=0.5, store=0.25)) == 2 + 4 + 5 + 2 * 1.75
    assert best_shares(groups, SLOTS, 3, Costs(start=2, split_start=2, launch=1, add=0.5, store=0.25)) == 3
    assert best_shares(groups, SLOTS, 3, Costs(start=2, split_start=2, launch=9, add=0.5, store=0.25)) == 1


@pytest.mark.parametrize(
    ("batch", "seqlen", "kv_heads", "group", "causal"),
    [
        (4, 4096, 8, 4, False),  # 1024 blocks: 7.8 waves
        (4, 4096, 8, 4, True),  # the same, long blocks first
        (8, 4096, 16, 2, False),  # more waves than are looked at
        (2, 8448, 1, 8, False),  # 132 blocks: one full wave
        (1, 128, 16, 1, False),  # no group
        (1, 3072, 4, 1, True),
    ],
)
def test_where_a_split_gains_nothing_there_is_none(
    batch: int, seqlen: int, kv_heads: int, group: int, causal: bool
) -> None:
    tiles = visible_tiles(seqlen, seqlen, 80, 128, causal)
    groups = Groups(batch, kv_heads, group, tiles, lambda shares: batch * kv_heads * shares if causal else 1)
    assert best_shares(groups, SLOTS, max(group // 2, 1), costs_of(80, 128, 128, 128, SLOTS, causal)) == 1


def test_costs_scale_with_tiles_and_slots() -> None:
    """Seconds: 128 queries by 128 keys at D64 are 10.5 MFLOP, of which a slot has its part of the speed."""
    costs = costs_of(128, 128, 64, 64, SLOTS, False)
    assert costs.tile == pytest.approx(2 * 128 * 128 * 5 * 64 / (565e12 / SLOTS))
    assert costs_of(64, 128, 64, 64, SLOTS, False).tile == pytest.approx(costs.tile / 2)
    assert costs_of(128, 128, 128, 128, SLOTS, False).tile == pytest.approx(2 * costs.tile * 565 / 640)
    assert costs.add == 2 * costs.store == pytest.approx(128 * 128 * 4 / 1.45e12)
    groups = Groups(1, 1, 2, (3,))
    assert predicted(groups, 1, 1, Costs(tile=2, start=10, split_start=20)) == 10 + 2 * 3 * 2
    assert predicted(groups, 2, 1, Costs(tile=2, start=10, split_start=20)) == 2 * (20 + 3 * 2)


def test_long_walks_under_a_causal_mask_cost_more() -> None:
    """Of 8 heads, each takes 1.15 times as long if one block walks over all, and 1 time if two blocks share them."""
    costs = costs_of(64, 128, 128, 128, SLOTS, True)
    assert costs.of_walk(8, 10) == pytest.approx(80 * 1.15 * costs.tile)
    assert costs.of_walk(4, 10) == 40 * costs.tile
    assert costs_of(64, 128, 128, 128, SLOTS, False).of_walk(8, 10) == 80 * costs.tile
    assert costs_of(128, 128, 64, 64, SLOTS, True).of_walk(8, 10) == pytest.approx(80 * costs.tile * 640 / 565)
    across_lines = costs_of(64, 128, 112, 112, SLOTS, True)
    assert across_lines.of_walk(8, 10) == pytest.approx(80 * 1.36 * across_lines.tile)
    assert across_lines.of_walk(2, 10) == 20 * across_lines.tile


def test_a_kernel_without_shares_may_have_other_tiles() -> None:
    groups = Groups(1, 1, 6, visible_tiles(4096, 4096, 64, 128, False))
    assert predicted(groups, 3, SLOTS, FREE) == 128
    assert best_shares(groups, SLOTS, 3, FREE, whole=129.0) == 1  # less than 2 % would be saved
    assert best_shares(groups, SLOTS, 3, FREE, whole=132.0) == 3


def test_long_blocks_start_first_where_heads_run_side_by_side() -> None:
    """Three heads with blocks of 4, 1 and 1 tiles, on two slots: 4 4 4 and then six of 1; or 4 1 1 three times."""
    assert predicted(Groups(1, 3, 1, (4, 1, 1), lambda shares: 3), 1, 2, FREE) == 9
    assert predicted(Groups(1, 3, 1, (4, 1, 1)), 1, 2, FREE) == 10


@pytest.mark.parametrize(("seqlen_q", "seqlen_k", "side"), [(8192, 8192, 4), (131072, 131072, 1), (8192, 131072, 1)])
def test_long_heads_run_one_after_another(seqlen_q: int, seqlen_k: int, side: int) -> None:
    """32 MiB hold the queries of one group of 4 heads up to 8192 tokens."""
    forward = AttentionCall(torch.bfloat16, 128, 128, CAUSAL, needs_grad=True, arch="sm_90a")
    call = BackwardCall(forward, (True, True, True, False), dlse=False, deterministic=False)
    assert kv_heads_side_by_side(call, torch.Size((1, seqlen_q, 32, 128)), seqlen_k, 8) == side
