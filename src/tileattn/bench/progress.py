"""The progress of a run, on stderr."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from tileattn.bench.cases import Case
from tileattn.bench.results import Results


@dataclass(frozen=True)
class Reporter:
    """Shows the progress: a bar on a terminal, a line per case elsewhere, nothing if quiet."""

    bar: Progress
    total: int
    quiet: bool

    def say(self, text: str) -> None:
        """Shows the current activity."""
        self.bar.update(self.bar.task_ids[0], description=text)

    def done(self, case: Case, measured: Results) -> None:
        """Counts a measured case."""
        self.bar.advance(self.bar.task_ids[0])
        if self.quiet or self.bar.console.is_terminal:
            return
        number = len(measured.cases())
        times = [f"{row.backend} {row.ms:.3f} ms" for row in measured.rows if row.case == case.name]
        typer.echo(f"[{number}/{self.total}] {case.name}: {', '.join(times)}", err=True)


@contextmanager
def reporting(total: int, quiet: bool) -> Iterator[Reporter]:
    """A reporter for a run of `total` cases; its bar is removed when the run ends."""
    console = Console(stderr=True)
    columns = (
        SpinnerColumn(),
        BarColumn(20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    # Drawn rarely: drawing takes time from what is measured on a CPU.
    bar = Progress(
        *columns, console=console, transient=True, refresh_per_second=2, disable=quiet or not console.is_terminal
    )
    bar.add_task("starting", total=total)
    with bar:
        yield Reporter(bar, total, quiet)
