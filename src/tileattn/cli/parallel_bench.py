"""The code of `tileattn bench --suite parallel`, called with parsed options in each process that torchrun started."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import torch
import typer
from rich.console import Console

from tileattn.bench import environment
from tileattn.bench.cases import DTYPES
from tileattn.bench.parallel import report, results
from tileattn.bench.parallel.cases import BASE, HEAD_DIM, STANDS_FOR, Case, selected, suite
from tileattn.bench.parallel.host import case_of, host_costs
from tileattn.bench.parallel.implementations import Implementation, always, known
from tileattn.bench.parallel.ranks import RankFailed, Ranks, first_process, ranks_of, started
from tileattn.bench.parallel.results import Results
from tileattn.bench.parallel.run import Run
from tileattn.cli.choices import at_least_one, lengths_of, own_implementation, refuse
from tileattn.cli.run_bench import RESULTS_FOLDER, FileOptions, check_picture, create, draw

PARALLEL = "parallel"
# Options of `tileattn bench` that the suite has.
TAKEN = (
    "suite", "seqlen", "head_dim", "dtype", "direction", "device", "backend", "baselines", "rounds", "rows", "resume",
    "json", "plot", "force", "commit", "quiet",
)  # fmt: skip
DEFAULT_BASELINES = {"cuda": "cudnn,fa2,flex,flex-ptrr", "cpu": "none"}
DIRECTIONS = {"both": ("fwd", "fwdbwd"), "fwd": ("fwd",), "fwdbwd": ("fwdbwd",)}
ACCEPTED_DTYPES = ("bf16", "fp16")  # `check.py` says why
COMMAND = "torchrun --nproc-per-node 2 -m tileattn bench --suite parallel"
TABLE_WIDTH = 180  # where stdout is no terminal


@dataclass(frozen=True)
class ParallelOptions:
    """The options of this suite; None for an option that was not given."""

    seqlen: str | None
    head_dim: int | None
    dtype: str | None
    direction: str
    device: str
    backend: str | None
    baselines: str | None
    rounds: int
    rows: str | None
    resume: bool


@dataclass(frozen=True)
class _Chosen:
    """What a run measures."""

    cases: Sequence[Case]
    implementations: Sequence[Implementation]
    directions: Sequence[str]
    device_type: str
    dtype: str
    base: int
    head_dim: int


def checked(context: typer.Context, direction: str) -> str:
    """What `--direction` says; both where it was not given.

    Refuses the options of `tileattn bench` that mean nothing in this suite, and one process alone.
    """
    for name in context.params:
        source = context.get_parameter_source(name)
        if name not in TAKEN and source is not None and source.name == "COMMANDLINE":
            raise refuse(f"--{name.replace('_', '-')}", "the suite parallel does not have it: --rows chooses its cases")
    if not started():
        raise refuse("--suite", f"the suite parallel runs in several processes, which torchrun starts: {COMMAND}")
    source = context.get_parameter_source("direction")
    return direction if source is not None and source.name == "COMMANDLINE" else "both"


def bench(options: ParallelOptions, files: FileOptions) -> int:
    """Measures the cases, saves after each, prints and draws, on the first rank.

    Returns:
        The exit code, of the first rank: 1 if tileattn failed, differs from one device or never ran. Others return 0,
        or torchrun would end the first rank before it has drawn the picture.
    """
    try:
        chosen = _choose(options)
    except typer.BadParameter:
        if first_process():
            raise
        raise typer.Exit(2) from None  # one error, not one from each process
    with ranks_of(chosen.device_type) as ranks:
        measured, json = _begin(chosen, options, ranks, files)
        start = time.monotonic()

        def say(text: str) -> None:
            if ranks.is_first and not files.quiet:
                typer.echo(f"{time.monotonic() - start:6.1f} s {text}", err=True)

        def complain(text: str) -> None:
            typer.echo(f"rank {ranks.rank}: {text}", err=True)

        def save() -> None:
            if ranks.is_first:
                results.save(measured, json)

        run = Run(
            cases=chosen.cases, implementations=chosen.implementations, directions=chosen.directions,
            rounds=options.rounds, ranks=ranks, dtype=DTYPES[chosen.dtype], measured=measured, on_case=save, say=say,
            complain=complain,
        )  # fmt: skip
        if not measured.host_costs:
            _measure_host(measured, options, chosen, ranks, complain)
        run()
        if ranks.is_first:
            _show(measured, json, files)
            return int(measured.failed())
    return 0


def _choose(options: ParallelOptions) -> _Chosen:
    at_least_one("--rounds", options.rounds)
    at_least_one("--head-dim", options.head_dim)
    device_type = _device_type(options.device)
    dtype = options.dtype or ACCEPTED_DTYPES[0]
    if dtype not in ACCEPTED_DTYPES:
        raise refuse("--dtype", f"{dtype!r} is not measured in this suite; accepted: {', '.join(ACCEPTED_DTYPES)}")
    if options.direction not in DIRECTIONS:
        accepted = ", ".join(DIRECTIONS)
        raise refuse("--direction", f"{options.direction!r} is not measured in this suite; accepted: {accepted}")
    base = BASE[device_type] if options.seqlen is None else _base(options.seqlen)
    head_dim = options.head_dim or HEAD_DIM[device_type]
    cases = selected(suite(device_type, base, head_dim), options.rows)
    if not cases:
        names = ", ".join(case.name for case in suite(device_type, base, head_dim))
        raise refuse("--rows", f"no row has all of {options.rows!r}; rows are: {names}")
    implementations = _implementations(options, device_type)
    return _Chosen(cases, implementations, DIRECTIONS[options.direction], device_type, dtype, base, head_dim)


def _device_type(name: str) -> str:
    accepted = ["auto", "cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    if name not in accepted:
        raise refuse("--device", f"{name!r} is not a kind of device here; accepted: {', '.join(accepted)}")
    return accepted[-1] if name == "auto" else name


def _base(text: str) -> int:
    lengths = lengths_of(text)
    if len(lengths) > 1 or lengths[0] % 256:
        raise refuse("--seqlen", f"{text!r} must be one multiple of 256: the tokens that stand for {STANDS_FOR}")
    return lengths[0]


def _implementations(options: ParallelOptions, device_type: str) -> list[Implementation]:
    backend = own_implementation(options.backend).backend
    by_name = known(backend)
    text = DEFAULT_BASELINES[device_type] if options.baselines is None else options.baselines
    names = [] if text == "none" else [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in by_name]:
        listed = ", ".join(map(repr, unknown))
        raise refuse("--baselines", f"{listed}: not known in this suite; accepted: none, {', '.join(by_name)}")
    found = {each.name: each for name in names for each in by_name[name]}
    return [*always(backend), *found.values()]


def _begin(chosen: _Chosen, options: ParallelOptions, ranks: Ranks, files: FileOptions) -> tuple[Results, Path]:
    """The results of a new run, or of the run that is continued, and their file. All ranks have the same."""
    fresh = Results(
        device=chosen.device_type,
        gpu=environment.device_name(ranks.device),
        ranks=ranks.count,
        dtype=chosen.dtype,
        base=chosen.base,
        head_dim=chosen.head_dim,
        versions=environment.versions() | _nccl(),
        commit=files.commit or environment.commit(),
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        commands=[" ".join(["tileattn", *sys.argv[1:]])],
    )
    json = files.json or RESULTS_FOLDER / f"{PARALLEL}-{chosen.device_type}-{datetime.now():%Y%m%d-%H%M%S}.json"
    refused: typer.BadParameter | None = None
    if ranks.is_first:
        try:
            fresh = _opened(fresh, options, files, json)
        except typer.BadParameter as error:
            refused = error
    try:
        return ranks.gathered((fresh, refused is not None))[0][0], json
    finally:
        if any(ranks.gathered(refused is not None)):
            raise refused or typer.Exit(2)


def _opened(fresh: Results, options: ParallelOptions, files: FileOptions, json: Path) -> Results:
    """What the first rank does with the files."""
    if files.plot is not None:
        check_picture("--plot", files.plot, files.force)
    if options.resume:
        if files.json is None:
            raise refuse("--resume", "it goes on from the file of --json: name that")
        if json.exists() and json.stat().st_size:
            try:
                return results.resume(json, fresh)
            except ValueError as error:
                raise refuse("--resume", str(error)) from error
    create("--json", json, files.force or options.resume)
    return fresh


def _nccl() -> dict[str, str]:
    if not torch.cuda.is_available():
        return {}
    return {"nccl": ".".join(map(str, torch.cuda.nccl.version()))}


def _measure_host(
    measured: Results, options: ParallelOptions, chosen: _Chosen, ranks: Ranks, complain: Callable[[str], None]
) -> None:
    case = case_of(chosen.device_type, chosen.head_dim)
    backend = own_implementation(options.backend).backend
    measured.host_shape = f"{case.seqlen} tokens, {case.heads}/{case.kv_heads} heads, head dim {case.head_dim}, causal"
    try:
        measured.host_costs = ranks.attempt(lambda: host_costs(case, DTYPES[chosen.dtype], ranks, backend), complain)
    except RankFailed as error:
        measured.missing.append(results.Missing("the host's time", "tileattn", "fwd", str(error), True))


def _show(measured: Results, json: Path, files: FileOptions) -> None:
    if not files.quiet:
        Console(width=None if sys.stdout.isatty() else TABLE_WIDTH).print(report.render(measured))
    typer.echo(f"results: {json}")
    if any(measured.row(case, results.IDEAL, each) for case in measured.cases() for each in measured.directions()):
        draw(measured, files.plot or json.with_suffix(".png"), asked=files.plot is not None, option="--plot")
