"""The result file of the decode suite: a JSON object with its run's rows, written after each, from which a run resumes.

`benchmarks/results/README.md` describes it.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from tileattn.bench.decode.ceilings import Ceiling
from tileattn.bench.decode.rows import Missing, Row

FORMAT = "decode-1"
ENTRIES: dict[str, Any] = {"rows": Row, "missing": Missing, "ceilings": Ceiling}
# What must agree for a run to go on from a file: its rows are compared with each other.
AGREE = ("device", "gpu", "dtype", "commit", "backends")


@dataclass
class Results:
    """One run, with its continuations.

    Attributes:
        device: "cuda" or "cpu".
        gpu: name of the device, also of a CPU.
        dtype: a name of :data:`tileattn.bench.cases.DTYPES`.
        versions: versions by package, of the process of tileattn.
        baseline_versions: the same of the process of the baselines; empty if there was none.
        commit: the commit of the code.
        date: UTC, ISO 8601, of the start.
        commands: the command lines of the run and its continuations.
        backends: the names of all that was to be measured.
        rows: the measurements.
        missing: what was refused or failed, with reasons.
        left_out: the rows that were not run because K and V exceed the limit.
        begun: the rows that were begun.
        done: the rows that were run to their end.
        ceilings: the GPU's ceilings before and after the rows, in both processes.
    """

    device: str
    gpu: str
    dtype: str
    versions: dict[str, str]
    commit: str | None
    date: str
    backends: list[str]
    baseline_versions: dict[str, str] = field(default_factory=dict)
    commands: list[str] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    missing: list[Missing] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    begun: list[str] = field(default_factory=list)
    done: list[str] = field(default_factory=list)
    ceilings: list[Ceiling] = field(default_factory=list)

    def of_case(self, case: str) -> list[Row]:
        """The measurements of a row."""
        return [row for row in self.rows if row.case == case]

    def row(self, case: str, backend: str) -> Row | None:
        """The measurement of a backend in a row, if there is one."""
        return next((row for row in self.rows if (row.case, row.backend) == (case, backend)), None)


def save(results: Results, path: Path) -> None:
    """Writes the file at once, so that whoever reads it never finds a part of it; a measurement is a line."""
    members = [f'"format": {json.dumps(FORMAT)}']
    for name, value in vars(results).items():
        if name in ENTRIES:
            lines = ",\n".join(json.dumps(vars(entry)) for entry in value)
            members.append(f'"{name}": [\n{lines}\n]')
        else:
            members.append(f'"{name}": {json.dumps(value)}')
    draft = path.with_name(f"{path.name}.{os.getpid()}.part")
    draft.write_text("{\n" + ",\n".join(members) + "\n}\n")
    draft.replace(path)


def load(path: Path) -> Results:
    """Reads a result file. Raises `ValueError` if the file is not one."""
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
        raise ValueError(f"{path} is not a result file of the suite decode (format {FORMAT})")
    try:
        results: Results = _made(Results, content)
        for key, kind in ENTRIES.items():
            setattr(results, key, [_made(kind, entry) for entry in content[key]])
    except (TypeError, KeyError) as error:
        raise ValueError(f"{path} is not a result file of the suite decode: {error}") from error
    return results


def _made(kind: Any, given: Any) -> Any:
    """A dataclass from a JSON object that has exactly its keys."""
    if not isinstance(given, dict) or given.keys() != {each.name for each in fields(kind)}:
        raise TypeError(f"an entry has not exactly the keys of {kind.__name__}: {given!r:.100}")
    return kind(**given)


def resume(path: Path, fresh: Results) -> Results:
    """The results of a file, to be continued by the run that `fresh` begins.

    Raises:
        ValueError: it is no result file of this suite, or of another device, commit or choice of baselines.
    """
    there = load(path)
    for name in AGREE:
        if getattr(there, name) != getattr(fresh, name):
            raise ValueError(f"{path} has {name} {getattr(there, name)!r}, and this run has {getattr(fresh, name)!r}")
    there.commands += fresh.commands
    return there
