"""The code of `tileattn bench --suite modules`, called with parsed options."""

from __future__ import annotations

import sys
from dataclasses import replace
from datetime import datetime, timezone
from importlib.util import find_spec
from pathlib import Path

import torch
import typer
from rich.console import Console

from tileattn.bench import environment
from tileattn.bench.cases import DTYPES
from tileattn.bench.modules import report
from tileattn.bench.modules.results import Results, Shape, save
from tileattn.bench.modules.run import measure
from tileattn.cli.choices import ShapeOptions, at_least_one, lengths_of, refuse
from tileattn.cli.run_bench import RESULTS_FOLDER, STOPPED, FileOptions, check_picture, create, writing
from tileattn.installation import pip_install
from tileattn.measure import timing

MODULES = "modules"
# Options of `tileattn bench` that the suite has.
TAKEN = (
    "suite", "batch", "heads", "kv_heads", "seqlen", "head_dim", "dtype", "direction", "device", "rounds", "json",
    "plot", "force", "commit", "quiet",
)  # fmt: skip
# The sizes of FlashTile's table on a GPU, and sizes for seconds of a CPU: batch, heads, head_dim and lengths.
SIZES = {"cuda": (4, 12, 64, "512,1024,2048,4096,8192"), "cpu": (1, 4, 64, "128,256,512,1024")}
DIRECTIONS = ("fwd", "fwdbwd")
TABLE_WIDTH = 140  # where stdout is no terminal


def refuse_others(context: typer.Context) -> None:
    """Refuses the options of `tileattn bench` that mean nothing in this suite."""
    for name in context.params:
        source = context.get_parameter_source(name)
        if name not in TAKEN and source is not None and source.name == "COMMANDLINE":
            taken = ", ".join(f"--{option.replace('_', '-')}" for option in TAKEN[1:])
            raise refuse(f"--{name.replace('_', '-')}", f"the suite modules does not have it; it has {taken}")


def choose(options: ShapeOptions, dtype: str | None, direction: str, device: torch.device) -> tuple[Shape, list[int]]:
    """The shape and the lengths."""
    for name in ("batch", "heads", "kv_heads", "head_dim"):
        at_least_one(f"--{name.replace('_', '-')}", getattr(options, name))
    batch, heads, head_dim, lengths = SIZES[device.type]
    heads = options.heads or heads
    # A quarter of the heads, or all where 4 does not divide them.
    kv_heads = options.kv_heads or (heads // 4 if heads % 4 == 0 else heads)
    if heads % kv_heads:
        raise refuse("--kv-heads", f"{kv_heads} does not divide the {heads} heads of q")
    dtype = dtype or "fp32"
    if dtype not in DTYPES or dtype == "fp8":
        accepted = ", ".join(name for name in DTYPES if name != "fp8")
        raise refuse("--dtype", f"{dtype!r} is not measured in this suite; accepted: {accepted}")
    if direction not in DIRECTIONS:
        raise refuse("--direction", f"{direction!r} is not measured in this suite; accepted: {', '.join(DIRECTIONS)}")
    shape = Shape(options.batch or batch, heads, kv_heads, options.head_dim or head_dim, dtype, direction)
    return shape, sorted(lengths_of(options.seqlen or lengths))


def bench(shape: Shape, lengths: list[int], device: torch.device, rounds: int, files: FileOptions) -> int:
    """Measures each length, saves after it, prints and draws. Returns the exit code."""
    at_least_one("--rounds", rounds)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    json = files.json or RESULTS_FOLDER / f"{MODULES}-{device.type}-{datetime.now():%Y%m%d-%H%M%S}.json"
    picture = files.plot or json.with_suffix(".png")
    if files.plot is not None:
        check_picture("--plot", picture, files.force)
    create("--json", json, files.force)
    measured = Results(
        gpu=environment.device_name(device),
        versions=environment.versions(),
        commit=files.commit or environment.commit(),
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        command=" ".join(["tileattn", *sys.argv[1:]]),
        shape=shape,
    )
    effort = replace(timing.DEFAULT, rounds=rounds)
    stopped = False

    def say(text: str) -> None:
        if not files.quiet:
            typer.echo(text, err=True)

    try:
        for seqlen in lengths:
            measure(measured, seqlen, device, effort, say)
            save(measured, json)
    except KeyboardInterrupt:
        stopped = True
        typer.echo("stopped: what was measured so far is shown and kept", err=True)
    if not files.quiet:
        Console(width=None if sys.stdout.isatty() else TABLE_WIDTH).print(report.render(measured))
    typer.echo(f"results: {json}")
    if measured.rows:
        _draw(measured, picture)
    return STOPPED if stopped else int(not measured.rows)


def _draw(measured: Results, picture: Path) -> None:
    if find_spec("matplotlib") is None:
        typer.echo(f"no picture: plots need matplotlib ({pip_install('plot')})", err=True)
        return
    from tileattn.bench.modules import plot

    with writing("--plot", picture):
        plot.save(measured, picture)
    typer.echo(f"picture: {picture}")
