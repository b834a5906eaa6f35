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

# The baselines that read pages: the rows' requirements are about the best of them.
PAGED = ("fa3", "flashinfer", "xqa")
BEST, BEST_PAGED = "best", "best of fa3, flashinfer, xqa"

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


def best_us(results: Results, case: str, among: Sequence[str] | None = None) -> float | None:
    """The time of the fastest baseline that ran in a row, of all or of those named."""
    return min(
        (
            row.us
            for row in results.of_case(case)
            if not is_own(row.backend) and (among is None or row.backend in among)
        ),
        default=None,
    )


def speeds(results: Results, among: Sequence[str] | None = None) -> list[tuple[Row, float]]:
    """tileattn's rows with its speed over the best baseline's, of all or of those named; where both ran."""
    found = []
    for row in results.rows:
        if row.backend == OWN and (us := best_us(results, row.case, among)) is not None:
            found.append((row, us / row.us))
    return found


def standings(results: Results) -> list[Standing]:
    """The standings against the best by group, then over all rows against each baseline."""
    kinds: list[tuple[str, Sequence[str] | None]] = [(BEST, None), (BEST_PAGED, PAGED)]
    found = []
    for against, among in kinds:
        all_speeds = speeds(results, among)
        found += [_standing(against, name, all_speeds, of) for name, of in GROUPS.items()]
    for backend in results.backends:
        if not is_own(backend):
            found.append(_standing(backend, "all", speeds(results, [backend]), GROUPS["all"]))
    return [each for each in found if each is not None]


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
