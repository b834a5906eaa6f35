"""The result file: a JSON object whose `rows` are the measurements. `benchmarks/results/README.md` describes it."""

from __future__ import annotations

import json
import math
import os
import reprlib
import warnings
from collections.abc import Sequence
from dataclasses import MISSING, Field, asdict, dataclass, field, fields
from datetime import datetime, timezone
from pathlib import Path
from types import UnionType
from typing import Any, get_origin, get_type_hints

import torch

from tileattn.bench import environment
from tileattn.bench.cases import DIRECTIONS, DTYPES, Case
from tileattn.measure.ceilings import Ceiling

FORMAT = 1

# The least and the most that can be right, far beyond what any machine has: pictures write the numbers down, and some
# of their axes are logarithmic.
MILLISECONDS = (1e-6, 1e9)
TFLOPS = (0.0, 1e9)
ERROR = (1e-60, 1e60)  # or 0, or not finite
BYTES = (0, 2**60)
CEILING = (1e-6, 1e9)
SIZE = (1, 2**40)
SIZES = ("batch", "seqlen_q", "seqlen_k", "heads", "kv_heads", "head_dim", "head_dim_v")


@dataclass(frozen=True)
class Row:
    """The measurement of one implementation on one case; its fields are exactly the keys of a JSON row.

    direction: A key of `cases.DIRECTIONS`.
    ms: Median milliseconds of a call.
    tflops: The case's FLOPs (`Case.flops`) over that time.
    error: Largest relative error of a checked row, of o (`Oracle.error`) or the gradients (`GradientOracle.error`).
    peak_bytes: Peak memory beyond the inputs (`memory.peak_bytes`), with the forward pass and `Prepared.held_bytes`.
    gpu: Name of the device, also of a CPU.
    date: UTC, ISO 8601.
    packing: A name of `cases.PACKINGS`; older files lack it.
    """

    suite: str
    case: str
    direction: str
    backend: str
    batch: int
    seqlen_q: int
    seqlen_k: int
    heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    causal: bool
    variant: str
    dtype: str
    ms: float
    tflops: float
    error: float
    peak_bytes: int
    gpu: str
    versions: dict[str, str]
    commit: str | None
    date: str
    packing: str = ""

    def as_case(self) -> Case:
        """The case that was measured."""
        return Case(**{field.name: getattr(self, field.name) for field in fields(Case)})


@dataclass(frozen=True)
class Missing:
    """A missing measurement and its reason: the implementation refused the case, or failed."""

    case: str
    backend: str
    reason: str


@dataclass
class Results:
    """One run of the benchmark. `device` is "cuda" or "cpu"; `implementation` is the backend inside tileattn.

    direction: The direction of all rows, a key of `cases.DIRECTIONS`; older files lack it and are of the forward pass.
    ceilings: The GPU's ceilings before the first case and after the last; empty on a CPU and in older files.
    seed: The seed of the tensors, where a command takes one; None elsewhere and in older files.
    first_values: The first two values and the last of each backend's output, which `tileattn ladder` shows.
    doubts: What makes the times doubtful, a line each (`bench.steadiness`); older files lack it.
    first_ms: Of the cases that were measured again: the first milliseconds of each backend that was.
    draws: Of the suite random: the names of the cases by seed.
    standing: Of the suite random: `bench.draws.standing`, for those who read the file without this package.
    settings: Of the suite random: dtype, rounds and implementations, on which a run that goes on must agree.
    """

    device: str
    gpu: str
    versions: dict[str, str]
    commit: str | None
    date: str
    command: str = ""
    direction: str = "fwd"
    rows: list[Row] = field(default_factory=list)
    refused: list[Missing] = field(default_factory=list)
    failed: list[Missing] = field(default_factory=list)
    implementation: dict[str, str] = field(default_factory=dict)
    checked: dict[str, str] = field(default_factory=dict)
    ceilings: list[Ceiling] = field(default_factory=list)
    seed: int | None = None
    first_values: dict[str, list[float]] = field(default_factory=dict)
    doubts: list[str] = field(default_factory=list)
    first_ms: dict[str, dict[str, float]] = field(default_factory=dict)
    draws: dict[str, list[str]] = field(default_factory=dict)
    standing: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)

    def row(self, case: str, backend: str) -> Row | None:
        """The row of a case and backend, if it was measured."""
        return next((row for row in self.rows if row.case == case and row.backend == backend), None)

    def cases(self) -> list[str]:
        """Names of the cases in the order in which they were run."""
        return list(dict.fromkeys(entry.case for entry in self._entries()))

    def backends(self) -> list[str]:
        """Names of the backends: tileattn first, then the baselines as they were run."""
        names = dict.fromkeys(entry.backend for entry in self._entries())
        return sorted(names, key=lambda name: name != "tileattn")

    def _entries(self) -> list[Row | Missing]:
        return [*self.rows, *self.refused, *self.failed]


def begin(device: torch.device, commit: str | None, command: str, direction: str = "fwd") -> Results:
    """Results without rows, for a run that starts now. `commit` is recorded instead of what git says."""
    return Results(
        device=device.type,
        gpu=environment.device_name(device),
        versions=environment.versions(),
        commit=commit or environment.commit(),
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        command=command,
        direction=direction,
    )


def origin(results: Results) -> dict[str, Any]:
    """Where a run's figures come from, for the files of scripts that have rows of their own."""
    return {key: getattr(results, key) for key in ("gpu", "versions", "commit", "date", "command")}


def save(results: Results, path: Path) -> None:
    """Writes the file atomically, so that a killed run leaves the last complete one."""
    write({"format": FORMAT, **asdict(results)}, path)


def write(content: dict[str, Any], path: Path) -> None:
    """Writes a file of JSON at once, so that a killed run leaves the last complete one."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(json.dumps(content, indent=1) + "\n")
    draft.replace(path)


def read(path: Path) -> dict[str, Any]:
    """The JSON object in a file; raises `ValueError` if there is none."""
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a tileattn result file: it holds {reprlib.repr(content)}, not an object")
    return content


def load(path: Path) -> Results:
    """Reads a result file; raises `ValueError` if the file is not one.

    Rows with an error that is not finite are moved from `rows` to `failed`, with a warning.
    """
    content = read(path)
    if (found := content.pop("format", None)) != FORMAT:
        raise ValueError(f"{path} is not a tileattn result file of format {FORMAT}: it has format {found!r}")
    # Files written before there were ceilings lack that key.
    content.setdefault("ceilings", [])
    try:
        results: Results = made(Results, content, "it")
        for key, kind in (("rows", Row), ("refused", Missing), ("failed", Missing), ("ceilings", Ceiling)):
            entries = [made(kind, given, f"{key}[{i}]") for i, given in enumerate(content[key])]
            setattr(results, key, entries)
        _check_values(results)
    except ValueError as error:
        raise ValueError(f"{path} is not a tileattn result file: {error}") from error
    _move_overflowed(results, path)
    return results


def _move_overflowed(results: Results, path: Path) -> None:
    """Moves rows without a finite error to `failed`: their speed means nothing."""
    overflowed = [row for row in results.rows if not math.isfinite(row.error)]
    if not overflowed:
        return
    named = ", ".join(f"{row.backend} in {row.case}" for row in overflowed)
    warnings.warn(f"{path}: left out is what has no finite error: {named}", stacklevel=3)
    results.rows = [row for row in results.rows if math.isfinite(row.error)]
    results.failed += [Missing(row.case, row.backend, f"its error is {row.error}") for row in overflowed]


def made(kind: Any, given: Any, where: str) -> Any:
    """A dataclass from a JSON object; `ValueError` names a key that is missing, unknown or of another type."""
    if not isinstance(given, dict):
        raise ValueError(f"{where} is {reprlib.repr(given)}, not an object")
    # Defaults are for those who begin results, and for keys that older files lack.
    lacking = [each.name for each in fields(kind) if _is_needed(kind, each) and each.name not in given]
    if lacking:
        raise ValueError(f"{where} lacks {', '.join(map(repr, lacking))}")
    types = get_type_hints(kind)
    if unknown := [name for name in given if name not in types]:
        raise ValueError(f"{where} has {', '.join(map(repr, unknown))}, which no reader knows")
    for name, value in given.items():
        if not _is_a(value, types[name]):
            wanted = getattr(types[name], "__name__", types[name])
            raise ValueError(f"{where} has {name!r} = {reprlib.repr(value)}, which is no {wanted}")
    return kind(**given)


def _is_needed(kind: Any, each: Field[Any]) -> bool:
    if kind is Results and each.name in ("rows", "refused", "failed"):
        return True
    return each.default is MISSING and each.default_factory is MISSING


def _is_a(value: Any, wanted: Any) -> bool:
    """Whether a JSON value has an annotated type; elements of lists and dicts are not checked."""
    if isinstance(wanted, UnionType):
        return any(_is_a(value, each) for each in wanted.__args__)
    if wanted in (int, float):
        return isinstance(value, (int, wanted)) and not isinstance(value, bool)
    return isinstance(value, get_origin(wanted) or wanted)


def _check_values(results: Results) -> None:
    """Checks the values that tables and pictures look up, divide by, or draw."""
    for i, row in enumerate(results.rows):
        where = f"rows[{i}]"
        _check_bounds(where, row, ("ms",), MILLISECONDS, "no time")
        _check_bounds(where, row, ("tflops",), TFLOPS, "no speed")
        _check_bounds(where, row, ("peak_bytes",), BYTES, "no number of bytes")
        _check_bounds(where, row, SIZES, SIZE, "no size")
        if row.error not in (0, math.inf) and row.error == row.error:  # NaN is not itself
            _check_bounds(where, row, ("error",), ERROR, "neither 0 nor an error")
        if row.dtype not in DTYPES:
            raise ValueError(f"{where} has 'dtype' = {row.dtype!r}; known are {', '.join(DTYPES)}")
    for i, ceiling in enumerate(results.ceilings):
        _check_bounds(f"ceilings[{i}]", ceiling, ("matmul_tflops", "copy_tbps"), CEILING, "no speed")
    if results.direction not in DIRECTIONS:
        raise ValueError(f"it has 'direction' = {results.direction!r}; known are {', '.join(DIRECTIONS)}")


def _check_bounds(where: str, of: Row | Ceiling, names: Sequence[str], bounds: tuple[float, float], what: str) -> None:
    for name in names:
        value = getattr(of, name)
        if not bounds[0] <= value <= bounds[1]:  # nor is NaN
            low, high = bounds
            raise ValueError(
                f"{where} has {name!r} = {reprlib.repr(value)}, which is {what}; accepted: {low:g} to {high:g}"
            )
