"""The result file of the suite: a JSON object whose `rows` are the measurements, written after each case."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tileattn.bench.baselines.base import OWN, is_own
from tileattn.bench.results import made, read, write

FORMAT = "parallel-1"
IDEAL = "ideal"
MOST = 1.01  # of the ideal: if tileattn is faster than that, the measurement is wrong
# What must agree for a run to go on from a file: its rows stand beside each other.
AGREE = ("device", "gpu", "ranks", "commit", "dtype", "base", "head_dim")


@dataclass(frozen=True)
class Row:
    """The measurement of one implementation on one case, in one direction.

    Attributes:
        case, backend: names of the case and the implementation.
        direction: "fwd", or "fwdbwd" for both passes.
        ms: median over rounds; of each call the slowest rank counts.
        rounds: the milliseconds of each round.
        tflops: of a GPU: the case's FLOPs over the time and the number of ranks.
        peak_bytes: the most memory on a rank, with the inputs.
        sent_bytes: the most that a rank sends in a call; None if unknown.
        errors: of o, and of gradients in both passes, against one device (`check.py`); {} if not checked.
        wrong: the names of those that break the rule, or "".
    """

    case: str
    backend: str
    direction: str
    ms: float
    rounds: list[float]
    tflops: float
    peak_bytes: int
    sent_bytes: int | None
    errors: dict[str, float]
    wrong: str


@dataclass(frozen=True)
class Missing:
    """What was not measured, and why: it was refused, or it failed on a rank."""

    case: str
    backend: str
    direction: str
    reason: str
    failed: bool


@dataclass(frozen=True)
class HostCost:
    """Microseconds of the host for a call, the median over calls, on the slowest rank. what: as in tables."""

    what: str
    us: float


@dataclass
class Results:
    """One run, with its continuations.

    Attributes:
        device: "cuda" or "cpu"; gpu: the name of the device of the first rank.
        base: tokens that stand for 128k.
        begun, done: names of cases. What was begun and is not done ended the process.
        host_costs: of a call at a small shape.
    """

    device: str
    gpu: str
    ranks: int
    dtype: str
    base: int
    head_dim: int
    versions: dict[str, str]
    commit: str | None
    date: str
    commands: list[str] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    missing: list[Missing] = field(default_factory=list)
    host_costs: list[HostCost] = field(default_factory=list)
    host_shape: str = ""
    begun: list[str] = field(default_factory=list)
    done: list[str] = field(default_factory=list)

    def row(self, case: str, backend: str, direction: str) -> Row | None:
        """A measurement, if there is one."""
        wanted = (case, backend, direction)
        return next((row for row in self.rows if (row.case, row.backend, row.direction) == wanted), None)

    def cases(self) -> list[str]:
        """Names, in the order in which they were run."""
        entries: list[Row | Missing] = [*self.rows, *self.missing]
        return list(dict.fromkeys(each.case for each in entries))

    def directions(self) -> list[str]:
        """Those that were measured: the forward pass first."""
        return [name for name in ("fwd", "fwdbwd") if any(row.direction == name for row in self.rows)]

    def of_ideal(self, row: Row) -> float | None:
        """The speed as a part of the ideal's; None where that was not measured."""
        ideal = self.row(row.case, IDEAL, row.direction)
        return None if ideal is None or row.backend == IDEAL else ideal.ms / row.ms

    def suspicious(self) -> list[Row]:
        """tileattn's rows that are faster than the ideal, which has the same kernels: the measurement is wrong."""
        return [row for row in self.rows if is_own(row.backend) and (self.of_ideal(row) or 0.0) > MOST]

    def best_of_pytorch(self, case: str, direction: str) -> Row | None:
        """The fastest of PyTorch's, of all kernels and ways of rotation."""
        rows = [
            row
            for row in self.rows
            if (row.case, row.direction) == (case, direction) and not is_own(row.backend) and row.backend != IDEAL
        ]
        return min(rows, key=lambda row: row.ms, default=None)

    def failed(self) -> bool:
        """Whether tileattn failed, broke the rule of errors, or never ran."""
        own = [row for row in self.rows if is_own(row.backend)]
        fails = any(is_own(each.backend) and each.failed for each in self.missing)
        return fails or any(row.wrong for row in own) or not any(row.backend == OWN for row in own)


def save(results: Results, path: Path) -> None:
    """Writes the file at once, so that a killed run leaves the last complete one."""
    write({"format": FORMAT, **asdict(results)}, path)


def load(path: Path) -> Results:
    """Reads a result file; raises `ValueError` if the file is not one."""
    content = read(path)
    if (found := content.pop("format", None)) != FORMAT:
        raise ValueError(f"{path} is not a result file of format {FORMAT!r}: it has format {found!r}")
    try:
        results: Results = made(Results, content, "it")
        results.rows = _all(Row, results.rows, "rows")
        results.missing = _all(Missing, results.missing, "missing")
        results.host_costs = _all(HostCost, results.host_costs, "host_costs")
        for i, row in enumerate(results.rows):
            if not (row.ms > 0 and row.tflops > 0 and row.peak_bytes > 0):
                raise ValueError(f"rows[{i}] has ms, tflops or peak_bytes that is not above 0: {row}")
    except ValueError as error:
        raise ValueError(f"{path} is not a result file of the suite parallel: {error}") from error
    return results


def _all(kind: Any, given: Sequence[Any], where: str) -> list[Any]:
    return [made(kind, each, f"{where}[{i}]") for i, each in enumerate(given)]


def resume(path: Path, fresh: Results) -> Results:
    """The results of a file, to be continued by the run that `fresh` begins.

    A case that was begun and is not done ended the process: it is entered as failed, and not begun again.

    Raises:
        ValueError: it is no result file of this suite, or of another device, commit or size.
    """
    there = load(path)
    for name in AGREE:
        if getattr(there, name) != getattr(fresh, name):
            raise ValueError(f"{path} has {name} {getattr(there, name)!r}, and this run has {getattr(fresh, name)!r}")
    for case in there.begun:
        if case not in there.done:
            there.missing.append(Missing(case, "all", "", "the process ended in this case", True))
            there.done.append(case)
    there.commands += fresh.commands
    return there
