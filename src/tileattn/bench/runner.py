"""The runner: measures all implementations on every case, in turns and on the same tensors."""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import torch

from tileattn.bench import passes, problem, steadiness
from tileattn.bench.baselines.base import OWN, Implementation, Prepared
from tileattn.bench.cases import Case
from tileattn.bench.oracle import gradients as gradient_oracle
from tileattn.bench.oracle import output as oracle
from tileattn.bench.oracle import packed as packed_oracle
from tileattn.bench.results import Missing, Results, Row
from tileattn.measure import ceilings, memory, rounds, timing

Expected = oracle.Oracle | gradient_oracle.GradientOracle | packed_oracle.PackedOracle


@dataclass
class Measurement:
    """The state of one implementation on the current case."""

    implementation: Implementation
    given: problem.Problem
    prepared: Prepared
    error: float
    peak_bytes: int
    samples_ms: list[float] = field(default_factory=list)
    round_ms: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Run:
    """A suite of cases, the implementations to compare, and where results and progress go.

    The direction of the results, a key of `cases.DIRECTIONS`, is measured.

    progress: Called with the current activity, such as "D64 causal (4,4096,32): fa2".
    on_case: Called after each case.
    on_failure: Called with the traceback of each failure.
    spreads: Filled by the run: how far the rounds of each case and implementation lie apart.
    order: The order in which a round measures implementations, from their number and that of the round.
    again: Called with the milliseconds of each implementation of a case, in the order of `implementations`. Those that
        it names are measured again in `rounds_again` rounds, which replace the first ones.
    most_checked: The scores of a case that are checked, if not `SCORES_CHECKED` of the oracle.
    most_seconds: After so many seconds of timing a case begins no further round of its first ones.
    """

    suite: str
    cases: Sequence[Case]
    implementations: Sequence[Implementation]
    device: torch.device
    results: Results
    effort: timing.Effort = timing.DEFAULT
    seed: int = 0
    progress: Callable[[str], None] = lambda text: None
    on_case: Callable[[Case], None] = lambda case: None
    on_failure: Callable[[str], None] = lambda text: None
    spreads: dict[tuple[str, str], float] = field(default_factory=dict)
    order: Callable[[int, int], list[int]] = rounds.order
    again: Callable[[Mapping[str, float]], Sequence[str]] = lambda ms: ()
    rounds_again: int = 10
    most_checked: int | None = None
    most_seconds: float = math.inf

    def __call__(self) -> Results:
        """Runs all cases. An exception of an implementation becomes an entry of `failed`, and the run goes on."""
        if (busy := steadiness.busy_line(self.device)) is not None:
            self.results.doubts.append(busy)
        with torch.set_grad_enabled(self.results.direction != "fwd"):
            self._ceiling("before")
            for case in self.cases:
                self._case(case)
                self.on_case(case)
            self._ceiling("after")
        return self.results

    def _ceiling(self, when: str) -> None:
        """Measures the GPU's ceilings, before the first case or after the last."""
        if self.device.type != "cuda":
            return
        self.progress(f"cuBLAS and a copy, {when} the cases")
        try:
            self.results.ceilings.append(ceilings.measure(when, self.device, self.effort))
            torch.cuda.empty_cache()
        except RuntimeError as failure:  # a baseline that broke CUDA, say: what was measured is kept
            self.on_failure("".join(traceback.format_exception(failure)))

    def _case(self, case: Case) -> None:
        self.progress(f"{case.name}: oracle")
        try:
            given = problem.build(case, self.device, self.seed, self.results.direction)
            expected = _expected(given, self.most_checked)
        except torch.OutOfMemoryError as failure:
            for each in self.implementations:
                self._failed(case, each, failure)
            return
        self.results.checked[case.name] = expected.sample.text
        measurements = [m for each in self.implementations if (m := self._check(each, given, expected)) is not None]
        self._time(case, measurements, self.effort.rounds, self.most_seconds)
        self._time_again(case, measurements)
        self._doubt(case, measurements)
        self.results.rows += [self._row(case, measurement) for measurement in measurements if measurement.samples_ms]
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _check(self, each: Implementation, given: problem.Problem, expected: Expected) -> Measurement | None:
        """Prepares and calls an implementation once, for error and peak memory. None if it refuses or fails."""
        case, direction = given.case, self.results.direction
        self.progress(f"{case.name}: {each.name}")
        try:
            if (reason := each.refusal(given)) is not None:
                self.results.refused.append(Missing(case.name, each.name, reason))
                return None
            prepared = each.prepare(given)
            with prepared.context():
                result = passes.start(direction, prepared, given)()
                error = expected.error(result)
                # The tolerance rule is ours to keep; a baseline's error is shown as it is, if it is a number.
                if each.name == OWN or not math.isfinite(error):
                    expected.check(result)
                del result
                peak = memory.peak_bytes(passes.whole(direction, prepared, given), self.device)
        except Exception as failure:
            self._failed(case, each, failure)
            return None
        if prepared.chosen is not None:
            self.results.implementation[case.name] = prepared.chosen
        return Measurement(each, given, prepared, error, prepared.held_bytes + peak)

    def _time(
        self, case: Case, measurements: list[Measurement], number_of_rounds: int, most_seconds: float = math.inf
    ) -> None:
        """Times all implementations in rounds, in orders by which drift and heat affect all alike (rounds.py)."""
        end = time.monotonic() + most_seconds
        for number in range(number_of_rounds):
            if number > 0 and time.monotonic() > end:
                return
            for measurement in [measurements[i] for i in self.order(len(measurements), number)]:
                self.progress(f"{case.name}: {measurement.implementation.name}, round {number + 1}")
                try:
                    samples = self._samples(measurement)
                except Exception as failure:
                    self._failed(case, measurement.implementation, failure)
                    measurements.remove(measurement)
                else:
                    measurement.samples_ms += samples
                    measurement.round_ms.append(median(samples))

    def _time_again(self, case: Case, measurements: list[Measurement]) -> None:
        """Times those again that `again` names, and keeps the first times in the results."""
        first = {m.implementation.name: median(m.samples_ms) for m in measurements if m.samples_ms}
        named = self.again(first)
        chosen = [m for m in measurements if m.implementation.name in named]
        if not chosen:
            return
        self.results.first_ms[case.name] = {name: first[name] for name in named}
        before = [(m, m.samples_ms, m.round_ms) for m in chosen]
        for m in chosen:
            m.samples_ms, m.round_ms = [], []
        kept = list(chosen)
        self._time(case, kept, self.rounds_again)
        for m, samples_ms, round_ms in before:
            if m not in kept or not m.samples_ms:  # it failed this time
                m.samples_ms, m.round_ms = samples_ms, round_ms

    def _doubt(self, case: Case, measurements: list[Measurement]) -> None:
        """Says in the results how far the rounds of all rows so far lie apart, where that is much."""
        before = steadiness.spread_line(self.spreads)
        for each in measurements:
            if each.samples_ms:
                name = (case.name, each.implementation.name)
                self.spreads[name] = steadiness.spread(each.round_ms, median(each.samples_ms))
        self.results.doubts[:] = [line for line in self.results.doubts if line != before]
        if (line := steadiness.spread_line(self.spreads)) is not None:
            self.results.doubts.append(line)

    def _samples(self, measurement: Measurement) -> list[float]:
        """The times of one round. A forward pass runs again in each, so that only one graph is kept at a time."""
        with measurement.prepared.context():
            call = passes.start(self.results.direction, measurement.prepared, measurement.given)
            return timing.sample_ms(call, self.device, self.effort)

    def _failed(self, case: Case, each: Implementation, failure: Exception) -> None:
        first_line = (str(failure).strip().splitlines() or [""])[0]
        self.results.failed.append(Missing(case.name, each.name, f"{type(failure).__name__}: {first_line}"))
        self.on_failure("".join(traceback.format_exception(failure)))

    def _row(self, case: Case, measurement: Measurement) -> Row:
        ms = median(measurement.samples_ms)
        return Row(
            suite=self.suite,
            case=case.name,
            direction=self.results.direction,
            backend=measurement.implementation.name,
            batch=case.batch,
            seqlen_q=case.seqlen_q,
            seqlen_k=case.seqlen_k,
            heads=case.heads,
            kv_heads=case.kv_heads,
            head_dim=case.head_dim,
            head_dim_v=case.head_dim_v,
            causal=case.causal,
            variant=case.variant,
            packing=case.packing,
            dtype=measurement.prepared.dtype or case.dtype,
            ms=ms,
            tflops=case.flops(self.results.direction) / ms / 1e9,
            error=measurement.error,
            peak_bytes=measurement.peak_bytes,
            gpu=self.results.gpu,
            versions=self.results.versions,
            commit=self.results.commit,
            date=self.results.date,
        )


def _expected(given: problem.Problem, most: int | None) -> Expected:
    if given.case.packing:
        return packed_oracle.build(given)
    return oracle.build(given, most) if given.do is None else gradient_oracle.build(given, most)
