"""Measures the methods of one process on a row, in rounds, on the same tensors."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median

import torch

from tileattn.bench.baselines.base import is_own
from tileattn.bench.decode import timing
from tileattn.bench.decode.cases import Case
from tileattn.bench.decode.check import Expected, expect
from tileattn.bench.decode.methods import Method
from tileattn.bench.decode.problem import Pool, Problem
from tileattn.measure.rounds import order

REFUSED, FAILED = "refused", "failed"


@dataclass(frozen=True)
class Row:
    """The measurement of one method on one row; its fields are the keys of a JSON row.

    us: median microseconds of a call.
    gbps: bytes of K and V over that time, in 10^9 bytes per second.
    error: largest relative error of a row of o, of the first and the last sequence.
    """

    case: str
    backend: str
    batch: int
    context: int
    heads: int
    kv_heads: int
    head_dim: int
    page: int
    kv_bytes: int
    us: float
    gbps: float
    error: float


@dataclass(frozen=True)
class Missing:
    """A missing measurement: the method refused the row (`kind` "refused"), or failed."""

    case: str
    backend: str
    kind: str
    reason: str


@dataclass
class Measured:
    """What one process measured of a row, and the tracebacks of failures."""

    rows: list[Row] = field(default_factory=list)
    missing: list[Missing] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Measurer:
    """Measures rows with the tensors of one pool."""

    pool: Pool
    rounds: int

    def __call__(self, case: Case, methods: Sequence[Method]) -> Measured:
        """Measures all methods on a row. What a method raises becomes an entry of `missing`."""
        measured = Measured()
        device, dtype = self.pool.device, self.pool.dtype
        willing = []
        for method in methods:
            if (reason := method.refusal(case, device, dtype)) is not None:
                measured.missing.append(Missing(case.name, method.name, REFUSED, reason))
            else:
                willing.append(method)
        if willing:
            try:
                self._measure(case, willing, measured)
            except torch.OutOfMemoryError as failure:  # of the row's tensors
                for method in willing:
                    _failed(measured, case, method, failure)
        self.pool.trim()
        return measured

    @torch.no_grad()
    def _measure(self, case: Case, methods: Sequence[Method], measured: Measured) -> None:
        problem = self.pool.problem(case)
        expected = expect(problem)
        ready: list[tuple[Method, float, Callable[[], float], list[float]]] = []
        for method in methods:
            try:
                error, sample = self._prepare(method, problem, expected)
            except Exception as failure:
                _failed(measured, case, method, failure)
            else:
                ready.append((method, error, sample, []))
        for number in range(self.rounds):
            for _, _, sample, samples in [ready[i] for i in order(len(ready), number)]:
                samples.append(sample())
        kv_bytes = case.kv_bytes(self.pool.dtype.itemsize)
        for method, error, _, samples in ready:
            us = median(samples)
            sizes = (case.batch, case.context, case.heads, case.kv_heads, case.head_dim, case.page, kv_bytes)
            measured.rows.append(Row(case.name, method.name, *sizes, us, kv_bytes / us / 1e3, error))

    def _prepare(self, method: Method, problem: Problem, expected: Expected) -> tuple[float, Callable[[], float]]:
        """The error of a method's output, and what times it."""
        attend = method.prepare(problem)
        o = attend(0)
        error = expected.error(o)
        # The tolerance rule is ours to keep; a baseline's error is shown as it is, if it is a number.
        if is_own(method.name) or not math.isfinite(error):
            expected.check(o)
        calls = [partial(attend, i) for i in range(len(problem.k))]
        return error, timing.sampler(calls, problem.case.kv_bytes(self.pool.dtype.itemsize), self.pool.device)


def _failed(measured: Measured, case: Case, method: Method, failure: Exception) -> None:
    first_line = (str(failure).strip().splitlines() or [""])[0]
    reason = f"{type(failure).__name__}: {first_line[:200]}"
    measured.missing.append(Missing(case.name, method.name, FAILED, reason))
    measured.failures.append("".join(traceback.format_exception(failure)))


def own_failed(missing: Sequence[Missing]) -> bool:
    """Whether tileattn itself failed in a row."""
    return any(is_own(entry.backend) and entry.kind == FAILED for entry in missing)
