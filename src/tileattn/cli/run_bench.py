"""The code of `tileattn bench`, `memory`, `plot` and `warmup`, called with parsed options."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from importlib.util import find_spec
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console
from rich.text import Text

from tileattn.bench import duration, report, results
from tileattn.bench.baselines.base import OWN, Implementation
from tileattn.bench.cases import Case
from tileattn.bench.modules import results as modules
from tileattn.bench.progress import reporting
from tileattn.bench.runner import Run
from tileattn.call.facts import device_arch
from tileattn.cli import workspaces
from tileattn.cli.choices import LADDER, MEMORY, Chosen, at_least_one, refuse
from tileattn.installation import pip_install
from tileattn.kernels.cache.store import default_folder
from tileattn.kernels.tilelang.build import batch
from tileattn.measure import timing

RESULTS_FOLDER = Path("bench-results")
PICTURES = (".png", ".svg", ".pdf")
# What a shell calls a command that ended by Ctrl-C.
STOPPED = 130
# Each imports TileLang and runs nvcc: more of them want more memory than they save time.
MAX_PROCESSES = 16


@dataclass(frozen=True)
class FileOptions:
    """The options for output: files to write, and whether to print progress."""

    json: Path | None = None
    plot: Path | None = None
    force: bool = False
    commit: str | None = None
    quiet: bool = False


def bench(
    chosen: Chosen,
    implementations: Sequence[Implementation],
    device: torch.device,
    rounds: int,
    files: FileOptions,
) -> int:
    """Runs the cases, saves after each, prints and draws. Returns the exit code: 1 if tileattn failed or never ran."""
    at_least_one("--rounds", rounds)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    json, picture = _reserve(chosen, device, files)
    measured = results.begin(device, files.commit, " ".join(["tileattn", *sys.argv[1:]]), chosen.direction)
    results.save(measured, json)
    failures: list[str] = []
    stopped = False
    if not files.quiet:
        typer.echo(duration.announced(chosen.cases, implementations, chosen.direction, device, rounds), err=True)
    with reporting(len(chosen.cases), files.quiet) as progress:

        def on_case(case: Case) -> None:
            results.save(measured, json)
            progress.done(case, measured)

        run = Run(
            chosen.suite,
            chosen.cases,
            implementations,
            device,
            measured,
            effort=replace(timing.DEFAULT, rounds=rounds),
            progress=progress.say,
            on_case=on_case,
            on_failure=failures.append,
        )
        try:
            run()
        except KeyboardInterrupt:
            stopped = True
    results.save(measured, json)
    if stopped:
        typer.echo("stopped: what was measured so far is shown and kept", err=True)
    _show(measured, failures, files.quiet)
    if chosen.suite == MEMORY and chosen.direction != "fwd" and not files.quiet:
        by_tilelang = [case for case in chosen.cases if measured.implementation.get(case.name) == "tilelang"]
        for line in workspaces.lines(by_tilelang, device_arch(device)):
            typer.echo(line)
    typer.echo(f"results: {json}")
    if measured.rows:
        draw(measured, picture, asked=files.plot is not None, option="--plot")
    own_failed = any(entry.backend == OWN for entry in measured.failed)
    nothing = not any(row.backend == OWN for row in measured.rows)
    return STOPPED if stopped else int(own_failed or nothing)


def redraw(result: Path, output: Path | None, force: bool) -> None:
    """The code of `tileattn plot`. Without --output: RESULT.png, or a new name where that exists."""
    picture = output or result.with_suffix(".png")
    if output is None and picture.exists() and not force:
        picture = new_picture(result.with_suffix(""))
    check_picture("--output", picture, force)
    from tileattn.bench.parallel import results as parallel

    of_format: dict[Any, Callable[[Path], Any]] = {modules.FORMAT: modules.load, parallel.FORMAT: parallel.load}
    try:
        load = of_format.get(results.read(result).get("format"), results.load)
        measured = load(result)
    except ValueError as error:
        raise refuse("RESULT", str(error)) from error
    if not measured.rows:
        raise refuse("RESULT", f"{result} has no measurements to draw")
    try:
        draw(measured, picture, asked=True, option="--output")
    except ValueError as error:
        raise refuse("RESULT", f"{result} cannot be drawn: {error}") from error


def warm_up(jobs: Sequence[batch.AnyJob]) -> int:
    """The code of `tileattn warmup`: prints a line per compiled kernel. Returns the exit code: 1 if one failed."""
    try:
        folder = default_folder()
    except FileNotFoundError as error:  # there is no home
        typer.echo(error, err=True)
        return 1
    failed = False
    with Console(stderr=True).status(f"compiling {len(jobs)} kernels"):
        for number, each in enumerate(batch.compile_all(jobs, min(batch.CORES, MAX_PROCESSES)), start=1):
            took = each.error or ("was in the cache" if each.was_there else f"{each.seconds:.1f} s")
            typer.echo(f"[{number}/{len(jobs)}] {each.job}: {took}")
            failed = failed or each.error is not None
    typer.echo(f"kernels: {folder}")
    return int(failed)


def list_kernels(jobs: Sequence[batch.AnyJob]) -> int:
    """The code of `tileattn warmup --list`: prints a line per kernel. Returns the exit code."""
    for job in jobs:
        typer.echo(str(job))
    typer.echo(f"{len(jobs)} kernels")
    return 0


def _reserve(chosen: Chosen, device: torch.device, files: FileOptions) -> tuple[Path, Path]:
    """The paths of result file and picture. The result file is created at once, so that two runs never share it."""
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    name = chosen.suite if chosen.direction == "fwd" else f"{chosen.suite}-{chosen.direction}"
    json = files.json or RESULTS_FOLDER / f"{name}-{device.type}-{stamp}.json"
    picture = files.plot or json.with_suffix(".png")
    if files.plot is not None:
        check_picture("--plot", picture, files.force)
        check_writable("--plot", picture)
    elif picture.exists() and not files.force:
        raise refuse("--json", f"{picture}, its picture, exists; give another name, or --force to overwrite it")
    if json == picture:
        raise refuse("--json", f"{json} would be its own picture; give the result file another suffix, such as .json")
    create("--json", json, files.force)
    return json, picture


def create(option: str, path: Path, force: bool) -> None:
    """Creates a file before any measurement. So it is known to be writable, and two runs never share it."""
    with writing(option, path):
        try:
            path.open("w" if force else "x").close()
        except FileExistsError:
            raise refuse(option, f"{path} exists; give another name, or --force to overwrite it") from None


def check_writable(option: str, path: Path) -> None:
    """Checks before any measurement that a path can be written. Leaves an existing file as it is, and no new one."""
    with writing(option, path):
        there = path.exists()
        path.open("ab").close()
        if not there:
            path.unlink()


@contextmanager
def writing(option: str, path: Path) -> Iterator[None]:
    """Makes the folder of a file that is written inside. If making or writing fails, refuses the option."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise refuse(option, f"{path} can't be written: {error.filename} is no folder") from error
    except OSError as error:
        raise refuse(option, f"{path} can't be written: {error.strerror}") from error
    try:
        yield
    except OSError as error:
        raise refuse(option, f"{path} can't be written: {error.strerror or error}") from error


def new_picture(invented: Path) -> Path:
    """A file that does not exist: `invented`, the time of day, .png."""
    stem = f"{invented.name}-{datetime.now():%Y%m%d-%H%M%S}"
    names = chain([f"{stem}.png"], (f"{stem}-{number}.png" for number in count(2)))
    return next(path for path in map(invented.with_name, names) if not path.exists())


def check_picture(option: str, picture: Path, force: bool) -> None:
    """Checks before any measurement that the requested picture can be drawn."""
    if picture.suffix not in PICTURES:
        raise refuse(option, f"{picture} has the suffix {picture.suffix!r}; accepted: {', '.join(PICTURES)}")
    if picture.exists() and not force:
        raise refuse(option, f"{picture} exists; give another name, or --force to overwrite it")
    if find_spec("matplotlib") is None:
        raise refuse(option, f"plots need matplotlib: {pip_install('plot')}")


@contextmanager
def stopped_by_sigterm() -> Iterator[None]:
    """Inside, SIGTERM, which `timeout` and job schedulers send, stops a run as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def draw(measured: Any, picture: Path, asked: bool, option: str) -> None:
    """Draws the picture of a run. Without matplotlib it only says so, unless the picture was asked for."""
    if not asked and find_spec("matplotlib") is None:
        typer.echo(f"no picture: plots need matplotlib ({pip_install('plot')})", err=True)
        return
    from tileattn.bench import plot, plot_memory
    from tileattn.bench.draws import plot as plot_draws
    from tileattn.bench.draws.shapes import SUITE
    from tileattn.bench.ladder import plot as plot_ladder
    from tileattn.bench.modules import plot as plot_modules
    from tileattn.bench.parallel import plot as plot_parallel
    from tileattn.bench.parallel import results as parallel

    drawn_by = {MEMORY: plot_memory.save, LADDER: plot_ladder.save, SUITE: plot_draws.save}
    with writing(option, picture):
        if isinstance(measured, modules.Results):
            plot_modules.save(measured, picture)
        elif isinstance(measured, parallel.Results):
            plot_parallel.save(measured, picture)
        else:
            drawn_by.get(measured.rows[0].suite, plot.save)(measured, picture)
    typer.echo(f"picture: {picture}")


def _show(measured: results.Results, failures: Sequence[str], quiet: bool) -> None:
    """Prints the tables on stdout; tracebacks, and if quiet the failures, on stderr."""
    console = Console(width=None if sys.stdout.isatty() else 100)
    errors = Console(stderr=True)
    for failure in failures:
        errors.print(Text(failure), style="red")
    if quiet:
        for entry in measured.failed:
            errors.print(Text(f"{entry.case}: {entry.backend}: {entry.reason}"), style="red")
        errors.print(*report.doubts(measured), sep="\n", end="\n" if measured.doubts else "")
    else:
        console.print(report.render(measured))
