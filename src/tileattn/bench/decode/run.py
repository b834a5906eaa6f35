"""Runs the rows of the decode suite: the methods of this process, then those of the process of the baselines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from tileattn.bench.decode import ceilings
from tileattn.bench.decode.cases import Case
from tileattn.bench.decode.elsewhere import Elsewhere, ProcessEnded
from tileattn.bench.decode.methods import Method
from tileattn.bench.decode.problem import Pool
from tileattn.bench.decode.results import Results
from tileattn.bench.decode.rows import REFUSED, Measurer, Missing


@dataclass(frozen=True)
class Run:
    """The rows and methods of a run, and where results go.

    on_row: Called after each row.
    on_failure: Called with the traceback of each failure.
    """

    cases: Sequence[Case]
    methods: Sequence[Method]
    device: torch.device
    dtype: torch.dtype
    rounds: int
    results: Results
    on_row: Callable[[Case], None] = lambda case: None
    on_failure: Callable[[str], None] = lambda text: None

    def __call__(self) -> None:
        """Runs the rows that the results do not have."""
        todo = [case for case in self.cases if case.name not in self.results.done]
        with ExitStack() as stack:
            other = None
            if any(method.is_elsewhere and self._runs(method, todo) for method in self.methods):
                other = stack.enter_context(Elsewhere(self.device, self.dtype, self.rounds))
            measurer = Measurer(Pool(self.device, self.dtype), self.rounds)
            self._ceilings("before", other)
            for case in todo:
                self._row(case, measurer, other)
                self.on_row(case)
            self._ceilings("after", other)

    def _runs(self, method: Method, cases: Sequence[Case]) -> bool:
        return any(method.refusal(case, self.device, self.dtype) is None for case in cases)

    def _row(self, case: Case, measurer: Measurer, other: Elsewhere | None) -> None:
        here = [method for method in self.methods if not method.is_elsewhere]
        there = []
        for method in self.methods:
            if method.is_elsewhere:
                # Asked here, so that a process is not needed to hear that nothing can run in it.
                reason = method.refusal(case, self.device, self.dtype)
                if reason is None:
                    there.append(method)
                else:
                    self.results.missing.append(Missing(case.name, method.name, REFUSED, reason))
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
