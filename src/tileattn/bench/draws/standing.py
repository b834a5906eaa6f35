"""What a run of the suite random says: tileattn's speed relative to the best baseline of each row."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tileattn.bench.baselines.base import OWN, Implementation
from tileattn.bench.compare import best_baseline_ms, geometric_mean, own_ms
from tileattn.bench.draws.shapes import needs_dense_mask
from tileattn.bench.problem import Problem
from tileattn.bench.results import Results

LEAST = 0.95  # a row under this is measured again before it counts
CLOSE = 1.1  # what took longer than this times the best baseline is not measured again
WORST = 5  # rows that are named


@dataclass(frozen=True)
class Standing:
    """tileattn's speed relative to the best baseline of each row, over all draws or one.

    ratios: By case: the best baseline's time over ours. Above 1 we are faster.
    alone: Cases that no baseline ran; they are in no mean.
    missing: Cases that we did not run, or not yet.
    """

    ratios: dict[str, float]
    alone: list[str]
    missing: list[str]

    @property
    def geometric_mean(self) -> float | None:
        """None where no row has a baseline."""
        return geometric_mean(list(self.ratios.values())) if self.ratios else None

    def worst(self) -> list[tuple[str, float]]:
        """The slowest rows, the slowest first: all under `LEAST`, and at least `WORST`."""
        rows = sorted(self.ratios.items(), key=lambda each: each[1])
        return rows[: max(WORST, sum(ratio < LEAST for _, ratio in rows))]

    def under(self) -> int:
        """Number of rows under `LEAST`."""
        return sum(ratio < LEAST for ratio in self.ratios.values())


def standing(measured: Results, cases: Sequence[str]) -> Standing:
    """The standing over these cases."""
    ours = own_ms(measured)
    best = {case: best_baseline_ms(measured, case) for case in cases if case in ours}
    return Standing(
        ratios={case: ms / ours[case] for case, ms in best.items() if ms is not None},
        alone=[case for case, ms in best.items() if ms is None],
        missing=[case for case in cases if case not in ours],
    )


def standings(measured: Results) -> dict[str, Standing]:
    """The standing over "all" cases, then over those of each seed where there are several."""
    every = [case for cases in measured.draws.values() for case in cases]
    of_seeds = {f"seed {seed}": standing(measured, cases) for seed, cases in measured.draws.items()}
    return {"all": standing(measured, every), **(of_seeds if len(of_seeds) > 1 else {})}


def as_json(measured: Results) -> dict[str, Any]:
    """The standings as values of a result file."""
    return {
        name: {
            **asdict(each),
            "rows": len(each.ratios),
            "geometric_mean": each.geometric_mean,
            "least": LEAST,
            "under_least": each.under(),
            "worst": each.worst(),
        }
        for name, each in standings(measured).items()
    }


def measured_again(ms: Mapping[str, float]) -> list[str]:
    """Whom to measure again: us and the fastest baselines, where we are under `LEAST`; else nobody."""
    others = {name: each for name, each in ms.items() if name != OWN}
    if OWN not in ms or not others or min(others.values()) / ms[OWN] >= LEAST:
        return []
    best = min(others.values())
    return [OWN, *(name for name, each in others.items() if each <= CLOSE * best)]


def random_order(seed: int) -> Callable[[int, int], list[int]]:
    """The order of implementations in a round: drawn anew for each, from a seed."""
    source = random.Random(seed)

    def order(count: int, number: int) -> list[int]:
        keys = [source.random() for _ in range(count)]
        return sorted(range(count), key=keys.__getitem__)

    return order


@dataclass(frozen=True)
class WithoutDenseMask:
    """A kernel of SDPA, where it takes the mask as such.

    With a tensor of all pairs it also runs windows and documents, at a fraction of the speed: no figure to be ahead of.
    """

    kernel: Implementation

    @property
    def name(self) -> str:
        return self.kernel.name

    def refusal(self, problem: Problem) -> str | None:
        if needs_dense_mask(problem.case):
            return "it would take this mask as a tensor of all pairs"
        return self.kernel.refusal(problem)

    def prepare(self, problem: Problem) -> Any:
        return self.kernel.prepare(problem)
