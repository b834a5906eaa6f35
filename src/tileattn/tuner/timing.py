"""The times of candidates: a race of several rounds, in which slow candidates drop out early.

Times are those of :func:`tileattn.measure.timing.time_calls`: on the user's tensors, with the L2 cache overwritten
before each call.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

Name = TypeVar("Name", bound=Hashable)
# Milliseconds of so many calls.
Timer = Callable[[Callable[[], object], int], list[float]]


@dataclass(frozen=True)
class Round:
    """The length of a round of the race, and which candidates stay for the next.

    Attributes:
        ms: Milliseconds of calls for each candidate.
        most: Largest number of calls.
        within: How much slower than the fastest a candidate may be to stay.
        places: Largest number of candidates that stay.
    """

    ms: float
    most: int
    within: float
    places: int


ROUNDS = (Round(2.0, 20, 1.25, 24), Round(10.0, 100, 1.08, 8), Round(20.0, 200, 1.03, 4), Round(40.0, 400, 1.0, 1))
FEWEST_CALLS = 2


def quick(run: Callable[[], object], timer: Timer) -> float:
    """A first estimate: the faster of two calls, in milliseconds."""
    return min(timer(run, FEWEST_CALLS))


def race(
    runs: Mapping[Name, Callable[[], object]],
    estimates: Mapping[Name, float],
    keep: Name,
    timer: Timer,
    said: Callable[[int, Name], None] = lambda number, name: None,
) -> dict[Name, float]:
    """Milliseconds of the candidates that reach the last round, always including `keep`.

    Args:
        runs: The candidates.
        estimates: Their estimated times, by :func:`quick`.
        keep: The configuration that stays to the end however slow it is: the default.
        timer: Measures calls.
        said: Called with the round's number and the candidate that is measured next.
    """
    times = _stay(dict(estimates), 2.0, len(estimates), keep)
    for number, each in enumerate(ROUNDS):
        samples: dict[Name, list[float]] = {}
        for name in times:
            said(number, name)
            calls = min(max(int(each.ms / max(estimates[name], 1e-3)), FEWEST_CALLS), each.most)
            samples[name] = timer(runs[name], calls)
        times = {name: median(sample) for name, sample in samples.items()}
        if number + 1 < len(ROUNDS):
            times = _stay(times, each.within, each.places, keep)
    return times


def _stay(times: dict[Name, float], within: float, places: int, keep: Name) -> dict[Name, float]:
    """The candidates that stay: the fastest ones, and `keep`."""
    limit = within * min(times.values())
    fast = [name for name in sorted(times, key=times.__getitem__) if times[name] <= limit][:places]
    return {name: times[name] for name in times if name in fast or name == keep}
