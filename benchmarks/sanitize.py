"""Runs compute-sanitizer on small shapes of the kernels: addresses, races in shared memory, barriers.

    python benchmarks/sanitize.py check --out sanitize.json            # all tools; exit code 1 if one finds anything
    python benchmarks/sanitize.py check --direction bwd                # the kernels of the backward pass
    python benchmarks/sanitize.py check --direction decode             # append, plan, attention and combine
    python benchmarks/sanitize.py check --tool racecheck --cases d64   # one tool, cases whose name matches
    python benchmarks/sanitize.py launch                               # the launches alone, without the sanitizer

`check` compiles the kernels first, in parallel, so that the sanitizer sees only launches. Then each tool runs, with a
time limit, over the kernels for long sequences and over those for short ones, each in a process of its own.

Outputs must be finite; the tests check that they are right (`pytest -m gpu`). The forward pass's persistent kernels run
with few blocks (`--blocks`), so that even small shapes use the queue of tiles. `sanitize_cases.py` has the calls.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated
from unittest import mock

import precompile
import torch
import typer
from sanitize_cases import BATCH, SIZES, Case
from sanitize_cases import CASES as OF_PASSES
from sanitize_decode import DECODE, AppendLaunches, DecodeLaunches

from tileattn.bench import environment
from tileattn.call.facts import device_arch
from tileattn.cli.choices import refuse
from tileattn.cli.group import run_script
from tileattn.kernels import tile_lists
from tileattn.kernels.tilelang.buckets import BUCKETS, only
from tileattn.kernels.tilelang.decode import launch as decode_launch
from tileattn.kernels.tilelang.decode.lines import visits
from tileattn.kernels.tilelang.forward import launch as forward_launch

AnyCase = Case | DecodeLaunches | AppendLaunches
CASES: dict[str, tuple[AnyCase, ...]] = {**OF_PASSES, "decode": DECODE}
TOOLS = ("memcheck", "racecheck", "synccheck")
ON_DEMAND = ("initcheck",)  # it may not know of every way in which Hopper's kernels write: read what it says with care
SHOWN_LINES = 40
TOOLKIT = Path("/usr/local/cuda/bin/compute-sanitizer")
# What the sanitizer returns where it found something and the program itself ended well.
FOUND = 86


# --- The launches ---


def chosen(pattern: str, direction: str = "fwd") -> list[AnyCase]:
    """The cases of a direction whose name matches a regular expression somewhere."""
    cases = CASES[direction]
    try:
        matching = [case for case in cases if re.search(pattern, case.name)]
    except re.error as error:
        raise refuse("--cases", f"{pattern!r} is not a regular expression: {error}") from error
    if not matching:
        raise refuse("--cases", f"{pattern!r} matches none of {', '.join(case.name for case in cases)}")
    return matching


@contextlib.contextmanager
def small_lists() -> Iterator[None]:
    """Inside, small calls take their tiles from lists as well, if the mask is one that has them."""
    with mock.patch.object(tile_lists, "FEWEST_TILES", 1), mock.patch.object(visits, "FEWEST_TILES", 1):
        yield


def launch_all(cases: Sequence[AnyCase], bucket: str, blocks: int) -> None:
    """Runs each case on the GPU, on the kernels of a bucket of lengths, and prints where it begins and ends."""
    for module in (forward_launch, decode_launch):
        module.multiprocessors = lambda device: blocks  # type: ignore[assignment]
    for case in cases:
        print(f"begin {case.name}", flush=True)
        try:
            with only(bucket), small_lists():
                for size, run in zip(case.sizes, case.launches("cuda")):
                    assert case.is_sound(*(x.cpu() for x in run())), (case.name, size)
        except NotImplementedError as refused:  # fp8 on a GPU without it
            print(f"refused {case.name}: {refused}", flush=True)
        else:
            print(f"end {case.name}", flush=True)


def jobs(cases: Sequence[AnyCase], buckets: Sequence[str], arch: str) -> list[precompile.AnyJob]:
    """The kernels of these launches."""
    attempts = [run for case in cases for run in case.launches("meta")]
    by_key: dict[str, precompile.AnyJob] = {}
    for bucket in buckets:
        with only(bucket), small_lists():
            by_key |= {job.key: job for job in precompile.jobs_of(attempts, arch)}
    return list(by_key.values())


# --- The sanitizer ---


@dataclass(frozen=True)
class Report:
    """What a tool said of a bucket of kernels.

    outcome: "clean", "found" (errors, or hazards of any severity), "timed out" or "failed" (the program, or the tool).
    cases: those that ended. last: the one that was running when the process ended, if any.
    """

    tool: str
    kernels: str
    outcome: str
    errors: int
    warnings: int
    seconds: float
    cases: list[str]
    refused: list[str]
    last: str | None
    lines: list[str]


def find_sanitizer(given: Path | None) -> Path:
    """The path of the sanitizer: the one that was named, or that on PATH, or that of the CUDA toolkit."""
    on_path = shutil.which("compute-sanitizer")
    candidates = [given] if given else [*([Path(on_path)] if on_path else []), _of_cuda_home(), TOOLKIT]
    for candidate in candidates:
        if candidate is not None and os.access(candidate, os.X_OK):
            return candidate
    raise refuse("--sanitizer", f"no compute-sanitizer at {', '.join(map(str, filter(None, candidates)))}")


def _of_cuda_home() -> Path | None:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    return Path(home) / "bin" / "compute-sanitizer" if home else None


def run_tool(sanitizer: Path, tool: str, bucket: str, launches: Sequence[str], limit_s: float) -> Report:
    """Runs one tool over one bucket of kernels. launches: the command that runs under it."""
    # PyTorch asks the driver for functions that it may not have. Those errors are no fault of a kernel.
    command = [str(sanitizer), "--tool", tool, "--error-exitcode", str(FOUND), "--report-api-errors", "no"]
    # Every tensor is an allocation of its own, so that memcheck knows where it ends.
    variables = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    began = time.monotonic()
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            [*command, *launches], stdout=output, stderr=subprocess.STDOUT, env=variables, start_new_session=True
        )
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
        output.seek(0)
        return report_of(tool, bucket, code, output.read(), time.monotonic() - began)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the sanitizer and the program under it, which is a process of its own and may hang on the GPU."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def report_of(tool: str, bucket: str, code: int | None, output: str, seconds: float) -> Report:
    """The report of a tool from its output and its exit code (None: it reached the time limit)."""
    lines = output.splitlines()
    said = [re.match(r"(begin|end|refused) ([^\s:]+)", line) for line in lines]
    by_word: dict[str, list[str]] = {"begin": [], "end": [], "refused": []}
    for match in said:
        if match:
            by_word[match[1]].append(match[2])
    open_cases = [name for name in by_word["begin"] if name not in by_word["end"] + by_word["refused"]]
    errors, warnings = _summary(output)
    if code is None:
        outcome = "timed out"
    elif errors or warnings or code == FOUND:
        outcome = "found"
    else:
        # Without a summary the tool did not watch; without a case nothing was launched.
        watched = errors is not None and bool(by_word["end"])
        outcome = "clean" if code == 0 and watched and not open_cases else "failed"
    told = [line for line in lines if line.startswith("=========") and line.strip("= ")]
    # What the tool said first; of a program that failed or hung, what it said last.
    shown = {"clean": [], "found": told[:SHOWN_LINES]}.get(outcome, lines[-SHOWN_LINES:])
    return Report(
        tool, bucket, outcome, errors or 0, warnings, round(seconds, 1), by_word["end"], by_word["refused"],
        open_cases[-1] if open_cases else None, shown,
    )  # fmt: skip


def _summary(output: str) -> tuple[int | None, int]:
    """(errors, warnings) of a tool's summaries, one for each process; errors is None where there is no summary."""
    counts = re.findall(r"RACECHECK SUMMARY: \d+ hazards? displayed \((\d+) errors?, (\d+) warnings?\)", output)
    counts += [(errors, 0) for errors in re.findall(r"ERROR SUMMARY: (\d+) errors?", output)]
    return (sum(int(errors) for errors, _ in counts) if counts else None), sum(int(warnings) for _, warnings in counts)


def sanitizer_version(sanitizer: Path) -> str:
    """The version that the sanitizer prints of itself."""
    text = subprocess.run([str(sanitizer), "--version"], capture_output=True, text=True, timeout=60).stdout
    match = re.search(r"[Vv]ersion\s+(\S+)", text)
    return match[1] if match else "unknown"


def write(path: Path, reports: Sequence[Report], sanitizer: Path, blocks: int, direction: str) -> None:
    """Writes the summary: the machine, the versions, the date, and the reports of the tools."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    summary = {
        "gpu": environment.device_name(device),
        "versions": environment.versions() | {"compute-sanitizer": sanitizer_version(sanitizer)},
        "commit": environment.commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "direction": direction,
        "batch": BATCH,
        "sizes": SIZES,
        "blocks": blocks,
        "runs": [asdict(report) for report in reports],
    }
    path.write_text(json.dumps(summary, indent=1) + "\n")


# --- The command line ---

app = typer.Typer(
    help=(__doc__ or "").split("\n\n")[0],
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Direction = Annotated[str, typer.Option(help="fwd, bwd or decode: the kernels of which pass.")]
Cases = Annotated[str, typer.Option(help="Regular expression: only cases whose name it matches somewhere.")]
Kernels = Annotated[
    str | None,
    typer.Option(help="Of which lengths: long, short or wide. Default: long and short.", show_default=False),
]
Blocks = Annotated[int, typer.Option(min=1, help="Of the persistent kernels: few, so that they draw several tiles.")]


@app.command()
def check(
    tool: Annotated[
        list[str], typer.Option(help="memcheck, racecheck, synccheck or initcheck; can be repeated.")
    ] = list(TOOLS),  # noqa: B006
    direction: Direction = "fwd",
    cases: Cases = "",
    kernels: Kernels = None,
    blocks: Blocks = 4,
    time_limit: Annotated[float, typer.Option(help="Seconds for each tool and kernels.")] = 280.0,
    out: Annotated[Path | None, typer.Option(help="Write a summary (JSON).", show_default=False)] = None,
    sanitizer: Annotated[
        Path | None, typer.Option(help="compute-sanitizer. Default: on PATH, or the toolkit's.", show_default=False)
    ] = None,
    jobs_: Annotated[int, typer.Option("--jobs", "-j", min=1, help="That compile.")] = precompile.CORES,
) -> None:
    """Compile the kernels, and run each tool over them."""
    if unknown := [name for name in tool if name not in TOOLS + ON_DEMAND]:
        raise refuse("--tool", f"{unknown[0]!r} is not known; accepted: {', '.join(TOOLS + ON_DEMAND)}")
    buckets, wanted, program = _buckets(direction, kernels), chosen(cases, direction), find_sanitizer(sanitizer)
    if not torch.cuda.is_available():
        raise typer.BadParameter("there is no GPU here to launch on")
    if precompile.run(jobs(wanted, buckets, device_arch(torch.device("cuda"))), jobs_, only_list=False):
        raise typer.Exit(1)
    reports = []
    for name in tool:
        for bucket in buckets:
            launches = [sys.executable, __file__, "launch", "--direction", direction, "--cases", cases]
            launches += ["--blocks", str(blocks), "--kernels", bucket]
            report = run_tool(program, name, bucket, launches, time_limit)
            reports.append(report)
            show(report)
            if out is not None:  # after each, so that a later one that is cut short loses nothing
                write(out, reports, program, blocks, direction)
    raise typer.Exit(int(any(report.outcome != "clean" for report in reports)))


def show(report: Report) -> None:
    """Prints a line for the report, and some of the output where something is wrong."""
    counted = f"{report.errors} errors, {report.warnings} warnings"
    last = f", in {report.last}" if report.last else ""
    typer.echo(
        f"{report.tool}, kernels for {report.kernels} sequences: {report.outcome}{last}; {counted}; "
        f"{len(report.cases)} cases in {report.seconds:.0f} s"
    )
    for line in report.lines:
        typer.echo(f"    {line}")


@app.command()
def launch(
    direction: Direction = "fwd",
    cases: Cases = "",
    kernels: Kernels = None,
    blocks: Blocks = 4,
) -> None:
    """Only the launches, which `check` runs under the sanitizer."""
    for bucket in _buckets(direction, kernels):
        launch_all(chosen(cases, direction), bucket, blocks)


def _buckets(direction: str, kernels: str | None) -> list[str]:
    """The buckets of lengths; each is run in a process of its own."""
    if direction not in CASES:
        raise refuse("--direction", f"{direction!r} is not known; accepted: {', '.join(CASES)}")
    if kernels not in (None, *BUCKETS):
        raise refuse("--kernels", f"{kernels!r} is not known; accepted: {', '.join(BUCKETS)}")
    if direction == "decode":  # whose kernels do not depend on them
        return ["short"] if kernels is None else [kernels]
    return ["long", "short"] if kernels is None else [kernels]


if __name__ == "__main__":
    run_script(app)
