"""What `tileattn bench` and `tileattn plot` do, once the command line has been taken apart."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from tileattn.bench import cases, report, results, timing, variants
from tileattn.bench.cases import Case
from tileattn.bench.peers import PEERS, Implementation, TileAttn
from tileattn.bench.peers.base import OWN
from tileattn.bench.runner import Run
from tileattn.call import AttentionCall, device_arch
from tileattn.dispatch import BACKENDS
from tileattn.kernels.cache import default_folder

RESULTS_FOLDER = Path("bench-results")
PICTURES = (".png", ".svg", ".pdf")
DEFAULT_PEERS = {"cuda": "fa2,cudnn", "cpu": "sdpa,eager"}
DEFAULT_DTYPE = {"cuda": "bf16", "cpu": "fp32"}
# The forward pass is what tileattn has; `cases.DIRECTIONS` knows the FLOPs of the others.
DIRECTIONS = ("fwd",)
# What a shell calls a command that ended by Ctrl-C.
STOPPED = 130


@dataclass(frozen=True)
class ShapeOptions:
    """Options of one case's shape; None where the user gave none."""

    batch: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    seqlen: str | None = None
    seqlen_k: int | None = None
    head_dim: int | None = None
    head_dim_v: int | None = None


@dataclass(frozen=True)
class VariantOptions:
    """Options of one case's variant; None or False where the user gave none."""

    causal: bool = False
    mask: str | None = None
    softcap: float | None = None
    alibi: bool = False
    bias: bool = False
    sink: bool = False


@dataclass(frozen=True)
class FileOptions:
    """Where to write, and whether to talk."""

    json: Path | None = None
    plot: Path | None = None
    force: bool = False
    commit: str | None = None
    quiet: bool = False


@dataclass(frozen=True)
class Chosen:
    """The cases to run and the name of their suite, "custom" for the user's own."""

    suite: str
    cases: Sequence[Case]


def refuse(option: str, message: str) -> typer.BadParameter:
    """The one error that a bad option value gets: what was given and what is accepted is in the message."""
    return typer.BadParameter(message, param_hint=option)


def resolve_device(name: str) -> torch.device:
    """The device of `--device`."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, index = name.partition(":")
    accepted = "auto, cpu" + (f", cuda:0 to cuda:{torch.cuda.device_count() - 1}" if torch.cuda.is_available() else "")
    known = kind == "cpu" or (kind == "cuda" and torch.cuda.is_available())
    numbered = not index or (kind == "cuda" and index.isdecimal() and int(index) < torch.cuda.device_count())
    if not (known and numbered):
        raise refuse("--device", f"{name!r} is not a device here; accepted: {accepted}")
    return torch.device(name)


def choose_cases(
    suite: str | None,
    shape: ShapeOptions,
    variant: VariantOptions,
    dtype: str | None,
    direction: str,
    device: torch.device,
) -> Chosen:
    """A named suite, or the user's own case at each of its lengths."""
    if direction not in DIRECTIONS:
        raise refuse("--direction", f"{direction!r} is not measured; accepted: {', '.join(DIRECTIONS)}")
    dtype = dtype or DEFAULT_DTYPE[device.type]
    if dtype not in cases.DTYPES:
        raise refuse("--dtype", f"{dtype!r} is not known; accepted: {', '.join(cases.DTYPES)}")
    own = shape != ShapeOptions() or variant != VariantOptions()
    if own and suite is not None:
        raise refuse("--suite", "a suite brings its own shapes and variants; give either it or the options of one case")
    if own:
        return Chosen("custom", _own_cases(shape, _variant_name(variant), dtype))
    suite = suite or "quick"
    if suite not in cases.SUITES:
        raise refuse("--suite", f"{suite!r} is not known; accepted: {', '.join(cases.SUITES)}")
    return Chosen(suite, cases.suite(suite, dtype, device.type))


def _at_least_one(option: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise refuse(option, f"{value} is too few; accepted: an integer of at least 1")


def _own_cases(shape: ShapeOptions, variant: str, dtype: str) -> list[Case]:
    for name in ("batch", "heads", "kv_heads", "seqlen_k", "head_dim", "head_dim_v"):
        _at_least_one(f"--{name.replace('_', '-')}", getattr(shape, name))
    heads, head_dim = shape.heads or 8, shape.head_dim or 64
    kv_heads = shape.kv_heads or heads
    if heads % kv_heads:
        raise refuse("--kv-heads", f"{kv_heads} does not divide the {heads} heads of q")
    base = cases.square(shape.batch or 1, 1, heads, head_dim, variant, dtype)
    base = replace(base, kv_heads=kv_heads, head_dim_v=shape.head_dim_v or head_dim)
    lengths = _lengths(shape.seqlen or "1024")
    return [replace(base, seqlen_q=length, seqlen_k=shape.seqlen_k or length) for length in lengths]


def _lengths(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise refuse("--seqlen", f"{text!r} is not understood; accepted: positive integers with commas between")
    return list(dict.fromkeys(map(int, parts)))


def _variant_name(options: VariantOptions) -> str:
    terms = ["causal"] if options.causal else []
    terms += [options.mask] if options.mask not in (None, "full") else []
    if options.softcap is not None:
        if options.softcap <= 0:
            raise refuse("--softcap", f"{options.softcap:g} is not a cap; accepted: a positive number")
        terms.append(f"softcap{options.softcap:g}")
    terms += [name for name in ("alibi", "bias", "sink") if getattr(options, name)]
    try:
        return variants.parse("+".join(terms) or "full").name
    except ValueError as error:
        raise refuse("--mask", str(error)) from error


def choose_implementations(backend: str | None, peers: str | None, device: torch.device) -> list[Implementation]:
    """tileattn, and the peers beside it."""
    names = DEFAULT_PEERS[device.type] if peers is None else peers
    wanted = [] if names == "none" else [name.strip() for name in names.split(",")]
    if unknown := [name for name in wanted if name not in PEERS]:
        raise refuse("--peers", f"{', '.join(map(repr, unknown))}: not known; accepted: none, {', '.join(PEERS)}")
    return [own_implementation(backend), *(PEERS[name] for name in dict.fromkeys(wanted))]


def own_implementation(backend: str | None) -> TileAttn:
    """tileattn with the backend of `--backend`."""
    names = [each.name for each in BACKENDS]
    if backend is not None and backend not in names:
        raise refuse("--backend", f"{backend!r} is not known; accepted: {', '.join(names)}")
    return TileAttn(backend)


def bench(
    chosen: Chosen,
    implementations: Sequence[Implementation],
    device: torch.device,
    rounds: int,
    files: FileOptions,
) -> int:
    """Run, save after every case, print, draw. Returns the exit code: 1 if tileattn failed or was not measured."""
    _at_least_one("--rounds", rounds)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    json, picture = _reserve(chosen.suite, device, files)
    measured = results.begin(device, files.commit, " ".join(["tileattn", *sys.argv[1:]]))
    results.save(measured, json)
    failures: list[str] = []
    stopped = False
    with _progress(len(chosen.cases), files.quiet) as progress:

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
    if stopped:
        typer.echo("stopped: what was measured so far is shown and kept", err=True)
    _show(measured, failures, files.quiet)
    typer.echo(f"results: {json}")
    if measured.rows:
        _draw(measured, picture, asked=files.plot is not None)
    own_failed = any(entry.backend == OWN for entry in measured.failed)
    nothing = not any(row.backend == OWN for row in measured.rows)
    return STOPPED if stopped else int(own_failed or nothing)


def redraw(result: Path, picture: Path, force: bool) -> None:
    """`tileattn plot`."""
    _check_picture("--output", picture, force)
    try:
        measured = results.load(result)
    except ValueError as error:
        raise refuse("RESULT", str(error)) from error
    if not measured.rows:
        raise refuse("RESULT", f"{result} has no measurements to draw")
    _draw(measured, picture, asked=True)


def choose_calls(head_dim: str, variant: str, dtype: str, arch: str | None) -> list[AttentionCall]:
    """The calls whose kernels `tileattn warmup` compiles."""
    from tileattn.bench import warmup

    if arch is None and not torch.cuda.is_available():
        raise refuse("--arch", "there is no GPU here to compile for; name an architecture, such as sm_90a")
    arch = arch or device_arch(torch.device("cuda"))
    dtypes = [name.strip() for name in dtype.split(",")]
    if unknown := [name for name in dtypes if name not in cases.DTYPES]:
        raise refuse("--dtype", f"{unknown[0]!r} is not known; accepted: {', '.join(cases.DTYPES)}")
    try:
        names = [variants.parse(name.strip()).name for name in variant.split(",")]
    except ValueError as error:
        raise refuse("--variant", str(error)) from error
    wanted = warmup.calls([_head_dims(part) for part in head_dim.split(",")], names, dtypes, arch)
    tilelang = next(backend for backend in BACKENDS if backend.name == "tilelang")
    for call in wanted:
        if (reason := tilelang.refusal(call)) is not None:
            raise typer.BadParameter(f"the TileLang kernels do not run {call}: {reason}")
    return wanted


def _head_dims(text: str) -> tuple[int, int]:
    """(head_dim, head_dim_v) of "128" or "192/128"."""
    parts = text.strip().split("/")
    if len(parts) > 2 or not all(part.isdecimal() for part in parts):
        raise refuse("--head-dim", f"{text!r} is not understood; accepted: 128, or 192/128 where v has another")
    return int(parts[0]), int(parts[-1])


def warm_up(wanted: Sequence[AttentionCall]) -> int:
    """`tileattn warmup`: a line per kernel as it is ready. Returns the exit code: 1 if one could not be compiled."""
    from tileattn.bench import warmup

    failed = False
    with Console(stderr=True).status(f"compiling {len(wanted)} kernels"):
        for number, each in enumerate(warmup.compile_all(wanted), start=1):
            took = each.error or ("was in the cache" if each.was_there else f"{each.seconds:.1f} s")
            typer.echo(f"[{number}/{len(wanted)}] {each.call}: {took}")
            failed = failed or each.error is not None
    typer.echo(f"kernels: {default_folder()}")
    return int(failed)


def _reserve(suite: str, device: torch.device, files: FileOptions) -> tuple[Path, Path]:
    """The paths of result file and picture; the first is created at once, so that two runs never share it."""
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    json = files.json or RESULTS_FOLDER / f"{suite}-{device.type}-{stamp}.json"
    picture = files.plot or json.with_suffix(".png")
    if files.plot is not None:
        _check_picture("--plot", picture, files.force)
    elif picture.exists() and not files.force:
        raise refuse("--json", f"{picture}, its picture, exists; give another name, or --force to overwrite it")
    json.parent.mkdir(parents=True, exist_ok=True)
    try:
        json.open("w" if files.force else "x").close()
    except FileExistsError:
        raise refuse("--json", f"{json} exists; give another name, or --force to overwrite it") from None
    except OSError as error:
        raise refuse("--json", f"{json} can't be written: {error.strerror}") from error
    return json, picture


def _check_picture(option: str, picture: Path, force: bool) -> None:
    """Before anything is measured: a picture that was asked for can be drawn."""
    if picture.suffix not in PICTURES:
        raise refuse(option, f"{picture} has the suffix {picture.suffix!r}; accepted: {', '.join(PICTURES)}")
    if picture.exists() and not force:
        raise refuse(option, f"{picture} exists; give another name, or --force to overwrite it")
    if find_spec("matplotlib") is None:
        raise refuse(option, "plots need matplotlib: pip install 'tileattn[plot]'")


def _draw(measured: results.Results, picture: Path, asked: bool) -> None:
    if not asked and find_spec("matplotlib") is None:
        typer.echo("no picture: plots need matplotlib (pip install 'tileattn[plot]')", err=True)
        return
    from tileattn.bench import plot

    picture.parent.mkdir(parents=True, exist_ok=True)
    plot.save(measured, picture)
    typer.echo(f"picture: {picture}")


def _show(measured: results.Results, failures: Sequence[str], quiet: bool) -> None:
    """The tables on stdout; tracebacks, and if quiet the failures, on stderr."""
    console = Console(width=None if sys.stdout.isatty() else 100)
    errors = Console(stderr=True)
    for failure in failures:
        errors.print(Text(failure), style="red")
    if quiet:
        for entry in measured.failed:
            errors.print(Text(f"{entry.case}: {entry.backend}: {entry.reason}"), style="red")
    else:
        console.print(report.render(measured))


@dataclass(frozen=True)
class _Reporter:
    """Tells how far the run is: a bar on a terminal, a line per case elsewhere, nothing if quiet."""

    bar: Progress
    total: int
    quiet: bool

    def say(self, text: str) -> None:
        self.bar.update(self.bar.task_ids[0], description=text)

    def done(self, case: Case, measured: results.Results) -> None:
        self.bar.advance(self.bar.task_ids[0])
        if self.quiet or self.bar.console.is_terminal:
            return
        number = len(measured.cases())
        times = [f"{row.backend} {row.ms:.3f} ms" for row in measured.rows if row.case == case.name]
        typer.echo(f"[{number}/{self.total}] {case.name}: {', '.join(times)}", err=True)


@contextmanager
def _progress(total: int, quiet: bool) -> Iterator[_Reporter]:
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
        yield _Reporter(bar, total, quiet)
