"""What is fetched: of a window its halo, of a causal mask what lies before, and no more."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tileattn
from tests.parallel.ranks_plan import traffic
from tests.tools.ranks.pools import pool, returned
from tileattn.parallel.sharding.ranges import device_of

ROW = 2 * 2 * 8 * 4  # bytes of k and v of one token: 2 heads of 8 floats each


def forward(ranks: int, seqlen: int, layout: str, mask: Any, **options: Any) -> list[int]:
    return [received for received, _ in returned(pool(ranks).run(traffic, seqlen, layout, mask, options))]


@pytest.mark.parametrize("seqlen", [128, 256, 512])
def test_a_window_fetches_its_halo_whatever_the_length(seqlen: int) -> None:
    assert forward(4, seqlen, "contiguous", tileattn.SlidingWindow(9)) == [0, *[9 * ROW] * 3]
    # The middle blocks of zigzag are one run on the last rank; all others have two runs, each with a halo.
    assert forward(4, seqlen, "zigzag", tileattn.SlidingWindow(9)) == [9 * ROW, 18 * ROW, 18 * ROW, 9 * ROW]
    assert forward(4, seqlen, "contiguous", tileattn.SlidingWindow(3, 5)) == [5 * ROW, 8 * ROW, 8 * ROW, 3 * ROW]


def test_a_causal_mask_fetches_what_lies_before_the_last_query() -> None:
    # Rank r of 4 holds the blocks r and 7 - r of 8, each of 8 tokens, and reaches 8 - r blocks.
    assert forward(4, 64, "zigzag", tileattn.Causal()) == [(6 - rank) * 8 * ROW for rank in range(4)]


def test_head_groups_move_the_same_bytes() -> None:
    one, two = (
        returned(pool(4).run(traffic, 65, "zigzag", tileattn.Causal(), {"algorithm": "gather", "head_groups": groups}))
        for groups in (1, 2)
    )
    assert one == two


def test_ulysses_moves_what_its_formula_says() -> None:
    """4 n D (H + K) (P - 1) / P bytes a rank, here with lse beside o: n tokens of a rank, H = K = 2, D = 8."""
    tokens, heads, kv_heads, dim = 32, 2, 2, 8
    formula = 4 * tokens * (2 * heads * dim + 2 * kv_heads * dim + heads) * (2 - 1) // 2
    assert forward(2, 2 * tokens, "contiguous", None, algorithm="ulysses") == [formula] * 2


def test_a_ring_stops_when_no_rank_needs_the_next_block() -> None:
    block = 32 * ROW
    assert forward(4, 128, "contiguous", None, algorithm="ring") == [3 * block] * 4
    assert forward(4, 128, "contiguous", tileattn.SlidingWindow(9), algorithm="ring") == [block] * 4


def test_ranges_are_asked_for_where_a_masks_tensors_are() -> None:
    """Also behind a part that has none: `Causal() & Documents(ids)` on a GPU."""
    cpu, ids = torch.device("cpu"), torch.zeros(8, dtype=torch.int32, device="meta")
    for mask in (tileattn.Causal() & tileattn.Documents(ids), tileattn.Documents(ids) & tileattn.Causal()):
        assert device_of(mask, cpu) == ids.device
    assert device_of(tileattn.Causal() | tileattn.SlidingWindow(3), cpu) == cpu
    number: Any = SimpleNamespace(left=ids[0])
    assert device_of(number, cpu) == ids.device
