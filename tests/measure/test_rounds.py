"""The orders of rounds: each implementation is measured in every round, and follows each other one equally often."""

from collections import Counter
from itertools import pairwise

import pytest

from tileattn.measure.rounds import order


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6])
def test_everyone_follows_everyone_else_equally_often(count: int) -> None:
    cycle = count if count % 2 == 0 else 2 * count
    orders = [order(count, number) for number in range(cycle)]
    assert all(sorted(each) == list(range(count)) for each in orders)
    followed = Counter(pair for each in orders for pair in pairwise(each))
    assert len(followed) == count * (count - 1)
    assert len(set(followed.values())) <= 1


def test_rounds_go_on_after_a_cycle() -> None:
    assert order(4, 4) == order(4, 0)
    assert order(0, 3) == []
