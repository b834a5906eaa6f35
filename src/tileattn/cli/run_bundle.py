"""The commands `tileattn bundle` and `tileattn record`."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tileattn.bench import presets
from tileattn.call.facts import device_arch
from tileattn.cli.choices import refuse
from tileattn.installation import pip_install
from tileattn.kernels.bundles import lock as locks
from tileattn.kernels.bundles.manifest import identity
from tileattn.kernels.tilelang.architecture import ARCHITECTURES
from tileattn.kernels.tilelang.build import ahead
from tileattn.kernels.tilelang.build import record as records
from tileattn.kernels.tilelang.build.batch import CORES, AnyJob, Done, compile_all
from tileattn.kernels.tilelang.build.job import KernelJob
from tileattn.kernels.tilelang.build.library import version
from tileattn.kernels.tilelang.bundling import content, wheel
from tileattn.kernels.tilelang.bundling.generating import DoneWithSources, generate_job

NEEDED = {"tilelang": "TileLang, which compiles the kernels", "hatchling": "hatchling, which builds the wheel"}
console = Console()


def bundle(
    arch: str | None,
    preset: str,
    out: Path,
    processes: int | None,
    only_list: bool,
    lock: Path | None,
    sources: Path | None,
) -> int:
    """Compiles a preset and builds its wheel, lists it, or writes its lock or sources. Returns the exit status."""
    arch = _architecture(arch)
    jobs = _jobs(preset, arch)
    if only_list:
        for job in jobs:
            typer.echo(str(job))
        typer.echo(f"{len(jobs)} kernels")
        return 0
    for module, what in NEEDED.items():
        if importlib.util.find_spec(module) is None:
            raise refuse("bundle", f"{what}, is not installed ({pip_install('bundle')})")
    if sources is not None and lock is not None:
        raise refuse("--sources", "it cannot be given with --lock: a run writes one of them")
    if sources is not None:
        return _write_sources(jobs, arch, processes or CORES, sources)
    try:
        distribution = content.distribution_of(arch)
    except RuntimeError as error:  # no nvcc: each kernel would fail, after some seconds
        raise refuse("bundle", str(error)) from error
    todo = [job for job in jobs if content.cached(job) is None]
    if not _all_done(todo, processes or CORES, content.compile_job, "compiling"):
        return 1
    if lock is not None:
        return _write_lock(jobs, arch, preset, lock)
    with tempfile.TemporaryDirectory(prefix="tileattn-bundle-") as folder:
        name = preset if preset in presets.NAMES else Path(preset).stem
        path = wheel.build(Path(folder), lambda package: content.fill(package, jobs, arch, name), distribution, out)
    typer.echo(f"{path}: {len(jobs)} kernels, {path.stat().st_size / 2**20:.1f} MiB")
    return 0


def record(command: Sequence[str], output: Path) -> int:
    """Runs a program that notes its kernels. Returns the program's exit status."""
    output = output.absolute()
    if not output.parent.is_dir():
        raise refuse("--output", f"there is no folder {output.parent}")
    try:
        status = subprocess.run(
            list(command), env={**os.environ, records.VARIABLE: str(output)}, check=False
        ).returncode
    except OSError as error:
        raise refuse("COMMAND", f"{command[0]} cannot be run ({error})") from error
    try:
        count = len(list(records.read(output))) if output.is_file() else 0
        typer.echo(f"{output}: {count} kernels", err=True)
    except (ValueError, OSError) as error:  # the file had lines before
        typer.echo(str(error), err=True)
    return status


def _architecture(given: str | None) -> str:
    if given is None and not torch.cuda.is_available():
        raise refuse("--arch", "there is no GPU here to compile for; name an architecture, such as sm_90a")
    arch = given or device_arch(torch.device("cuda"))
    if arch not in ARCHITECTURES:
        raise refuse("--arch", f"{arch!r} is not known; accepted: {', '.join(ARCHITECTURES)}")
    return arch


def _jobs(preset: str, arch: str) -> list[KernelJob]:
    if preset in presets.NAMES:
        return presets.named(preset, arch)
    path = Path(preset)
    if not path.is_file():
        raise refuse("--preset", f"{preset!r} is neither a file nor one of {', '.join(presets.NAMES)}")
    try:
        found = list(records.read(path))
    except (ValueError, OSError) as error:
        raise refuse("--preset", str(error)) from error
    jobs = [job for job in found if job.arch == arch]
    if not jobs:
        others = ", ".join(sorted({job.arch for job in found})) or "none"
        raise refuse("--preset", f"{preset} has no kernel for {arch} (it has kernels for: {others})")
    return jobs


def _all_done(
    jobs: Sequence[KernelJob],
    processes: int,
    work: Callable[[AnyJob], Done],
    doing: str,
    take: Callable[[Done], None] = lambda done: None,
) -> bool:
    """Works on kernels in parallel, with a bar on a terminal. Prints the errors of those that fail."""
    failed = 0
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(doing, total=len(jobs))
        for done in compile_all(jobs, processes, work) if jobs else ():
            bar.advance(task)
            if done.error is None:
                take(done)
            else:
                failed += 1
                typer.echo(f"{done.job}: {done.error}", err=True)
    return failed == 0


def _write_sources(jobs: Sequence[KernelJob], arch: str, processes: int, path: Path) -> int:
    if arch.startswith("gfx"):
        raise refuse("--sources", f"sources are kept for NVIDIA's architectures, not for {arch}")
    found: dict[str, ahead.Generated] = {}

    def take(done: Done) -> None:
        assert isinstance(done, DoneWithSources)
        assert done.generated is not None
        found[identity(cast("KernelJob", done.job).name.facts)] = done.generated

    if not _all_done(jobs, processes, generate_job, "generating", take):
        return 1
    ahead.write(path, version("tilelang"), found)
    typer.echo(f"{path}: the sources of {len(found)} kernels, {path.stat().st_size / 2**10:.0f} KiB")
    return 0


def _write_lock(jobs: Sequence[KernelJob], arch: str, preset: str, path: Path) -> int:
    found = {}
    for job in jobs:
        kept = content.cached(job)
        assert kept is not None
        found[identity(job.name.facts)] = kept.source
    lock = locks.Lock(version("tilelang"), found)
    locks.write(path, lock, f"tileattn bundle --arch {arch} --preset {preset} --lock: {len(found)} kernels")
    typer.echo(f"{path}: {len(found)} digests")
    return 0
