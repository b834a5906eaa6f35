"""The rows of the decode suite, the order in which they run, and how `--rows` selects among them."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product

MOST_BYTES = 64 * 2**30  # of K and V: rows beyond are left out, and named
SEED = 23  # of the sample of the rows that are not run first
CONTIGUOUS = "contiguous"
HEAD_DIM = 128  # the only one of the suite; a name mentions others


@dataclass(frozen=True)
class Case:
    """One row: `batch` sequences of `context` keys, one query each.

    page: tokens of a page; 0 for a contiguous cache.
    """

    batch: int
    context: int
    heads: int
    kv_heads: int
    page: int
    head_dim: int = HEAD_DIM

    @property
    def name(self) -> str:
        """The name in tables, such as "page 16 (1,1024,32/8)"."""
        pages = f"page {self.page}" if self.page else CONTIGUOUS
        dim = f" D{self.head_dim}" if self.head_dim != HEAD_DIM else ""
        return f"{pages} ({self.batch},{self.context},{self.heads}/{self.kv_heads}){dim}"

    @property
    def elements(self) -> int:
        """Elements of K, and of V."""
        return self.batch * self.context * self.kv_heads * self.head_dim

    def kv_bytes(self, itemsize: int) -> int:
        """Bytes of K and V: what a call must read."""
        return 2 * self.elements * itemsize


@dataclass(frozen=True)
class Grid:
    """The values whose combinations are the rows of a suite; page 0 stands for contiguous caches."""

    batch: tuple[int, ...]
    context: tuple[int, ...]
    heads: tuple[tuple[int, int], ...]
    pages: tuple[int, ...]
    head_dim: int

    def cases(self) -> list[Case]:
        """All combinations: contexts vary fastest, then batches, heads, pages."""
        return [
            Case(batch, context, *heads, page, self.head_dim)
            for page, heads, batch, context in product(self.pages, self.heads, self.batch, self.context)
        ]


GPU_GRID = Grid(
    (1, 16, 64, 128), (1024, 8192, 32768, 131072), ((32, 8), (64, 8), (8, 1), (32, 32)), (16, 0, 64, 256, 1), HEAD_DIM
)
CPU_GRID = Grid((1, 4), (128, 1024), ((8, 2), (4, 4)), (16, 0, 64, 1), HEAD_DIM)
FIRST = (16, 0)  # the pages whose rows all run; of the others, a quarter


@dataclass(frozen=True)
class Schedule:
    """What is to run: rows in order, and the rows left out because their K and V are too large."""

    cases: tuple[Case, ...]
    left_out: tuple[Case, ...]


def grid(device_type: str) -> Grid:
    """The grid of a device."""
    return GPU_GRID if device_type == "cuda" else CPU_GRID


def schedule(device_type: str, itemsize: int, rows: str | None) -> Schedule:
    """The rows to run.

    Without `rows`: all with pages of 16 and contiguous caches, then a quarter of the others, drawn with a fixed seed
    and in the drawn order. With `rows`: all that :func:`select` finds in the whole grid.

    Raises:
        ValueError: `rows` is not understood, or selects nothing.
    """
    whole = grid(device_type)
    fits = [case for case in whole.cases() if case.kv_bytes(itemsize) <= MOST_BYTES]
    too_large = [case for case in whole.cases() if case.kv_bytes(itemsize) > MOST_BYTES]
    if rows is not None:
        chosen, left_out = select(fits, rows, whole), select(too_large, rows, whole)
        if not chosen:
            raise ValueError(f"{rows!r} selects no row{' that fits' * bool(left_out)}")
        return Schedule(tuple(chosen), tuple(left_out))
    first = [case for case in fits if case.page in FIRST]
    others = [case for case in fits if case.page not in FIRST]
    drawn = random.Random(SEED).sample(others, len(others) // 4)
    return Schedule((*first, *drawn), tuple(too_large))


def select(cases: Iterable[Case], rows: str, whole: Grid) -> list[Case]:
    """The cases that agree with all terms of `rows`, such as "pages=16,contiguous context=1k,8k heads=32/8".

    Raises:
        ValueError: a term is not understood, or names a value that the grid does not have.
    """
    wanted = _parse(rows, whole)
    return [case for case in cases if all(_value(case, key) in values for key, values in wanted.items())]


def _parse(rows: str, whole: Grid) -> dict[str, set[object]]:
    wanted: dict[str, set[object]] = {}
    there: dict[str, Sequence[object]] = {
        "batch": whole.batch, "context": whole.context, "heads": whole.heads, "pages": whole.pages
    }  # fmt: skip
    for term in rows.split():
        key, _, values = term.partition("=")
        if key not in there or not values:
            raise ValueError(f"{term!r} is not understood; accepted: {', '.join(f'{name}=...' for name in there)}")
        for text in values.split(","):
            value = _read(text)
            if value not in there[key]:
                accepted = ", ".join(_shown(each) for each in there[key])
                raise ValueError(f"{term!r}: there is no {text!r}; accepted: {accepted}")
            wanted.setdefault(key, set()).add(value)
    return wanted


def _read(text: str) -> object:
    """The value of "1024", "1k", "32/8" or "contiguous"; None for anything else."""
    if text == CONTIGUOUS:
        return 0
    parts = text.split("/")
    if len(parts) == 2 and all(part.isdecimal() for part in parts):
        return int(parts[0]), int(parts[1])
    number = text.removesuffix("k")
    return int(number) * (1024 if text.endswith("k") else 1) if number.isdecimal() and text != "0" else None


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return "/".join(map(str, value))
    return CONTIGUOUS if value == 0 else str(value)


def _value(case: Case, key: str) -> object:
    return {"batch": case.batch, "context": case.context, "heads": (case.heads, case.kv_heads), "pages": case.page}[key]
