"""The progress of a search on stderr: a bar on a terminal, a line per call elsewhere, nothing if quiet."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from .search import SearchResult
from .space import AnyConfig
from .timing import ROUNDS


class Bar:
    """The :class:`~tileattn.tuner.search.Report` of one search."""

    def __init__(self, quiet: bool) -> None:
        self.console = Console(stderr=True, quiet=quiet)
        columns = (
            SpinnerColumn(),
            BarColumn(20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}", markup=False),
        )
        # Drawn rarely: drawing takes time from the host, which launches what is timed.
        self.progress = Progress(
            *columns, console=self.console, transient=True, refresh_per_second=2,
            disable=quiet or not self.console.is_terminal,
        )  # fmt: skip
        self.call, self.task = "", self.progress.add_task("starting", total=None)

    def begin(self, call: str, candidates: int) -> None:
        self.call = call
        self.progress.update(self.task, total=candidates, description=f"compiling and checking: {call}")
        self.progress.start()

    def checked(self, config: AnyConfig, error: str | None) -> None:
        self.progress.advance(self.task)

    def timing(self, number: int, config: AnyConfig) -> None:
        self.progress.update(self.task, description=f"timing, round {number + 1} of {len(ROUNDS)}: {config}")

    def end(self) -> None:
        """Removes the bar."""
        self.progress.stop()

    def finished(self, result: SearchResult, seconds: float) -> None:
        """Prints the result as one line."""
        gain = result.default_ms / result.ms
        what = "the default stays" if gain == 1.0 else f"{gain:.2f} times the default's speed: {result.best}"
        text = f"tuned {self.call} in {seconds:.0f} s, {result.measured} candidates: {result.ms:.4g} ms, {what}"
        self.console.print(Text(text), soft_wrap=True)
        for config, why in result.rejected.items():
            self.console.print(Text(f"  left out: {config}: {why.strip()[-200:]}", style="dim"))

    def say(self, text: str) -> None:
        """Prints one line."""
        self.console.print(Text(text), soft_wrap=True)
        sys.stderr.flush()
