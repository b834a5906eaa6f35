"""The keys that runs of queries see, as the plan reads them off a mask's expression, beside every pair."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tileattn
from tests.parallel.ranks_plan import traffic
from tests.parallel.test_windows import ROW
from tests.tools.ranks.pools import pool, returned
from tileattn import FunctionMask, GlobalTokens, Mask, SlidingWindow, Strided
from tileattn.parallel.sharding import visible
from tileattn.parallel.sharding.layout import Run, sequence_layout
from tileattn.parallel.sharding.ranges import areas, key_ranges
from tileattn.parallel.sharding.visible import BLOCK

SEQLEN, BATCH, HEADS = 3000, 2, 3


def window(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (k <= q) & (q - k < 200)


def near(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (k <= q) & (q - k < 64)


def by_head(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (k <= q) & (q - k < 150 * (h + 1))


def by_batch(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (k - q <= 100 * b) & (k >= q) & (q < 2000)


def islands(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q // 512 == k // 512) & ((q + k) % 3 == 0)


MASKS: dict[str, Mask] = {
    "window": FunctionMask(window),
    "by head": FunctionMask(by_head),
    "by batch": FunctionMask(by_batch),
    "islands": FunctionMask(islands),
    "strided": Strided(128, 127),
    "either": SlidingWindow(64, 64) | FunctionMask(islands),
    "global": SlidingWindow(100, 0) | GlobalTokens(9),
}
RUNS = [Run(0, *each) for each in ((0, 1), (5, 400), (401, 1500), (1500, 1501), (1900, 2600), (2990, SEQLEN))]


def exact(mask: Mask, run: Run) -> tuple[int, int]:
    """The first key that a query of the run sees in a head of a batch element, and the end of the last one."""
    b, h = torch.arange(BATCH).view(-1, 1, 1, 1), torch.arange(HEADS).view(-1, 1, 1)
    q, k = torch.arange(run.start, run.stop)[:, None], torch.arange(SEQLEN)
    every: Any = mask.allows(b, h, q, k)
    found = every.expand(BATCH, HEADS, len(q), SEQLEN).any(0).any(0).any(0).nonzero()
    return (int(found.min()), int(found.max()) + 1) if len(found) else (run.start, run.start + 1)


@pytest.mark.parametrize("name", MASKS)
def test_no_key_that_is_seen_is_left_out(name: str) -> None:
    layout = sequence_layout("contiguous", SEQLEN, 2)
    for run, (start, stop) in zip(RUNS, key_ranges(MASKS[name], layout, RUNS, BATCH, HEADS)):
        first, end = exact(MASKS[name], run)
        assert start <= first < end <= stop
        # One block at each end may be cut through. Some rows of a run may see keys by one condition, others by another.
        assert start > first - BLOCK
        assert stop < end + BLOCK or name in ("by batch", "either")


def test_a_users_window_fetches_its_halo() -> None:
    # 1024 tokens of 4 ranks: the block of 128 keys in front of each rank's first query.
    received = returned(pool(4).run(traffic, 1024, "contiguous", FunctionMask(near), {}))
    assert [each for each, _ in received] == [0, *[BLOCK * ROW] * 3]


def test_areas_are_those_of_the_keys_that_are_seen() -> None:
    layout = sequence_layout("contiguous", SEQLEN, 2)
    runs = [Run(0, 0, 1500), Run(0, 1500, SEQLEN)]
    of_function = areas(MASKS["window"], layout, runs, 1, 1)
    of_class = areas(SlidingWindow(199, 0), layout, runs, 1, 1)
    for ours, theirs, run in zip(of_function, of_class, runs):
        assert theirs <= ours <= theirs + 2 * BLOCK * (run.stop - run.start)


def test_a_masks_own_ranges_stay_where_it_has_too_many_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = sequence_layout("contiguous", SEQLEN, 2)
    assert key_ranges(tileattn.Causal(), layout, RUNS, 1, 1) == [(0, run.stop) for run in RUNS]
    monkeypatch.setattr(visible, "MOST_BLOCKS", 10)
    assert key_ranges(MASKS["window"], layout, RUNS, 1, 1) == [(0, SEQLEN)] * len(RUNS)
