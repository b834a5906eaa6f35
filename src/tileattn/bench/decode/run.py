"""Runs rows of decoding: the methods of this process, then those of the process of the baselines, row by row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from tileattn.bench.baselines.base import OWN
from tileattn.bench.decode import ceilings
from tileattn.bench.decode.ahead import compile_ahead
from tileattn.bench.decode.cases import Case
from tileattn.bench.decode.elsewhere import ENDED, Elsewhere, ProcessEnded
from tileattn.bench.decode.methods import Method
from tileattn.bench.decode.problem import Pool
from tileattn.bench.decode.results import Results
from tileattn.bench.decode.rows import BROKE, FAILED, REFUSED, GpuLost, Measurer, Missing

# A run stops if tileattn fails in so many rows from its start: something is wrong that all rows have.
MOST_FAILING = 4
MOST_BROKEN = 2  # rows in which a method broke the CUDA context or ended its process: each costs a new process


class NothingRuns(Exception):
    """tileattn failed in all of the first rows."""


@dataclass(frozen=True)
class Run:
    """The rows and methods of a run, and where results go.

    methods: the methods of a row.
    on_begin: Called before each row.
    on_row: Called after each row.
    say: Called with what is done before the first row.
    on_failure: Called with the traceback of each failure.
    """

    cases: Sequence[Case]
    methods: Callable[[Case], Sequence[Method]]
    device: torch.device
    dtype: torch.dtype
    rounds: int
    results: Results
    on_begin: Callable[[], None] = lambda: None
    on_row: Callable[[Case], None] = lambda case: None
    say: Callable[[str], None] = lambda text: None
    on_failure: Callable[[str], None] = lambda text: None

    def __call__(self) -> None:
        """Runs the rows that the results do not have; last those that were begun and did not end.

        Raises:
            GpuLost: a kernel broke the CUDA context. The row's results say which.
            NothingRuns: tileattn failed in all of the first rows.
        """
        todo = [case for case in self.cases if case.name not in self.results.done]
        todo.sort(key=lambda case: case.name in self.results.begun)
        if not todo:
            return
        with ExitStack() as stack:
            other = None
            if elsewhere := self._elsewhere(todo):
                other = stack.enter_context(Elsewhere(self.device, self.dtype, self.rounds))
                other.begin(*elsewhere)
            if self.device.type == "cuda":
                compile_ahead([(case, each) for case in todo for each in self.methods(case)], *self._kind(), self.say)
            if other is not None:
                self.say("waiting for the process of the baselines")
                other.wait()
            measurer = Measurer(Pool(*self._kind()), self.rounds)
            self._ceilings("before", other)
            for number, case in enumerate(todo, start=1):
                if case.name not in self.results.begun:
                    self.results.begun.append(case.name)
                self.on_begin()
                self._row(case, measurer, other)
                self.on_row(case)
                if measurer.lost:
                    raise GpuLost(f"a kernel broke the CUDA context in the row {case.name}")
                if number == MOST_FAILING and all(self._failed(each) for each in todo[:number]):
                    raise NothingRuns(f"tileattn failed in all of the first {number} rows")
            self._ceilings("after", other)

    def _failed(self, case: Case) -> bool:
        return any((each.case, each.backend, each.kind) == (case.name, OWN, FAILED) for each in self.results.missing)

    def _broken_rows(self, method: Method) -> int:
        reasons = [each.reason for each in self.results.missing if each.backend == method.name]
        return sum(reason.startswith((BROKE, ENDED)) for reason in reasons)

    def _kind(self) -> tuple[torch.device, torch.dtype]:
        return self.device, self.dtype

    def _elsewhere(self, todo: Sequence[Case]) -> tuple[list[Case], list[Method]] | None:
        """The smallest row of each kind that needs a kernel of its own in the other process, and the methods there."""
        kinds: dict[tuple[int, int], Case] = {}
        methods: dict[str, Method] = {}
        for case in sorted(todo, key=lambda each: each.elements):
            for method in self.methods(case):
                if method.is_elsewhere and method.refusal(case, *self._kind()) is None:
                    methods[method.name] = method
                    kinds.setdefault((case.page, case.heads // case.kv_heads), case)
        return (list(kinds.values()), list(methods.values())) if kinds else None

    def _row(self, case: Case, measurer: Measurer, other: Elsewhere | None) -> None:
        here: list[Method] = []
        there: list[Method] = []
        for method in self.methods(case):
            # Asked here, so that a process is not needed to hear that nothing can run in it.
            reason = method.refusal(case, *self._kind()) if method.is_elsewhere else None
            if reason is not None:
                self.results.missing.append(Missing(case.name, method.name, REFUSED, reason))
            elif self._broken_rows(method) >= MOST_BROKEN:
                reason = f"not tried: it ended its process in {MOST_BROKEN} rows"
                self.results.missing.append(Missing(case.name, method.name, FAILED, reason))
            else:
                (there if method.is_elsewhere else here).append(method)
        parts = [measurer(case, here)]
        if there:
            assert other is not None
            parts.append(other.measure(case, there))
            self.results.baseline_versions = other.versions
        for measured in parts:
            self.results.rows += measured.rows
            self.results.missing += measured.missing
            for failure in measured.failures:
                self.on_failure(failure)
        self.results.done.append(case.name)

    def _ceilings(self, when: str, other: Elsewhere | None) -> None:
        if self.device.type != "cuda":
            return
        try:
            self.results.ceilings.append(ceilings.measure(when, "tileattn", self.device))
            torch.cuda.empty_cache()
            if other is not None:
                self.results.ceilings.append(other.ceilings(when))
        except (RuntimeError, ProcessEnded) as failure:  # what was measured is kept
            self.on_failure(f"the ceilings {when} the rows: {failure}")
