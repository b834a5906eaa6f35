"""Which queries need no other rank, groups of heads, and sums of gradients: without any rank."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

import tileattn
from tileattn.parallel.sharding.groups import backward_groups, forward_groups
from tileattn.parallel.sharding.layout import Layout, Run, Span, sequence_layout
from tileattn.parallel.sharding.own import separated
from tileattn.parallel.sharding.ranges import key_ranges
from tileattn.parallel.transport.sums import Addend, write_sums


@pytest.mark.parametrize("groups", [forward_groups, backward_groups])
@pytest.mark.parametrize("kv_heads", [*range(1, 18), 32, 40])
def test_groups_have_all_heads(groups: Any, kv_heads: int) -> None:
    for count in range(1, kv_heads + 3):
        spans = groups(kv_heads, count)
        assert len(spans) == min(count, kv_heads)
        assert spans[0][0] == 0
        assert spans[-1][1] == kv_heads
        assert all(start < stop for start, stop in spans)
        assert all(before[1] == after[0] for before, after in pairwise(spans))


def test_groups_that_nothing_hides_are_small() -> None:
    assert [stop - start for start, stop in forward_groups(32, 4)] == [1, 3, 7, 21]
    assert [stop - start for start, stop in backward_groups(32, 4)] == [21, 7, 3, 1]
    assert [stop - start for start, stop in backward_groups(8, 2)] == [7, 1]


def separate(layout: Layout, rank: int, mask: Any) -> Any:
    return separated(layout, lambda runs: key_ranges(mask, layout, runs, 1, 1))[rank]


@pytest.mark.parametrize("seqlen", [4096, 5000, 4097])
@pytest.mark.parametrize("name", ["contiguous", "zigzag"])
@pytest.mark.parametrize(
    "mask",
    [
        tileattn.Causal(),
        tileattn.SlidingWindow(300, 0),
        tileattn.SlidingWindow(300, 200),
        tileattn.PrefixLM(100),
        tileattn.Causal() & tileattn.Documents(torch.arange(5000) // 700),
    ],
    ids=str,
)
def test_queries_are_in_one_place_and_their_keys_in_the_shard(seqlen: int, name: str, mask: Any) -> None:
    layout = sequence_layout(name, seqlen, 2)
    for rank in range(2):
        own, others = separate(layout, rank, mask)
        positions = [p for run in [each.run for each in own] + list(others) for p in range(run.start, run.stop)]
        assert sorted(positions) == layout.positions_of(rank).tolist()
        held = layout.positions_of(rank)
        for each in own:
            assert held[slice(*each.rows)].tolist() == list(range(each.run.start, each.run.stop))
            assert held[slice(*each.keys)].tolist() == list(range(*each.reached))
            assert each.reached[0] % 256 == 0
            (needed,) = key_ranges(mask, layout, [each.run], 1, 1)
            assert each.reached[0] <= needed[0]
            assert needed[1] <= each.reached[1]


def test_a_window_needs_little_of_others() -> None:
    _, others = separate(sequence_layout("contiguous", 8192, 2), 1, tileattn.SlidingWindow(300, 0))
    assert others == (
        Run(0, 4096, 4608),
    )  # up to a multiple of 768; its queries reach back over their rank's first key


def test_documents_need_nothing_of_others() -> None:
    layout = Layout("documents", (0, 700, 900, 2000), ((Run(0, 0, 700), Run(2, 0, 1100)), (Run(1, 0, 200),)))
    own, others = separate(layout, 0, tileattn.Causal())
    assert others == ()
    assert [each.rows for each in own] == [each.keys for each in own] == [(0, 700), (700, 1800)]
    assert all(each.is_whole(layout) for each in own)


# --- Sums ---

PIECES: list[tuple[Span, Span]] = [((0, 5), (0, 3)), ((2, 9), (1, 4)), ((2, 4), (0, 2)), ((8, 9), (3, 4))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sums_of_overlapping_parts(dtype: torch.dtype) -> None:
    addends, total = [], torch.zeros(2, 10, 4, 3)
    for number, (rows, heads) in enumerate(PIECES):
        values = torch.randn(2, rows[1] - rows[0], heads[1] - heads[0], 3)
        values = values.to(dtype) if number % 2 else values
        addends.append(Addend(rows, heads, values))
        total[:, slice(*rows), slice(*heads)] += values
    out = torch.full((2, 10, 6, 3), torch.nan, dtype=dtype)
    write_sums(out, (0, 4), addends, torch.float32)
    assert torch.equal(out[:, :, :4], total.to(dtype))  # rounded once
    assert out[:, :, 4:].isnan().all()  # heads of other groups


def test_sums_of_parts_in_16_bits_are_not_rounded_between() -> None:
    parts = [torch.full((1, 1, 1, 1), value, dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0)]
    out = torch.empty(1, 1, 1, 1, dtype=torch.bfloat16)
    write_sums(out, (0, 1), [Addend((0, 1), (0, 1), part) for part in parts], torch.float32)
    assert out.item() == 258.0
