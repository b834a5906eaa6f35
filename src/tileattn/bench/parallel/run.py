"""Measures all implementations on each case, on all ranks at once.

In each round all of them run, in an order that is drawn anew, equal on all ranks. What fails on one rank is given up on
all, and entered as failed.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median

import torch

from tileattn.bench.baselines.base import is_own
from tileattn.bench.parallel.cases import Case
from tileattn.bench.parallel.check import Values, Verdict, values_of, verdict
from tileattn.bench.parallel.implementations import Implementation, Prepared
from tileattn.bench.parallel.problem import Source
from tileattn.bench.parallel.ranks import RankFailed, Ranks
from tileattn.bench.parallel.results import IDEAL, Missing, Results, Row
from tileattn.bench.parallel.timing import Timer
from tileattn.measure.memory import peak_bytes

SLOW = 1.15  # times the fastest of PyTorch's: of those only the best counts, so others leave after the first round


@dataclass(eq=False)
class _Entrant:
    """An implementation that takes part in a case and a direction."""

    name: str
    prepared: Prepared
    estimate_ms: float
    peak: int
    sent: int | None
    verdict: Verdict
    rounds: list[float] = field(default_factory=list)


@dataclass
class Run:
    """A run of the suite.

    Attributes:
        directions: "fwd", "fwdbwd" or both.
        rounds: of timing.
        measured: takes the rows, on all ranks.
        on_case: called before and after each case.
        say: shows progress, on the first rank.
        complain: shows a traceback, on the rank where something failed.
    """

    cases: Sequence[Case]
    implementations: Sequence[Implementation]
    directions: Sequence[str]
    rounds: int
    ranks: Ranks
    dtype: torch.dtype
    measured: Results
    on_case: Callable[[], None]
    say: Callable[[str], None]
    complain: Callable[[str], None]

    def __call__(self) -> None:
        """Measures the cases that the results do not have."""
        self.timer = Timer(self.ranks)
        # The memory of each call is measured, which collects garbage: what is there now is not looked at each time.
        gc.collect()
        gc.freeze()
        try:
            self._cases()
        finally:
            gc.unfreeze()

    def _cases(self) -> None:
        for case in self.cases:
            if case.name in self.measured.done:
                continue
            self.measured.begun.append(case.name)
            self.on_case()
            self._case(case)
            self.measured.done.append(case.name)
            self.on_case()

    def _case(self, case: Case) -> None:
        prepared: dict[str, Prepared] = {}
        for implementation in self.implementations:
            name = implementation.name
            refusal = implementation.refusal(case, self.ranks)
            if refusal is not None:
                self._miss(case, name, self.directions, refusal, failed=False)
                continue
            self.say(f"{case.name}: {name} is prepared")
            source = Source(case, self.ranks.device, self.dtype)
            try:
                prepared[name] = self.ranks.attempt(partial(implementation.prepare, source, self.ranks), self.complain)
            except RankFailed as error:
                self._miss(case, name, self.directions, str(error), failed=True)
            self._tidy()
        for direction in ["fwdbwd"] if case.is_long else self.directions:
            self._direction(case, direction, prepared)
        prepared.clear()
        self._tidy()

    def _direction(self, case: Case, direction: str, prepared: dict[str, Prepared]) -> None:
        entrants: list[_Entrant] = []
        one_device: Values = {}
        for name, each in prepared.items():
            self.say(f"{case.name}: {name} {direction}, first call")
            try:
                first = partial(self._enter, case, direction, name, each, one_device)
                entrants.append(self.ranks.attempt(first, self.complain))
            except RankFailed as error:
                self._miss(case, name, [direction], str(error), failed=True)
            self._tidy()
        for number in range(0 if case.is_long else self.rounds):
            self._round(case, direction, entrants, number)
            if number == 0:
                entrants = _without_slow(entrants, self._add_row(case, direction))
        for entrant in entrants:
            self._add_row(case, direction)(entrant)

    def _enter(self, case: Case, direction: str, name: str, prepared: Prepared, one_device: Values) -> _Entrant:
        """The first calls: they compile, and give values, traffic, memory and an estimate of the time."""
        call = prepared.call(direction)
        sent = None if prepared.traffic is None else prepared.traffic()
        with prepared.context():
            values = values_of(prepared, prepared.values(direction), case, self.ranks)
            if sent is not None and prepared.traffic is not None:
                sent = max(self.ranks.gathered(prepared.traffic() - sent))
            times: list[float] = []
            peak = peak_bytes(lambda: times.append(self.timer.once(call)), self.ranks.device)
        if name == IDEAL:
            one_device.update(values)
        peak = max(self.ranks.gathered(peak + prepared.inputs.bytes()))
        return _Entrant(name, prepared, times[0], peak, sent, verdict(values, one_device))

    def _round(self, case: Case, direction: str, entrants: list[_Entrant], number: int) -> None:
        for index in _order(len(entrants), f"{case.name} {direction} {number}"):
            entrant = entrants[index]
            self.say(f"{case.name}: {direction}, round {number + 1}: {entrant.name}")
            try:
                entrant.rounds.append(self.ranks.attempt(partial(self._timed, entrant, direction), self.complain))
            except RankFailed as error:
                self._miss(case, entrant.name, [direction], str(error), failed=True)
        entrants[:] = [each for each in entrants if len(each.rounds) == number + 1]

    def _timed(self, entrant: _Entrant, direction: str) -> float:
        with entrant.prepared.context():
            return self.timer.round(entrant.prepared.call(direction), entrant.estimate_ms)

    def _add_row(self, case: Case, direction: str) -> Callable[[_Entrant], None]:
        def add(entrant: _Entrant) -> None:
            rounds = entrant.rounds or [entrant.estimate_ms]
            ms = median(rounds)
            self.measured.rows.append(
                Row(
                    case=case.name, backend=entrant.name, direction=direction, ms=ms, rounds=rounds,
                    tflops=case.flops(direction) / self.ranks.count / ms / 1e9, peak_bytes=entrant.peak,
                    sent_bytes=entrant.sent, errors=entrant.verdict.errors, wrong=entrant.verdict.wrong,
                )
            )  # fmt: skip

        return add

    def _miss(self, case: Case, name: str, directions: Sequence[str], reason: str, failed: bool) -> None:
        self.measured.missing += [Missing(case.name, name, direction, reason, failed) for direction in directions]

    def _tidy(self) -> None:
        """Gives memory back to the GPU: cases and implementations need it in pieces of different sizes."""
        if self.ranks.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()


def _order(count: int, seed: str) -> list[int]:
    """An order of implementations, drawn from a seed."""
    source = random.Random(seed)
    keys = [source.random() for _ in range(count)]
    return sorted(range(count), key=keys.__getitem__)


def _without_slow(entrants: list[_Entrant], leave: Callable[[_Entrant], None]) -> list[_Entrant]:
    """Those that go on; `leave` takes each of PyTorch's that is far slower than the best of them."""
    theirs = [each for each in entrants if each.name != IDEAL and not is_own(each.name)]
    best = min((each.rounds[0] for each in theirs), default=0.0)
    slow = [each for each in theirs if each.rounds[0] > SLOW * best]
    for each in slow:
        leave(each)
    return [each for each in entrants if each not in slow]
