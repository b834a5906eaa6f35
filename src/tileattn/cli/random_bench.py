"""The code of `tileattn bench --suite random`, called with parsed options."""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console
from rich.text import Text

from tileattn.bench import results
from tileattn.bench.baselines import BASELINES
from tileattn.bench.baselines.base import OWN, Implementation
from tileattn.bench.cases import DIRECTIONS, DTYPES, Case
from tileattn.bench.draws import report, standing
from tileattn.bench.draws.ahead import compile_ahead, keep_baselines
from tileattn.bench.draws.shapes import CASES, SUITE, draws
from tileattn.bench.draws.standing import WithoutDenseMask
from tileattn.bench.progress import reporting
from tileattn.bench.results import Results
from tileattn.bench.runner import Run
from tileattn.cli.choices import DEFAULT_DTYPE, at_least_one, choose_implementations, refuse
from tileattn.cli.choices import Chosen as ChosenCases
from tileattn.cli.run_bench import (
    RESULTS_FOLDER,
    STOPPED,
    FileOptions,
    check_picture,
    create,
    draw,
    stopped_by_sigterm,
)
from tileattn.measure import timing

# Options of `tileattn bench` that the suite has.
TAKEN = (
    "suite", "seed", "cases", "draws", "compile", "dtype", "direction", "device", "backend", "baselines", "rounds",
    "resume", "json", "plot", "force", "commit", "quiet",
)  # fmt: skip
DEFAULT_BASELINES = {"cuda": "fa2,cudnn,fa4", "cpu": "sdpa"}
COMPILE = ("ahead", "only", "no")
MOST_CASES, MOST_SEED = 1000, 2**63 - 1
# Shorter rounds than those of other suites, for there are many cases; a slow call is measured once in each.
EFFORT = timing.Effort(warmup_ms=5.0, measure_ms=15.0)
MOST_SECONDS = 5.0  # of a case's rounds
MOST_CHECKED = 2**29  # scores of a case: some 50 ms of float64 work
TABLE_WIDTH = 100  # where stdout is no terminal
AGREE = (
    "device",
    "gpu",
    "commit",
    "direction",
    "seed",
    "draws",
    "settings",
)  # what a file must have for a run to go on from it


@dataclass(frozen=True)
class RandomOptions:
    """The options of this suite; None for an option that was not given."""

    seed: int | None
    cases: int | None
    draws: int | None
    compile: str | None
    dtype: str | None
    direction: str
    backend: str | None
    baselines: str | None
    rounds: int
    resume: bool


def refuse_others(context: typer.Context) -> None:
    """Refuses the options of `tileattn bench` that mean nothing in this suite."""
    for name in context.params:
        source = context.get_parameter_source(name)
        if name not in TAKEN and source is not None and source.name == "COMMANDLINE":
            raise refuse(f"--{name.replace('_', '-')}", f"the suite {SUITE} does not have it: its shapes are drawn")


def bench(options: RandomOptions, device: torch.device, files: FileOptions) -> int:
    """Runs the cases, saves after each, prints and draws. Returns the exit code: 1 if tileattn failed or never ran."""
    _check(options, device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    measured = results.begin(device, files.commit, " ".join(["tileattn", *sys.argv[1:]]), options.direction)
    dtype = options.dtype or DEFAULT_DTYPE[device.type]
    measured.seed = seed = _seed(options.seed, measured.commit)
    drawn = draws([seed + number for number in range(options.draws or 1)], options.cases or CASES, dtype, device.type)
    measured.draws = {str(each): [case.name for case in cases] for each, cases in drawn.items()}
    cases = [case for each in drawn.values() for case in each]
    implementations = _implementations(options, device, cases)
    names = [each.name for each in implementations]
    measured.settings = {"dtype": dtype, "rounds": str(options.rounds), "implementations": ", ".join(names)}

    def say(text: str) -> None:
        if not files.quiet:
            typer.echo(text, err=True)

    keep_baselines()
    if options.compile == "only":
        compile_ahead(cases, options.direction, names, device, say)
        return 0
    measured, json = _begin(measured, options, files)  # refuses a wrong file before minutes of compiling
    if device.type == "cuda" and options.compile != "no":
        compile_ahead(cases, options.direction, names, device, say)
    code, failures = _run(measured, json, cases, implementations, device, options.rounds, files.quiet)
    _show(measured, failures, files.quiet)
    typer.echo(f"results: {json}")
    if any(each.ratios for each in standing.standings(measured).values()):
        draw(measured, files.plot or json.with_suffix(".png"), asked=files.plot is not None, option="--plot")
    own_failed = any(entry.backend == OWN for entry in measured.failed)
    nothing = not any(row.backend == OWN for row in measured.rows)
    return code or int(own_failed or nothing)


def _check(options: RandomOptions, device: torch.device) -> None:
    for option, value in (("--rounds", options.rounds), ("--cases", options.cases), ("--draws", options.draws)):
        at_least_one(option, value)
    if (options.cases or CASES) * (options.draws or 1) > MOST_CASES:
        raise refuse("--cases, --draws", f"more than {MOST_CASES} cases in all; accepted: at most {MOST_CASES}")
    if options.seed is not None and not 0 <= options.seed <= MOST_SEED:
        raise refuse("--seed", f"{options.seed} is not a seed; accepted: an integer from 0 to 2^63 - 1")
    accepted = [name for name in DTYPES if name != "fp8"] if device.type == "cpu" else ["bf16", "fp16"]
    if options.dtype is not None and options.dtype not in accepted:
        raise refuse("--dtype", f"{options.dtype!r} is not measured in this suite; accepted: {', '.join(accepted)}")
    if options.direction not in DIRECTIONS:
        raise refuse("--direction", f"{options.direction!r} is not known; accepted: {', '.join(DIRECTIONS)}")
    if options.compile not in (None, *COMPILE):
        raise refuse("--compile", f"{options.compile!r} is not known; accepted: {', '.join(COMPILE)}")
    if options.compile == "only" and device.type != "cuda":
        raise refuse("--compile", "'only' has nothing to compile on a CPU; accepted there: ahead, no")


def _seed(given: int | None, commit: str | None) -> int:
    """The seed of `--seed`, or the first eight hexadecimal digits of the commit: whoever commits does not choose it."""
    if given is not None:
        return given
    if commit is None or not re.match("[0-9a-f]{8}", commit):
        raise refuse("--seed", "this is no git checkout with a commit to take it from; accepted: an integer")
    return int(commit[:8], 16)


def _implementations(options: RandomOptions, device: torch.device, cases: Sequence[Case]) -> list[Implementation]:
    names = DEFAULT_BASELINES[device.type] if options.baselines is None else options.baselines
    chosen = choose_implementations(options.backend, names, device, ChosenCases(SUITE, cases, options.direction))
    kernels = (BASELINES["fa2"], BASELINES["cudnn"])
    return [WithoutDenseMask(each) if each in kernels else each for each in chosen]


def _begin(fresh: Results, options: RandomOptions, files: FileOptions) -> tuple[Results, Path]:
    """The results of a new run, or of the run that is continued, and their file."""
    name = SUITE if fresh.direction == "fwd" else f"{SUITE}-{fresh.direction}"
    json = files.json or RESULTS_FOLDER / f"{name}-{fresh.device}-{datetime.now():%Y%m%d-%H%M%S}.json"
    if files.plot is not None:
        check_picture("--plot", files.plot, files.force)
    if options.resume:
        if files.json is None:
            raise refuse("--resume", "it goes on from the file of --json: name that")
        if json.exists():
            # An empty file is of a run that was stopped before its first case ended.
            return (_continued(json, fresh) if json.stat().st_size else fresh), json
    create("--json", json, files.force)
    return fresh, json


def _continued(json: Path, fresh: Results) -> Results:
    try:
        there = results.load(json)
    except ValueError as error:
        raise refuse("--resume", str(error)) from error
    for name in AGREE:
        its, ours = getattr(there, name), getattr(fresh, name)
        if its != ours:
            raise refuse("--resume", f"{json} is of {_different(name, its, ours)}")
    return there


def _different(name: str, its: Any, ours: Any) -> str:
    """What a file has of a field of `AGREE`, and what this run has."""
    if name == "draws":
        its, ours = (", ".join(f"{len(cases)} of seed {seed}" for seed, cases in each.items()) for each in (its, ours))
        if its == ours:
            return f"other cases of the same seed ({its}), which another version of tileattn drew"
        return f"other cases ({its or 'none drawn'}) than this run ({ours})"
    if name == "settings":
        name = next(each for each in ours if its.get(each) != ours[each])
        its, ours = its.get(name), ours[name]
    return f"{name} {its!r}, and this run of {ours!r}"


def _run(
    measured: Results,
    json: Path,
    cases: Sequence[Case],
    implementations: Sequence[Implementation],
    device: torch.device,
    rounds: int,
    quiet: bool,
) -> tuple[int, list[str]]:
    """Measures the cases that the results do not have. Returns an exit code and the tracebacks of failures."""
    done = set(measured.cases())
    failures: list[str] = []

    def save() -> None:
        measured.standing = standing.as_json(measured)
        results.save(measured, json)

    code = 0
    # The memory of each call is measured, which collects garbage: what is there now is not looked at each time.
    gc.collect()
    gc.freeze()
    with reporting(len(cases), quiet) as progress:

        def on_case(case: Case) -> None:
            done.add(case.name)
            save()
            progress.done(case, measured)

        run = Run(
            SUITE,
            [case for case in cases if case.name not in done],  # a new list: done grows during the run
            implementations,
            device,
            measured,
            effort=replace(EFFORT, rounds=rounds),
            progress=progress.say,
            on_case=on_case,
            on_failure=failures.append,
            order=standing.random_order(measured.seed or 0),
            again=standing.measured_again,
            most_checked=MOST_CHECKED if device.type == "cuda" else None,
            most_seconds=MOST_SECONDS,
        )
        try:
            with stopped_by_sigterm():
                run()
        except KeyboardInterrupt:
            code = STOPPED
            # Of the case that was stopped nothing may stay: a refusal would let --resume take it for done.
            measured.refused[:] = [entry for entry in measured.refused if entry.case in done]
            measured.failed[:] = [entry for entry in measured.failed if entry.case in done]
            typer.echo("stopped: what was measured so far is shown and kept; --resume goes on", err=True)
        finally:
            gc.unfreeze()
    save()
    return code, failures


def _show(measured: Results, failures: Sequence[str], quiet: bool) -> None:
    """Prints the tables on stdout, and tracebacks on stderr, each once."""
    errors = Console(stderr=True)
    for failure in dict.fromkeys(failures):
        errors.print(Text(failure), style="red")
    if not quiet:
        Console(width=None if sys.stdout.isatty() else TABLE_WIDTH).print(report.render(measured))
