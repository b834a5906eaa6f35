"""`tileattn ladder`: measures the rungs of `backend="mma"`, the gain of each, and FlashAttention-2 for comparison.

The ladder's steps and their gains are in :mod:`tileattn.bench.ladder.climb`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import torch
import typer
from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from tileattn.bench import problem, report, results
from tileattn.bench.baselines import BASELINES, Implementation, TileAttn
from tileattn.bench.cases import Case
from tileattn.bench.ladder.climb import BESIDE, TILELANG, Climbed, Step, climbed, steps
from tileattn.bench.progress import reporting
from tileattn.bench.results import Results, Row
from tileattn.bench.runner import Run
from tileattn.call.facts import AttentionCall, device_arch
from tileattn.cli import run_bench as command
from tileattn.cli.choices import LADDER, at_least_one, refuse
from tileattn.kernels.mma.backend import parse
from tileattn.kernels.mma.batch import compile_all
from tileattn.kernels.mma.rungs import ACCUMULATIONS, HEAD_DIMS, LARGE_HEAD_DIMS, NAME
from tileattn.measure import timing

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
ROUNDS = 3


def climb(case: Case, iters: int, seed: int, all_tiles: bool, json: Path | None, plot: Path | None, force: bool) -> int:
    """Measures all steps on this machine's GPU, prints them, and writes the requested files. Returns the exit code."""
    at_least_one("--iters", iters)
    if plot is not None:
        command.check_picture("--plot", plot, force)
    device = _gpu()
    measured = results.begin(device, None, command_of(case, iters, seed, all_tiles))
    measured.seed = seed
    _reserve(measured, json, plot, force)
    ladder = steps(case.head_dim, case.dtype, all_tiles)
    _compile(ladder, case, device)
    typer.echo(header(measured, case, iters))
    given = problem.build(case, device, seed)
    implementations: list[Implementation] = [TileAttn(step.backend, step.backend) for step in ladder]
    implementations += [*(BASELINES[name] for name in BESIDE), TileAttn(TILELANG, TILELANG)]
    measured.first_values = _first_values(implementations, given)
    _measure(measured, case, implementations, device, iters)
    console = Console(width=None if Console().is_terminal else 130)
    console.print(render(measured, ladder))
    _write(measured, json, plot)
    return int(bool(measured.failed) or not measured.rows)


def command_of(case: Case, iters: int, seed: int, all_tiles: bool) -> str:
    """The command line that measures this again; it is kept in the result file."""
    sizes = f"--B {case.batch} --H {case.heads} --N {case.seqlen_q} --D {case.head_dim}"
    flags = "".join(
        flag for flag, given in ((" --causal", case.causal), (f" --dtype {case.dtype}", case.dtype != "fp16")) if given
    )
    return f"tileattn {LADDER} {sizes} --iters {iters} --seed {seed}{flags}{' --tiles' * all_tiles}"


def header(measured: Results, case: Case, iters: int) -> str:
    """What is measured, on what, before the first measurement."""
    versions = ", ".join(f"{name} {measured.versions[name]}" for name in ("torch", "cuda") if name in measured.versions)
    mask = "causal" if case.causal else "full"
    sizes = f"B={case.batch}, H={case.heads}, N={case.seqlen_q}, D={case.head_dim}, {mask}, {case.dtype}"
    return (
        "B: batch size, H: heads, N: length of q, k and v, D: head dim\n"
        f"{sizes}, seed: {measured.seed}, {ROUNDS} rounds of {iters} calls; {measured.gpu}, {versions}"
    )


def _reserve(measured: Results, json: Path | None, plot: Path | None, force: bool) -> None:
    """Checks before any measurement that the requested files can be written."""
    if plot is not None:
        command.check_writable("--plot", plot)
    if json is not None:
        command.create("--json", json, force)
        results.save(measured, json)


def _write(measured: Results, json: Path | None, plot: Path | None) -> None:
    if json is not None:
        results.save(measured, json)
        typer.echo(f"results: {json}")
    if plot is not None and not measured.rows:
        typer.echo("no picture: nothing was measured", err=True)
    elif plot is not None:
        from tileattn.bench.ladder import plot as plot_ladder

        with command.writing("--plot", plot):
            plot_ladder.save(measured, plot)
        typer.echo(f"picture: {plot}")


def _gpu() -> torch.device:
    if not torch.cuda.is_available():
        raise typer.BadParameter("the ladder's kernels need an NVIDIA GPU, and PyTorch finds none on this machine")
    return torch.device("cuda", torch.cuda.current_device())


def case_of(batch: int, heads: int, seqlen: int, head_dim: int, causal: bool, dtype: str) -> Case:
    """The case of the command line. Refuses cases that no rung runs."""
    for option, value in (("--batch", batch), ("--heads", heads), ("--seqlen", seqlen)):
        at_least_one(option, value)
    if head_dim not in HEAD_DIMS + LARGE_HEAD_DIMS:
        raise refuse(
            "--head-dim", f"{head_dim} is no head dim of the ladder; accepted: {_listed(HEAD_DIMS + LARGE_HEAD_DIMS)}"
        )
    if dtype not in DTYPES:
        raise refuse("--dtype", f"{dtype!r} is not known; accepted: {_listed(DTYPES)}")
    return Case(batch, seqlen, seqlen, heads, heads, head_dim, head_dim, "causal" if causal else "full", dtype)


def _listed(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))


def _compile(ladder: Sequence[Step], case: Case, device: torch.device) -> None:
    """Compiles all kernels in parallel. A failure is reported later, where the kernel is measured."""
    arch = device_arch(device)
    call = AttentionCall(DTYPES[case.dtype], case.head_dim, case.head_dim, arch=arch)
    kernels = [parse(step.backend.removeprefix(f"{NAME}:")).kernel(call) for step in ladder]
    with Console(stderr=True).status(f"compiling {len(kernels)} kernels"):
        compile_all(kernels, arch)


def _first_values(implementations: Sequence[Implementation], given: problem.Problem) -> dict[str, list[float]]:
    """The first two values and the last of each output, by implementation. Implementations that fail are left out."""
    values_of = {}
    for each in implementations:
        try:
            if each.refusal(given) is not None:
                continue
            prepared = each.prepare(given)
            with prepared.context():
                o = prepared.call().flatten()
        except Exception:  # it will be reported when it is measured
            continue
        values_of[each.name] = [float(o[0]), float(o[1]), float(o[-1])]
    return values_of


def _measure(
    measured: Results, case: Case, implementations: Sequence[Implementation], device: torch.device, iters: int
) -> None:
    failures: list[str] = []
    with reporting(1, quiet=False) as progress:
        run = Run(
            LADDER,
            [case],
            implementations,
            device,
            measured,
            seed=measured.seed or 0,
            effort=replace(timing.DEFAULT, measure_ms=0.0, min_calls=iters, rounds=ROUNDS),
            progress=progress.say,
            on_case=lambda case: None,
            on_failure=failures.append,
        )
        run()
    for failure in failures:
        Console(stderr=True).print(Text(failure), style="red")


def render(measured: Results, ladder: Sequence[Step]) -> RenderableType:
    """The table, with missing measurements below it."""
    first = measured.first_values
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=_title(measured), title_justify="left")
    table.add_column("step", no_wrap=True)
    for heading in ("first values, last", "ms", "TFLOPS", "gain", "× FA-2", "error"):
        table.add_column(heading, justify="right", no_wrap=True)
    fa2 = next((row.tflops for row in measured.rows if row.backend == "fa2"), None)
    best = {each.row.backend for acc in ACCUMULATIONS if (each := _best(measured, ladder, acc)) is not None}
    for each in climbed(measured, ladder):
        style = "bold green" if each.row.backend in best else ""
        table.add_row(each.label, *_cells(each.row, first, each.gain, fa2), style=style)
    table.add_section()
    for row in measured.rows:
        if not row.backend.startswith(NAME):
            table.add_row(row.backend, *_cells(row, first, None, fa2))
    notes = [Text(f"refused: {line}", style="yellow") for line in report.grouped(measured.refused)]
    notes += [Text(f"failed: {line}", style="red") for line in report.grouped(measured.failed)]
    return Group(table, *notes, *report.doubts(measured))


def _best(measured: Results, ladder: Sequence[Step], acc: str) -> Climbed | None:
    reached = [each for each in climbed(measured, ladder) if f"acc={acc}" in each.row.backend]
    return max(reached, key=lambda each: each.row.tflops, default=None)


def _title(measured: Results) -> str:
    row = measured.rows[0] if measured.rows else None
    what = "" if row is None else f"{row.case} (batch,seqlen,heads), {row.dtype}, "
    return f"The mma ladder: {what}{measured.gpu}, {datetime.fromisoformat(measured.date):%Y-%m-%d}"


def _cells(row: Row, first: dict[str, list[float]], gain: float | None, fa2: float | None) -> list[str]:
    values = " ".join(f"{value:+.6f}" for value in first.get(row.backend, ()))
    times = "" if fa2 is None else f"{row.tflops / fa2:.2f}"
    return [
        values,
        f"{row.ms:.3f}",
        f"{row.tflops:.1f}",
        "" if gain is None else f"+{gain:.1%}",
        times,
        f"{row.error:.1e}",
    ]
