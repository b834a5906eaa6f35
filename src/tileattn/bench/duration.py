"""What a run measures, and how long it takes at least: the line that `tileattn bench` prints first."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import torch

from tileattn.bench.baselines.base import Implementation
from tileattn.bench.cases import Case
from tileattn.measure import timing

# Calls of an implementation on a case: for the error, for the memory, and in each round one before the timed one.
CALLS, CALLS_OF_ROUND = 2, 2
SIZE = 1024  # of the square float32 matrices that are multiplied to learn a CPU's speed, in some tens of milliseconds
LONG = 120.0  # seconds


def announced(
    cases: Sequence[Case], implementations: Sequence[Implementation], direction: str, device: torch.device, rounds: int
) -> str:
    """What is measured; on a CPU also the least time that it takes, where that is minutes."""
    names = ", ".join(each.name for each in implementations)
    line = f"measuring {len(cases)} {'case' if len(cases) == 1 else 'cases'} on {device.type}: {names}"
    if device.type != "cpu":
        return line
    seconds = least_seconds(cases, len(implementations), direction, rounds, cpu_flops_per_second())
    if seconds < LONG:
        return line
    return f"{line}. At least {in_words(seconds)} on this CPU; Ctrl-C stops, and keeps the cases that are done"


def least_seconds(
    cases: Sequence[Case], implementations: int, direction: str, rounds: int, flops_per_second: float
) -> float:
    """The time of the matrix products alone, each at the given speed and over visible pairs only.

    Softmax, hidden scores and the oracle in float64 come on top.
    """
    calls = implementations * (CALLS + CALLS_OF_ROUND * rounds)
    return calls * sum(case.flops(direction) for case in cases) / flops_per_second


def cpu_flops_per_second() -> float:
    """The speed of a matrix product in float32 on this CPU."""
    a, b = (torch.randn(SIZE, SIZE) for _ in range(2))
    ms = timing.time_calls(lambda: a @ b, torch.device("cpu"), 3)
    return 2 * SIZE**3 / median(ms) * 1e3


def in_words(seconds: float) -> str:
    """Such as "3 minutes" or "7 hours"."""
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.0f} hours"
