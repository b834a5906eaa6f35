"""The speed of tileattn relative to each baseline, and to the best baseline of each case."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import exp, log

from tileattn.bench.baselines.base import OWN, is_own
from tileattn.bench.results import Results, Row

# Less than this is the noise between two runs: behind by less is called a tie.
NOISE = 0.02
# Below this length, prologue, epilogue and tile order decide more than the loop does.
SHORT = 2048


@dataclass(frozen=True)
class Comparison:
    """The speed of tileattn relative to one baseline, over the `cases` cases that both ran."""

    baseline: str
    cases: int
    geometric_mean: float
    lowest: float
    lowest_case: str


def compare(results: Results) -> list[Comparison]:
    """The comparison with each baseline, over the cases that both ran."""
    own = own_ms(results)
    comparisons = []
    for baseline in results.backends():
        times = {row.case: row.ms for row in results.rows if row.backend == baseline}
        ratios = {case: times[case] / own[case] for case in own if case in times}
        if baseline != OWN and ratios:
            comparisons.append(_comparison(baseline, ratios))
    return comparisons


def _comparison(baseline: str, ratios: dict[str, float]) -> Comparison:
    lowest_case = min(ratios, key=ratios.__getitem__)
    return Comparison(baseline, len(ratios), geometric_mean(list(ratios.values())), ratios[lowest_case], lowest_case)


@dataclass(frozen=True)
class Standing:
    """The comparison of tileattn with the best baseline of each row.

    rows: Number of rows that have a baseline.
    at_or_ahead: Number of these in which no baseline is faster.
    geometric_mean: Mean of (time of the best baseline / time of tileattn).
    behind: The other rows as (name, that ratio), the slowest first.
    """

    rows: int
    at_or_ahead: int
    geometric_mean: float
    behind: tuple[tuple[str, float], ...]

    @property
    def ties(self) -> int:
        """Number of rows that are behind by less than the noise."""
        return sum(ratio > 1 - NOISE for _, ratio in self.behind)


def standings(results: Results) -> dict[str, Standing]:
    """The standings by seqlen_k: "2048 tokens and more", "under 2048 tokens", and "all" where there are both."""
    long = _standing(results, lambda row: row.seqlen_k >= SHORT)
    short = _standing(results, lambda row: row.seqlen_k < SHORT)
    every = _standing(results, lambda row: True) if long and short else None
    named = {f"{SHORT} tokens and more": long, f"under {SHORT} tokens": short, "all": every}
    return {name: standing for name, standing in named.items() if standing is not None}


def _standing(results: Results, chosen: Callable[[Row], bool]) -> Standing | None:
    ratios = {
        row.case: best / row.ms
        for row in results.rows
        if row.backend == OWN and chosen(row) and (best := best_baseline_ms(results, row.case)) is not None
    }
    if not ratios:
        return None
    behind = sorted(((case, ratio) for case, ratio in ratios.items() if ratio < 1), key=lambda each: each[1])
    return Standing(len(ratios), len(ratios) - len(behind), geometric_mean(list(ratios.values())), tuple(behind))


def own_ms(results: Results) -> dict[str, float]:
    """tileattn's milliseconds by case."""
    return {row.case: row.ms for row in results.rows if row.backend == OWN}


def best_baseline_ms(results: Results, case: str) -> float | None:
    """Milliseconds of the fastest baseline of a case; None without one.

    Other ways to run tileattn count as baselines only where no other implementation ran.
    """
    others = [row for row in results.rows if row.case == case and row.backend != OWN]
    baselines = [row for row in others if not is_own(row.backend)]
    return min((row.ms for row in baselines or others), default=None)


def geometric_mean(values: list[float]) -> float:
    """The geometric mean of one or more positive numbers."""
    return exp(sum(map(log, values)) / len(values))
