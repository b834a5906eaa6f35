"""The search: compiles, checks and times the candidates of a call, and returns the fastest correct one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from .agreement import disagreement
from .space import AnyConfig, Space
from .timing import Timer, quick, race

# The default stays where it is within 1.5 % of the best: as much as two measurements of one kernel may differ.
KEEP_WITHIN = 1.015


class Report(Protocol):
    """Receives the progress of a search."""

    def begin(self, call: str, candidates: int) -> None: ...
    def checked(self, config: AnyConfig, error: str | None) -> None: ...
    def timing(self, number: int, config: AnyConfig) -> None: ...


@dataclass
class SearchResult:
    """The outcome of a search: the fastest configuration, and what was rejected.

    Attributes:
        best: The fastest configuration, which may be the default.
        ms: Its time, in milliseconds.
        default_ms: The time of the default.
        measured: Number of correct candidates, including the default.
        rejected: Candidates that did not compile or computed something else, with the reason.
    """

    best: AnyConfig
    ms: float
    default_ms: float
    measured: int
    rejected: dict[AnyConfig, str] = field(default_factory=dict)


def search(
    space: Space,
    call: Callable[[Callable[..., Any]], Sequence[Tensor | None]],
    timer: Timer,
    report: Report,
    dtype: torch.dtype,
    gradients: bool = False,
) -> SearchResult:
    """Compiles, checks and times the candidates of a call.

    Args:
        space: The configurations of the call.
        call: Runs a prepared function on the user's tensors and returns its outputs as a flat sequence.
        timer: Measures calls.
        report: Receives the progress.
        dtype: Dtype of q, k and v.
        gradients: Whether the outputs are gradients.

    Raises:
        RuntimeError: The default configuration does not compile.
    """
    configs = [space.default, *space.candidates()]
    report.begin(space.call, len(configs))
    rejected: dict[AnyConfig, str] = {}
    runs: dict[AnyConfig, Callable[[], object]] = {}
    estimates: dict[AnyConfig, float] = {}
    expected: Sequence[Tensor | None] | None = None
    early: list[AnyConfig] = []  # compiled before the default, with which they are to be compared

    def measure(config: AnyConfig) -> str | None:
        """Checks a configuration and estimates its time; returns what is wrong, or None."""
        prepared = space.prepare(config)
        wrong = None if config == space.default else disagreement(call(prepared), expected or (), dtype, gradients)
        if wrong is None:
            estimates[config] = quick(lambda: call(prepared), timer)
            runs[config] = lambda: call(prepared)
        return wrong

    def check(config: AnyConfig) -> None:
        try:
            wrong = measure(config)
        except Exception as error:  # any candidate may fail to load or to be launched; it is left out, and said so
            if config == space.default:
                raise
            wrong = f"{type(error).__name__}: {error}"
        if wrong is not None:
            rejected[config] = wrong
        report.checked(config, wrong)

    for config, error in space.compile(configs):
        if config == space.default:
            if error is not None:
                raise RuntimeError(f"the default configuration {config} of {space.call} does not compile: {error}")
            expected = call(space.prepare(config))
            for each in (config, *early):
                check(each)
        elif error is not None:
            rejected[config] = error
            report.checked(config, error)
        elif expected is None:
            early.append(config)
        else:
            check(config)
    times = race(runs, estimates, space.default, timer, report.timing)
    best = min(times, key=times.__getitem__)
    if times[space.default] <= KEEP_WITHIN * times[best]:
        best = space.default
    return SearchResult(best, times[best], times[space.default], len(runs), rejected)
