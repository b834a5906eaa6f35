"""The code of `tileattn bench --suite decode` and `--suite decode-ratios`, called with parsed options."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path

import torch
import typer
from rich.console import Console, RenderableType
from rich.text import Text

from tileattn.bench import environment, steadiness
from tileattn.bench.baselines.base import OWN
from tileattn.bench.cases import DTYPES
from tileattn.bench.decode import methods, report, results
from tileattn.bench.decode.ahead import DECODE, RATIOS
from tileattn.bench.decode.cases import Case, Schedule, schedule
from tileattn.bench.decode.flashinfer import ELSEWHERE
from tileattn.bench.decode.methods import Method
from tileattn.bench.decode.ratios import cases as ratios
from tileattn.bench.decode.ratios import report as ratio_report
from tileattn.bench.decode.rows import GpuLost, own_failed
from tileattn.bench.decode.run import NothingRuns, Run
from tileattn.cli.choices import DEFAULT_DTYPE, at_least_one, own_implementation, refuse
from tileattn.cli.run_bench import RESULTS_FOLDER, STOPPED, FileOptions, create, stopped_by_sigterm

DEFAULT_BASELINES = {"cuda": "fa3,fa2,cudnn,flashinfer,xqa", "cpu": "sdpa"}
# Options of `tileattn bench` that the suites have; the second chooses its rows and baselines by itself.
TAKEN = (
    "suite",
    "dtype",
    "device",
    "backend",
    "baselines",
    "rounds",
    "rows",
    "resume",
    "json",
    "force",
    "commit",
    "quiet",
)
NOT_OF_RATIOS = ("rows", "baselines")
AGAIN = 75  # "try again" of sysexits.h: a kernel broke the CUDA context, and --resume goes on in a new process
TABLE_WIDTH = 200  # where stdout is no terminal


@dataclass(frozen=True)
class DecodeOptions:
    """The options of these suites; None for an option that was not given."""

    dtype: str | None
    backend: str | None
    baselines: str | None
    rounds: int
    rows: str | None
    resume: bool


@dataclass(frozen=True)
class _Chosen:
    """What a run measures, and how its results are shown."""

    suite: str
    cases: Sequence[Case]
    left_out: Sequence[Case]
    methods: Callable[[Case], Sequence[Method]]
    names: list[str]
    render: Callable[[results.Results], RenderableType]


def refuse_others(context: typer.Context, suite: str) -> None:
    """Refuses the options of `tileattn bench` that mean nothing in this suite."""
    for name in context.params:
        source = context.get_parameter_source(name)
        taken = name in TAKEN and not (suite == RATIOS and name in NOT_OF_RATIOS)
        if not taken and source is not None and source.name == "COMMANDLINE":
            option = f"--{name.replace('_', '-')}"
            chosen = "it chooses its rows and baselines itself" if suite == RATIOS else "its rows are chosen by --rows"
            raise refuse(option, f"the suite {suite} does not have it: {chosen}")


def bench(suite: str, options: DecodeOptions, device: torch.device, files: FileOptions) -> int:
    """Runs the rows, saves after each, prints.

    Returns:
        The exit code: 1 if tileattn failed or never ran, `STOPPED` after Ctrl-C or SIGTERM, `AGAIN` if the GPU is lost.
    """
    at_least_one("--rounds", options.rounds)
    dtype = options.dtype or DEFAULT_DTYPE[device.type]
    if dtype not in DTYPES or dtype == "fp8":
        accepted = ", ".join(name for name in DTYPES if name != "fp8")
        raise refuse("--dtype", f"{dtype!r} is not measured in this suite; accepted: {accepted}")
    chosen = (_ratios if suite == RATIOS else _decode)(options, device, DTYPES[dtype])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    measured, json = _begin(options, device, dtype, chosen, files)
    if (busy := steadiness.busy_line(device)) is not None:
        typer.echo(f"warning: {busy}", err=True)
    measured.left_out += [case.name for case in chosen.left_out if case.name not in measured.left_out]
    results.save(measured, json)
    failures: list[str] = []
    total, start = len(chosen.cases), time.monotonic()

    def say(text: str) -> None:
        if not files.quiet:
            typer.echo(f"{time.monotonic() - start:6.1f} s {text}", err=True)

    def on_row(case: Case) -> None:
        results.save(measured, json)
        times = [f"{row.backend} {report.us(row.us)} us" for row in measured.of_case(case.name)]
        say(f"[{len(measured.done)}/{total}] {case.name}: {', '.join(times)}")

    run = Run(
        chosen.cases,
        chosen.methods,
        device,
        DTYPES[dtype],
        options.rounds,
        measured,
        on_begin=lambda: results.save(measured, json),
        on_row=on_row,
        say=say,
        on_failure=failures.append,
    )
    code = 0
    try:
        with stopped_by_sigterm():
            run()
    except KeyboardInterrupt:
        code = STOPPED
        typer.echo("stopped: what was measured so far is shown and kept; --resume goes on", err=True)
    except GpuLost as error:
        code = AGAIN
        typer.echo(f"stopped: {error}; what was measured is kept, and --resume goes on with the next row", err=True)
    except NothingRuns as error:
        typer.echo(f"stopped: {error}", err=True)
    results.save(measured, json)
    _show(measured, chosen, failures, files.quiet)
    typer.echo(f"results: {json}")
    nothing = not any(row.backend == OWN for row in measured.rows)
    return code or int(own_failed(measured.missing) or nothing)


def _decode(options: DecodeOptions, device: torch.device, dtype: torch.dtype) -> _Chosen:
    planned, methods = _scheduled(options, device, dtype), _methods(options, device)
    names = [method.name for method in methods]
    return _Chosen(DECODE, planned.cases, planned.left_out, lambda case: methods, names, report.render)


def _ratios(options: DecodeOptions, device: torch.device, dtype: torch.dtype) -> _Chosen:
    chosen = ratios.suite(device.type, own_implementation(options.backend).backend)
    render = partial(ratio_report.render, suite=chosen)
    return _Chosen(RATIOS, list(chosen.methods), (), chosen.methods.__getitem__, chosen.names, render)


def _scheduled(options: DecodeOptions, device: torch.device, dtype: torch.dtype) -> Schedule:
    try:
        return schedule(device.type, dtype.itemsize, options.rows)
    except ValueError as error:
        raise refuse("--rows", str(error)) from error


def _methods(options: DecodeOptions, device: torch.device) -> list[Method]:
    """tileattn, with the plan made ahead and without, then the baselines."""
    backend = own_implementation(options.backend).backend
    known = {each.name: each for each in (*methods.LOCAL, *ELSEWHERE, methods.fixed(backend))}
    text = DEFAULT_BASELINES[device.type] if options.baselines is None else options.baselines
    names = [] if text == "none" else [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in known]:
        listed = ", ".join(map(repr, unknown))
        raise refuse("--baselines", f"{listed}: not known in this suite; accepted: none, {', '.join(known)}")
    return [*methods.own_methods(backend), *(known[name] for name in dict.fromkeys(names))]


def _begin(
    options: DecodeOptions, device: torch.device, dtype: str, chosen: _Chosen, files: FileOptions
) -> tuple[results.Results, Path]:
    """The results of a new run, or of the run that is continued, and their file."""
    versions = environment.versions()
    if (fa3 := methods.fa3_version()) is not None:
        versions["fa3"] = fa3
    now = datetime.now(timezone.utc)
    fresh = results.Results(
        device=device.type,
        gpu=environment.device_name(device),
        dtype=dtype,
        versions=versions,
        commit=files.commit or environment.commit(),
        date=now.isoformat(timespec="seconds"),
        backends=chosen.names,
        commands=[" ".join(["tileattn", *sys.argv[1:]])],
    )
    json = files.json or RESULTS_FOLDER / f"{chosen.suite}-{device.type}-{datetime.now():%Y%m%d-%H%M%S}.json"
    if options.resume:
        if files.json is None:
            raise refuse("--resume", "it goes on from the file of --json: name that")
        if json.exists():
            try:
                return results.resume(json, fresh), json
            except ValueError as error:
                raise refuse("--resume", str(error)) from error
    create("--json", json, files.force)
    return fresh, json


def _show(measured: results.Results, chosen: _Chosen, failures: Sequence[str], quiet: bool) -> None:
    """Prints the tables on stdout; tracebacks, and if quiet the failures, on stderr."""
    errors = Console(stderr=True)
    for failure in dict.fromkeys(failures):
        errors.print(Text(failure), style="red")
    if not quiet:
        Console(width=None if sys.stdout.isatty() else TABLE_WIDTH).print(chosen.render(measured))
