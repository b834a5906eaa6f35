"""A million tiles of random expressions, and the share of tiles that are called mixed needlessly."""

from __future__ import annotations

from random import Random

import pytest

from tests.tools.random_masks import KINDS, Generator
from tests.variant.intervals.test_soundness import needless

TILES, EXPRESSIONS = 500, 250


@pytest.mark.slow  # minutes; test_soundness.py draws the same kinds
@pytest.mark.parametrize("kind", KINDS)
def test_a_million_tiles(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Run with -s to see the shares, which docs/design/intervals.md has: without cuts, and with two."""
    shares = [
        100 * sum(needless(Generator(Random(seed), kind, 48).mask(), TILES, seed, cuts) for seed in range(EXPRESSIONS))
        / EXPRESSIONS
        for cuts in (0, 2)
    ]  # fmt: skip
    with capsys.disabled():
        print(f"\n{kind}: {EXPRESSIONS * TILES} tiles, needlessly mixed {shares[0]:.2f} %, with cuts {shares[1]:.2f} %")
