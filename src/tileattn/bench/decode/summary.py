"""tileattn's speed in the decode suite: geometric means by class of rows against the best baseline that ran."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import geometric_mean

from tileattn.bench.baselines.base import OWN, is_own
from tileattn.bench.decode.results import Results
from tileattn.bench.decode.rows import Row

LARGE = 512 * 10**6  # bytes of K and V, from where all that is left is to reach the bandwidth
FLOOR = 0.92  # of the best baseline's speed: rows below are named

GROUPS: Mapping[str, Callable[[Row], bool]] = {
    "under 512 MB": lambda row: row.kv_bytes < LARGE,
    "from 512 MB": lambda row: row.kv_bytes >= LARGE,
    "pages": lambda row: row.page > 0,
    "contiguous": lambda row: row.page == 0,
    "all": lambda row: True,
}


@dataclass(frozen=True)
class Standing:
    """Speed against one baseline, or the best, over some rows that both ran: a baseline's time over ours."""

    against: str
    group: str
    rows: int
    geometric_mean: float
    lowest: float
    lowest_case: str


def best_us(results: Results, case: str) -> float | None:
    """The time of the fastest baseline that ran in a row."""
    return min((row.us for row in results.rows if row.case == case and not is_own(row.backend)), default=None)


def speeds(results: Results, against: str | None = None) -> list[tuple[Row, float]]:
    """tileattn's rows with its speed over that of a baseline, by default the best; where both ran."""
    found = []
    for row in results.rows:
        if row.backend != OWN:
            continue
        other = None if against is None else results.row(row.case, against)
        us = best_us(results, row.case) if against is None else (other.us if other else None)
        if us is not None:
            found.append((row, us / row.us))
    return found


def standings(results: Results) -> list[Standing]:
    """The standings against the best by group, then over all rows against each baseline."""
    found = [each for name, of in GROUPS.items() if (each := _standing("best", name, speeds(results), of)) is not None]
    for backend in results.backends:
        if not is_own(backend):
            each = _standing(backend, "all", speeds(results, backend), GROUPS["all"])
            found += [each] if each is not None else []
    return found


def slow(results: Results) -> list[tuple[str, float]]:
    """The rows below the floor, the slowest first."""
    return sorted(((row.case, ratio) for row, ratio in speeds(results) if ratio < FLOOR), key=lambda each: each[1])


def _standing(
    against: str, group: str, of_all: Sequence[tuple[Row, float]], belongs: Callable[[Row], bool]
) -> Standing | None:
    ratios = {row.case: ratio for row, ratio in of_all if belongs(row)}
    if not ratios:
        return None
    lowest = min(ratios, key=ratios.__getitem__)
    return Standing(against, group, len(ratios), geometric_mean(ratios.values()), ratios[lowest], lowest)
