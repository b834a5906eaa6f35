"""The code of `tileattn tune`: tunes cases, shows results, and removes them."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tileattn.bench import passes, problem
from tileattn.bench.baselines import TileAttn
from tileattn.bench.cases import Case
from tileattn.cli.choices import Chosen
from tileattn.tuner import results, state
from tileattn.tuner.session import tuning

UNFOLDED = 10_000  # columns; wider than any table


def tune(chosen: Chosen, own: TileAttn, device: torch.device, again: bool, quiet: bool) -> int:
    """Tunes each case. Returns the exit code: 1 if a case could not be run, or results cannot be stored."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    failed = False
    try:
        with tuning(quiet=quiet, again=again):
            session = state.session
            assert session is not None
            for case in chosen.cases:
                if (reason := _tune_case(case, own, device, chosen.direction)) is not None:
                    typer.echo(f"{case.name}: {reason}", err=True)
                    failed = True
            tuned = session.tuned
    except OSError as error:  # found out before the first case
        typer.echo(error.strerror or str(error), err=True)
        return 1
    if tuned:
        typer.echo(f"results: {results.default_file()}")
    elif not failed:
        typer.echo("no results: there was nothing to tune")
    return int(failed)


def _tune_case(case: Case, own: TileAttn, device: torch.device, direction: str) -> str | None:
    """Tunes one case; returns why it could not be run, or None. Its tensors are freed on return."""
    try:
        given = problem.build(case, device, direction=direction)
        if (reason := own.refusal(given)) is not None:
            return reason
        with torch.set_grad_enabled(direction != "fwd"):
            passes.start(direction, own.prepare(given), given)()
    except Exception as error:  # it has no memory, its default does not compile, ...: the other cases may do
        return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
    return None


def show() -> None:
    """The code of `tileattn tune --show`."""
    kept = list(results.entries(results.read(_file())))
    # Words are folded to fit a terminal only: what is piped is read by programs.
    console = Console(width=None if sys.stdout.isatty() else UNFOLDED)
    if not kept:
        console.print(Text(f"no results in {results.default_file()}"), soft_wrap=True)
        return
    for device in dict.fromkeys(device for device, *_ in kept):
        table = Table(
            box=box.SIMPLE_HEAD, title=Text(device, style="table.title"), title_justify="left", pad_edge=False
        )
        table.add_column("call", overflow="fold")
        table.add_column("sizes up to", overflow="fold")
        table.add_column("configuration", overflow="fold")
        table.add_column("ms", justify="right", no_wrap=True)
        table.add_column("gain", justify="right", no_wrap=True)
        table.add_column("date", no_wrap=True)
        for of_device, call, bucket, result in kept:
            if of_device == device:
                gain = f"{result.default_ms / result.ms:.2f}x"
                cells = (call, bucket, _config(result), f"{result.ms:.4g}", gain, result.when)
                table.add_row(*map(Text, cells))
        console.print(table)
    console.print("Sizes: p batch * heads, q seqlen_q, k seqlen_k, g query heads per key/value head.", style="dim")
    console.print(Text(f"{len(kept)} results in {results.default_file()}"), soft_wrap=True)


def _file() -> Path:
    try:
        return results.default_file()
    except FileNotFoundError as error:  # there is no home
        typer.echo(error, err=True)
        raise typer.Exit(1) from error


def _config(result: results.Result) -> str:
    fields = {name: value for name, value in result.config.items() if name != "schedule"}
    return f"{result.config.get('schedule')}({', '.join(f'{name}={value}' for name, value in fields.items())})"


def clear(sure: bool) -> None:
    """The code of `tileattn tune --clear`: asks first, unless --yes was given."""
    path = _file()
    count = len(list(results.entries(results.read(path))))
    if count == 0:
        typer.echo(f"no results in {path}")
        return
    if not sure:
        typer.confirm(f"Remove {count} results in {path}?", abort=True)
    typer.echo(f"removed {results.clear()} results")
