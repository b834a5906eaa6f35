"""Measures the methods of one process on a row, in rounds, on the same tensors."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from tileattn.bench.decode.variants import Variant
from tileattn.measure.rounds import order

REFUSED, FAILED = "refused", "failed"
BROKE = "it broke the CUDA context: "  # how the reason begins of a failure after which the process ends


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


@dataclass
class _Running:
    """A method whose output was checked, and its times so far."""

    method: Method
    error: float
    sample: Callable[[], float]
    us: list[float] = field(default_factory=list)


class Measurer:
    """Measures rows with the tensors of one pool.

    Attributes:
        lost: whether a kernel broke the CUDA context, so that nothing more can be measured in this process.
    """

    def __init__(self, pool: Pool, rounds: int) -> None:
        self.pool = pool
        self.rounds = rounds
        self.lost = False

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
            except Exception as failure:  # of the row's tensors, or the GPU is lost
                there = {row.backend for row in measured.rows} | {entry.backend for entry in measured.missing}
                for method in willing:
                    if method.name not in there:
                        _failed(measured, case, method, failure)
        if not self.lost:
            self.pool.trim()
        return measured

    @torch.no_grad()
    def _measure(self, case: Case, methods: Sequence[Method], measured: Measured) -> None:
        problem = self._problem(case, min(_keys_read(case, method) for method in methods) / case.context)
        expected: dict[Variant, Expected] = {}
        for variant in dict.fromkeys(method.variant for method in methods):
            if variant is not None:
                expected[variant] = expect(problem, variant)
        running: list[_Running] = []
        for method in methods:
            with self._keeping(measured, case, method):
                running.append(self._prepare(method, problem, expected))
        for number in range(self.rounds):
            for each in [running[i] for i in order(len(running), number)]:
                with self._keeping(measured, case, each.method):
                    each.us.append(each.sample())
        for each in running:
            if len(each.us) == self.rounds:
                measured.rows.append(self._row(case, each))

    def _problem(self, case: Case, share: float) -> Problem:
        try:
            return self.pool.problem(case, share)
        except torch.OutOfMemoryError:
            self.pool.release()  # and what the allocator holds
            return self.pool.problem(case, share)

    def _prepare(self, method: Method, problem: Problem, expected: Mapping[Variant, Expected]) -> _Running:
        """Checks a method's output, and makes what times it."""
        attend, error = method.prepare(problem), 0.0
        o = attend(0)
        if method.variant is not None:
            error = expected[method.variant].error(o)
            # The tolerance rule is ours to keep; a baseline's error is shown as it is, if it is a number.
            if is_own(method.name) or not math.isfinite(error):
                expected[method.variant].check(o)
        calls = [partial(attend, i) for i in range(len(problem.k))]
        sample = timing.sampler(calls, self._bytes_read(problem.case, method), self.pool.device)
        return _Running(method, error, sample)

    def _bytes_read(self, case: Case, method: Method) -> int:
        return case.kv_bytes(self.pool.dtype.itemsize) // case.context * _keys_read(case, method)

    def _row(self, case: Case, measured: _Running) -> Row:
        us = median(measured.us)
        kv_bytes = self._bytes_read(case, measured.method)
        sizes = (case.batch, case.context, case.heads, case.kv_heads, case.head_dim, case.page, kv_bytes)
        return Row(case.name, measured.method.name, *sizes, us, kv_bytes / us / 1e3, measured.error)

    @contextmanager
    def _keeping(self, measured: Measured, case: Case, method: Method) -> Iterator[None]:
        """Makes what a method raises inside a missing measurement; raises `GpuLost` if the GPU is lost with it."""
        try:
            yield
        except Exception as failure:
            self.lost = is_lost(self.pool.device)
            _failed(measured, case, method, failure, BROKE if self.lost else "")
            if self.lost:
                raise GpuLost(f"not measured: {method.name} broke the CUDA context in this row") from failure


class GpuLost(Exception):
    """A kernel broke the CUDA context of the process."""


def is_lost(device: torch.device) -> bool:
    """Whether the GPU no longer runs anything for this process, as after an illegal access."""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


def _keys_read(case: Case, method: Method) -> int:
    """The keys of a sequence that a method reads."""
    variant = method.variant
    if variant is None:
        return case.context
    return min(variant.keys or case.context, variant.window or case.context)


def _failed(measured: Measured, case: Case, method: Method, failure: Exception, what: str = "") -> None:
    if any(each.backend == method.name for each in measured.missing):  # once is enough for a row
        return
    first_line = (str(failure).strip().splitlines() or [""])[0]
    reason = f"{what}{type(failure).__name__}: {first_line[:200]}"
    measured.missing.append(Missing(case.name, method.name, FAILED, reason))
    measured.failures.append("".join(traceback.format_exception(failure)))


def own_failed(missing: Sequence[Missing]) -> bool:
    """Whether tileattn itself failed in a row."""
    return any(is_own(entry.backend) and entry.kind == FAILED for entry in missing)
