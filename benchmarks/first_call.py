"""Measures a first call: a fresh process, an empty kernel cache, one causal forward pass in bfloat16 at head dim 128.

    python benchmarks/first_call.py --json first-call.json                          # on a GPU: up to the result
    python benchmarks/first_call.py --compile-only --arch sm_90a                    # without a GPU: up to the library
    python benchmarks/first_call.py --compile-only --arch sm_90a --beside OTHER     # in turns with another checkout
    python benchmarks/first_call.py --direction fwdbwd                              # and the backward pass

Each run is a process of its own, from its start to its end, and its parts are printed at once. The table at the end has
medians of all runs, and the least. The processor time has that of the compilers in it; on a busy machine it says more
than the time on the clock. Importing TileLang is timed by itself, with the garbage collector as it is while a kernel is
compiled.

Where the package has the kernel's source, runs that use it are in turns with runs in which TileLang generates it.

With --direction fwdbwd the parts are the two passes, and runs in which nothing is compiled in the background are in
turns with the others. The processor time lacks that of the background process, which ends later.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from enum import Enum
from pathlib import Path
from typing import Annotated

import torch
import typer

from tileattn.bench import results
from tileattn.call.facts import AttentionCall, device_arch
from tileattn.cli.group import run_script
from tileattn.kernels.tilelang.build import ahead
from tileattn.kernels.tilelang.build.batch import CORES
from tileattn.kernels.tilelang.build.library import generators, version
from tileattn.kernels.tilelang.forward.defaults import default
from tileattn.kernels.tilelang.forward.library import Job

ROOT = Path(__file__).resolve().parent.parent
OFF, GENERATED = "TILEATTN_BACKGROUND", "TILEATTN_SOURCES"
Seconds = dict[str, float]


class Direction(str, Enum):
    """What a run computes."""

    FWD = "fwd"
    FWDBWD = "fwdbwd"


def measured(arch: str, direction: str, checkout: Path, variables: dict[str, str]) -> Seconds:
    """The parts of one run of a checkout's code, with "total" and "processor", those of the whole process."""
    with tempfile.TemporaryDirectory() as cache:
        path = os.pathsep.join([str(checkout / "src"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
        environment = dict(os.environ, TILEATTN_CACHE_DIR=cache, PYTHONPATH=path, **variables)
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        run = subprocess.run(
            [sys.executable, str(ROOT / "benchmarks" / "first_call_run.py"), arch, direction],
            env=environment, capture_output=True, text=True, check=False, cwd=checkout,
        )  # fmt: skip
        total, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if run.returncode != 0:
        raise RuntimeError(f"the run of {checkout} ended with exit status {run.returncode}:\n{run.stderr[-3000:]}")
    parts: Seconds = json.loads(run.stdout.splitlines()[-1])
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return parts | {"total": total, "processor": used}


def summary(runs: list[Seconds]) -> dict[str, dict[str, float]]:
    """Median and least of each part."""
    return {
        part: {"median": statistics.median(run[part] for run in runs), "least": min(run[part] for run in runs)}
        for part in runs[0]
    }


def _kinds(arch: str, direction: str) -> dict[str, tuple[Path, dict[str, str]]]:
    """What is measured in turns, by its name: a checkout, and variables of the environment.

    Where the package has no source of the kernel that fits, TileLang generates it in each run.
    """
    backgrounds = [{}, {OFF: "0"}] if direction == "fwdbwd" else [{}]
    has_source, kinds = _has_source(arch), {}
    for variables in backgrounds:
        ending = "".join(f", {name}={value}" for name, value in variables.items())
        kinds[f"this{ending}"] = ROOT, {**variables, GENERATED: "0"}
        if has_source:
            kinds[f"this, source in the package{ending}"] = ROOT, variables
    return kinds


def _has_source(arch: str) -> bool:
    call = AttentionCall(
        torch.bfloat16, 128, 128, "Causal()", return_lse=False, arch=arch or device_arch(torch.device("cuda"))
    )
    facts, module = Job(call, default(call)).name
    return ahead.find(facts, generators(module), call.arch, version("tilelang")) is not None


def main(
    runs: int,
    arch: str,
    direction: str,
    beside: Path | None,
    json_file: Path | None,
    commit: str | None,
) -> None:
    """Runs in turns, prints a table and writes the file."""
    kinds = _kinds(arch, direction)
    if beside is not None:
        kinds["beside"] = beside.resolve(), {GENERATED: "0"}
    measured_runs: dict[str, list[Seconds]] = {name: [] for name in kinds}
    for _ in range(runs):
        for name, (checkout, variables) in kinds.items():
            run = measured(arch, direction, checkout, variables)
            print(f"{name}: " + ", ".join(f"{part} {seconds:.2f}" for part, seconds in run.items()), flush=True)
            measured_runs[name].append(run)
    rows = {name: summary(found) for name, found in measured_runs.items()}
    for name, parts in rows.items():
        print(f"{name}: {kinds[name][0]}, {runs} runs, {CORES} cores")
        for part, of in parts.items():
            print(f"  {part:42s} median {of['median']:6.2f} s   least {of['least']:6.2f} s")
    if json_file is not None:
        origin = results.begin(
            torch.device("cpu" if arch else "cuda"), commit, " ".join(["first_call.py", *sys.argv[1:]])
        )
        content = {
            **results.origin(origin),
            "cores": CORES,
            "arch": arch or None,
            "direction": direction,
            "runs": measured_runs,
            "rows": [
                {"checkout": name, "part": part, **of} for name, parts in rows.items() for part, of in parts.items()
            ],
        }
        results.write(content, json_file)
        print(f"The rows are in {json_file}.")


app = typer.Typer(help=(__doc__ or "").split("\n\n")[0], add_completion=False)


@app.command()
def first_call(
    runs: Annotated[int, typer.Option(min=1, help="Processes of each checkout.")] = 5,
    compile_only: Annotated[bool, typer.Option("--compile-only", help="Compile, and run nothing.")] = False,
    arch: Annotated[str | None, typer.Option(help="With --compile-only: sm_90a, ...", show_default=False)] = None,
    direction: Annotated[Direction, typer.Option(help="The forward pass, or both passes.")] = Direction.FWD,
    beside: Annotated[
        Path | None, typer.Option(exists=True, file_okay=False, help="Another checkout.", show_default=False)
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Where the rows go, too.", show_default=False)
    ] = None,
    commit: Annotated[
        str | None, typer.Option(help="To record in --json, instead of what git says.", show_default=False)
    ] = None,
) -> None:
    """Measures a first call in fresh processes."""
    if compile_only != (arch is not None):
        raise typer.BadParameter("--compile-only and --arch go together; without them the call runs on the GPU")
    if json_file is not None and json_file.exists():
        raise typer.BadParameter(f"--json {json_file} exists")
    main(runs, arch or "", direction.value, beside, json_file, commit)


if __name__ == "__main__":
    run_script(app)
