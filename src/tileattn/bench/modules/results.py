"""The result file of the suite: a JSON object whose `rows` are the measurements."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path

from tileattn.bench.results import made, read, write

FORMAT = "modules-1"
NAIVE = "naive"


@dataclass(frozen=True)
class Shape:
    """What all rows have in common but the length.

    kv_heads: key/value heads of the module "gqa"; the others have as many as query heads.
    direction: "fwd", without gradients, or "fwdbwd".
    """

    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    direction: str
    causal: bool = True

    @property
    def embed_dim(self) -> int:
        """The width of x and of the output."""
        return self.heads * self.head_dim


@dataclass(frozen=True)
class Row:
    """The measurement of one module at one length.

    ms: median milliseconds of a call of the module, projections included.
    peak_bytes: the most memory beyond x and the parameters (`tileattn.measure.memory`).
    error: the largest difference from the output of NaiveAttention in float64, over the largest element of that; of the
        first 512 positions of the first sequence.
    """

    module: str
    seqlen: int
    ms: float
    peak_bytes: int
    error: float


@dataclass(frozen=True)
class Missing:
    """A module that was not measured at a length, and why."""

    module: str
    seqlen: int
    reason: str


@dataclass
class Results:
    """One run."""

    gpu: str
    versions: dict[str, str]
    commit: str | None
    date: str
    command: str
    shape: Shape
    rows: list[Row] = field(default_factory=list)
    missing: list[Missing] = field(default_factory=list)

    def row(self, module: str, seqlen: int) -> Row | None:
        """The row of a module and a length, if it was measured."""
        return next((row for row in self.rows if (row.module, row.seqlen) == (module, seqlen)), None)

    def modules(self) -> list[str]:
        """The names of the modules that were measured, as they were run."""
        return list(dict.fromkeys(row.module for row in self.rows))

    def lengths(self) -> list[int]:
        """The lengths, from the shortest."""
        return sorted({row.seqlen for row in self.rows} | {entry.seqlen for entry in self.missing})

    def faster(self, row: Row) -> float | None:
        """How many times as fast as NaiveAttention; None where that was not measured."""
        naive = self.row(NAIVE, row.seqlen)
        return None if naive is None else naive.ms / row.ms

    def smaller(self, row: Row) -> float | None:
        """How many times less memory than NaiveAttention; None where that was not measured."""
        naive = self.row(NAIVE, row.seqlen)
        return None if naive is None else naive.peak_bytes / row.peak_bytes


def save(results: Results, path: Path) -> None:
    """Writes the file atomically, so that a killed run leaves the last complete one."""
    write({"format": FORMAT, **asdict(results)}, path)


def load(path: Path) -> Results:
    """Reads a result file; raises `ValueError` if the file is not one."""
    content = read(path)
    if (found := content.pop("format", None)) != FORMAT:
        raise ValueError(f"{path} is not a result file of format {FORMAT!r}: it has format {found!r}")
    try:
        results: Results = made(Results, {**content, "shape": made(Shape, content.get("shape"), "shape")}, "it")
        results.rows = [made(Row, given, f"rows[{i}]") for i, given in enumerate(results.rows)]
        results.missing = [made(Missing, given, f"missing[{i}]") for i, given in enumerate(results.missing)]
        for i, row in enumerate(results.rows):
            if not (row.ms > 0 and row.peak_bytes > 0 and row.seqlen > 0):
                raise ValueError(f"rows[{i}] has ms, peak_bytes or seqlen that is not above 0: {row}")
    except ValueError as error:
        raise ValueError(f"{path} is not a result file of the suite modules: {error}") from error
    return results
