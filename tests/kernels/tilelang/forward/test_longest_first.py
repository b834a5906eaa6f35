"""The queue's order of listed calls: that each line comes once, and what a model of 132 multiprocessors makes of it."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("tilelang")

from tests.tools.lowering import make_call
from tileattn.bench.sparse_masks import NAMES, pattern
from tileattn.kernels.tile_lists import Cut, Sizes, make_lists
from tileattn.kernels.tilelang.forward.choice import MULTIPROCESSORS
from tileattn.kernels.tilelang.forward.hopper import sorted_lists
from tileattn.kernels.tilelang.forward.launch import _heads_side_by_side, lines_ahead
from tileattn.variant.key import encode

# The model's times in microseconds, of a tile of 128 x 128 at head dim 64 on an H200 (any-mask-h200.json): whole, of
# calls without a mask; mixed, what the order before makes of the measured time; and what a task takes beside its tiles.
WHOLE, MIXED, TASK = 1.0, 2.4, 1.0
TILE = 128
SHAPES = {"16k": (16384, 16), "64k": (65536, 4)}


def order(pairs: int, lines: int, side: int, ahead: int) -> list[tuple[int, int]]:
    """The pairs and lines of all tasks, as the kernel counts them."""
    tasks = [(pair, line) for line in range(ahead) for pair in range(pairs)]
    for first in range(0, pairs, side):
        tasks += [(pair, line) for line in range(ahead, lines) for pair in range(first, first + side)]
    return tasks


@pytest.mark.parametrize(
    ("batch", "heads", "lines", "side", "ahead"),
    [(1, 4, 5, 2, 1), (2, 3, 7, 3, 2), (1, 6, 4, 1, 4), (2, 2, 3, 4, 1), (1, 1, 9, 1, 9), (3, 4, 2, 6, 1)],
)
def test_a_task_of_each_line(
    batch: int, heads: int, lines: int, side: int, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On numbers; a kernel does not reach the division by 0 where no lines are left behind those ahead.
    numbers = SimpleNamespace(
        truncdiv=lambda x, y: x // y if y else 0,
        truncmod=lambda x, y: x % y if y else 0,
        if_then_else=lambda condition, x, y: x if condition else y,
    )
    monkeypatch.setattr(sorted_lists, "T", numbers)
    arg = SimpleNamespace(batch=batch, heads=heads, side_by_side=side, list_ahead=ahead)
    got = [sorted_lists.pair_and_line(arg, tile, lines) for tile in range(batch * heads * lines)]
    assert got == order(batch * heads, lines, side, ahead)
    assert len(set(got)) == len(got)


def test_lines_ahead() -> None:
    """As many tasks as all multiprocessors take twice, but one of each pair at least, and no more than there are."""
    assert lines_ahead(16, 128) == 17
    assert lines_ahead(4, 512) == 66
    assert lines_ahead(1, 64) == 64
    assert lines_ahead(1000, 64) == 1


def finished(costs: Iterable[float]) -> float:
    """When the last of 132 blocks is done that take tasks from a queue."""
    ends = [0.0] * MULTIPROCESSORS
    for cost in costs:
        heapq.heapreplace(ends, ends[0] + cost)
    return max(ends)


class Walk:
    """The predicted times of a pattern's forward pass at head dim 64, before and with sorted lines, in microseconds."""

    def __init__(self, name: str, seqlen: int, heads: int) -> None:
        mask, lines = pattern(name, seqlen, heads, "cpu").mask, seqlen // TILE
        lists = make_lists(
            *encode(mask, ()), Sizes(1, heads, seqlen, seqlen), Cut(TILE, TILE, longest_first=True), torch.device("cpu")
        )
        assert lists.rows is not None
        call = make_call(mask, dim=64)
        side = _heads_side_by_side(call, torch.Size((1, seqlen, heads, 64)), seqlen, heads)
        mixed, visited = lists.counts.T
        costs = TASK + mixed * MIXED + (visited - mixed) * WHOLE
        of_head = [slice(head * lists.head_step, head * lists.head_step + lines) for head in range(heads)]
        self.sorted = [costs[part].tolist() for part in of_head]
        before = [costs[part][lists.rows[part].argsort(descending=True)].tolist() for part in of_head]  # last row first
        self.before = finished(before[pair][line] for pair, line in order(heads, lines, side, 0))
        ahead = lines_ahead(heads, lines)
        self.after = finished(self.sorted[pair][line] for pair, line in order(heads, lines, side, ahead))
        self.share = sum(map(sum, self.sorted)) / MULTIPROCESSORS  # of each multiprocessor
        self.longest = max(map(max, self.sorted))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", NAMES)
def test_the_order_is_nearly_the_best(name: str, shape: str) -> None:
    """No order ends before the longest row, or before each multiprocessor has done its share."""
    walk = Walk(name, *SHAPES[shape])
    assert walk.after <= 1.005 * walk.before
    assert walk.after <= max(walk.longest, 1.06 * walk.share)


def test_rows_of_global_tokens_come_first() -> None:
    """635 us before at 16384 tokens, as on the H200, and 382 after."""
    walk = Walk("local-global", *SHAPES["16k"])
    assert walk.before == pytest.approx(640, rel=0.03)
    assert walk.after == pytest.approx(385, rel=0.03)


def test_a_row_longer_than_the_rest_of_the_call_still_takes_its_time() -> None:
    """65536 tokens, 4 heads: 1551 us before; a row of 512 mixed tiles alone takes 1230."""
    walk = Walk("local-global", *SHAPES["64k"])
    assert walk.share < 0.4 * walk.longest
    assert walk.after == pytest.approx(walk.longest)
    assert walk.before > 1.25 * walk.after
