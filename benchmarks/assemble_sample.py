"""Assembles the preset "sample" for architectures that are not at hand: registers and spills of each kernel. No GPU.

    python benchmarks/assemble_sample.py --out sample.json              # JSON, and the same as a table, sample.md
    python benchmarks/assemble_sample.py --arch sm_100a --limit 2       # two kernels of one architecture

Kernels for NVIDIA are assembled by nvcc, those for gfx942 by clang with ROCm's headers (tests/tools/hip.py). The exit
status is 1 where a kernel cannot be lowered or assembled, or an architecture is left out because its compiler is not
installed.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tileattn.bench import presets
from tileattn.kernels.tilelang.build.job import KernelJob

ARCHS = ("sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a", "gfx942")
app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class Assembled:
    """One kernel.

    Attributes:
        kernel: as `tileattn bundle --list` prints it.
        arch: the architecture.
        registers: of a thread, the most of the device functions; of gfx942 vector and accumulation registers together.
        spilled: bytes of registers in local memory, the most of the device functions; of gfx942 scratch memory.
        seconds: for lowering and assembling.
        error: what failed, else None.
    """

    kernel: str
    arch: str
    registers: int = 0
    spilled: int = 0
    seconds: float = 0.0
    error: str | None = None


def missing(arch: str) -> str | None:
    """What assembling for an architecture needs and is not installed here; None if all of it is."""
    if find_spec("tilelang") is None:
        return "needs tilelang"
    if arch.startswith("gfx"):
        from tests.tools import hip

        return hip.REASON if hip.MISSING else None
    from tests.tools import lowering

    return None if lowering.find_nvcc() else "needs nvcc"


def assemble(job: KernelJob) -> Assembled:
    """Lowers and assembles one kernel."""
    start = time.perf_counter()
    try:
        with tempfile.TemporaryDirectory() as folder:
            registers, spilled = _usage(job, Path(folder))
    except Exception as failure:  # one kernel that fails is a row of the table
        return Assembled(str(job), job.arch, error=f"{type(failure).__name__}: {failure}")
    return Assembled(str(job), job.arch, registers, spilled, round(time.perf_counter() - start, 1))


def assemble_all(jobs: Sequence[KernelJob], processes: int) -> Iterator[Assembled]:
    """The same of many, in their order, in processes of their own."""
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(assemble, jobs)


def table(found: Iterable[Assembled]) -> str:
    """A table in Markdown, and a summary of each architecture above it."""
    rows = list(found)
    lines = ["| architecture | kernels | failed | with spills | most spilled, bytes |", "|---|---|---|---|---|"]
    for arch in dict.fromkeys(row.arch for row in rows):
        of = [row for row in rows if row.arch == arch]
        failed, spilling = (sum(map(bool, values)) for values in zip(*((row.error, row.spilled) for row in of)))
        lines.append(f"| {arch} | {len(of)} | {failed} | {spilling} | {max(row.spilled for row in of)} |")
    lines += ["", "| architecture | kernel | registers | spilled, bytes |", "|---|---|---|---|"]
    for row in rows:
        kernel = row.kernel.replace("|", "\\|")
        figures = f"{row.registers} | {row.spilled}" if row.error is None else "failed | "
        lines.append(f"| {row.arch} | {kernel} | {figures} |")
    return "\n".join(lines) + "\n"


def _usage(job: KernelJob, folder: Path) -> tuple[int, int]:
    from tileattn.kernels.tilelang.build.compile import device_source

    source = device_source(job.function(), job.arch)
    if job.arch.startswith("gfx"):
        from tests.tools import hip

        usage = hip.compile_hip(source, folder)
        return usage.vgprs + usage.agprs, usage.scratch
    from tests.tools import lowering

    nvcc = lowering.find_nvcc()
    if nvcc is None:
        raise RuntimeError("there is no nvcc")
    report = lowering.assemble(nvcc, source, job.arch, folder)
    registers = lowering.numbers(r"Used (\d+) registers", report)
    spilled = lowering.numbers(r"(\d+) bytes spill stores", report)
    return max(registers), max(spilled)


@app.command(help=__doc__)
def main(
    arch: Annotated[list[str] | None, typer.Option(help="One or more; default: all.")] = None,
    out: Annotated[Path, typer.Option(help="The JSON file; the table is beside it.")] = Path("sample.json"),
    limit: Annotated[int | None, typer.Option(min=1, help="Only so many kernels of each architecture.")] = None,
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, help="Kernels at a time.")] = 2,
) -> None:
    lacking = {each: reason for each in arch or ARCHS if (reason := missing(each))}
    for each, reason in lacking.items():
        typer.echo(f"{each} is left out: {reason}", err=True)
    wanted = [job for each in arch or ARCHS if each not in lacking for job in presets.named("sample", each)[:limit]]
    found = []
    for row in assemble_all(wanted, jobs):
        found.append(row)
        typer.echo(f"{row.arch} {row.kernel}: {row.error or f'{row.registers} registers, {row.spilled} bytes spilled'}")
    out.write_text(json.dumps([asdict(row) for row in found], indent=1) + "\n")
    out.with_suffix(".md").write_text(table(found))
    raise typer.Exit(bool(lacking) or any(row.error for row in found))


if __name__ == "__main__":
    app()
