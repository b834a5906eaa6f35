"""Cumulative lengths that the host reads: values just within the limits pass, values off by one raise."""

from __future__ import annotations

import pytest
import torch

from tileattn.call.facts import Packed
from tileattn.call.sequences import sequences

RIGHT = [0, 5, 5, 9]


def spans(q: list[int], k: list[int], longest: tuple[int, int] = (5, 5), total: tuple[int, int] = (9, 9)) -> list[str]:
    packed = Packed(*(torch.tensor(ends, dtype=torch.int32) for ends in (q, k)), *longest)
    return [f"{x.number}: {x.rows.start}-{x.rows.stop} {x.keys.start}-{x.keys.stop}" for x in sequences(packed, *total)]


def test_what_is_right() -> None:
    assert spans(RIGHT, [0, 1, 4, 9]) == ["0: 0-5 0-1", "1: 5-5 1-4", "2: 5-9 4-9"]
    assert spans([0], [0], (0, 0), (0, 3)) == []


@pytest.mark.parametrize("which", ["q", "k"])
@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ([1, 5, 5, 9], "must start at 0, got 1"),
        ([-1, 3, 3, 4], "must start at 0, got -1"),
        ([0, 5, 4, 9], r"must not decrease, got 4 after 5 \(sequence 1\)"),
        ([0, 5, 5, 10], "must be at most total_. = 9, got 10"),
        ([0, 6, 6, 9], r"must be at least the longest length, got 5 and a length of 6 \(sequence 0\)"),
        ([0, 1, 2, 8], r"must be at least the longest length, got 5 and a length of 6 \(sequence 2\)"),
    ],
)
def test_what_is_wrong_by_one(which: str, wrong: list[int], says: str) -> None:
    with pytest.raises(ValueError, match=f"_{which}.* {says}".replace("total_.", f"total_{which}")):
        spans(*((wrong, RIGHT) if which == "q" else (RIGHT, wrong)))
