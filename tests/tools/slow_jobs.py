"""Kernels that take as long to compile as a test says: the compiler waits, and then writes a file.

A child process that compiles in the background imports this module because the kernels name a mask of it, as it
imports a user's own masks.
"""

from __future__ import annotations

import contextlib
import os
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tileattn import Mask
from tileattn.kernels.cache.store import kernel_cache
from tileattn.kernels.tilelang.build import background, batch, job
from tileattn.kernels.tilelang.build.job import KernelJob, Name
from tileattn.variant.key import field_names

PATIENCE_S = 60.0  # the child imports torch, on a machine with other work
FOREVER_S = 600.0


@dataclass(frozen=True)
class SlowMask(Mask):
    """Only its name matters, which is known as if a call had encoded it."""


field_names(SlowMask)


@dataclass(frozen=True)
class SlowJob(KernelJob):
    """A kernel whose compiler notes its beginning in a folder, waits, and writes the number of its process.

    Attributes:
        log: the folder. `<number>.begun` gets a line with the process for each beginning; if there is a file
            `<number>.fails`, compiling raises RuntimeError after the wait.
    """

    number: int
    log: str
    seconds: float = 0.0
    arch: str = "sm_90a"

    @property
    def name(self) -> Name:
        return Name(f"slow | {self.number}", "packed.plan_kernel")

    def function(self) -> Any:
        raise AssertionError("it is no kernel of TileLang")

    def compile(self) -> None:
        kernel_cache().find_or_build(self.key, self._build)

    def _build(self, path: Path) -> None:
        background.compiling(self)
        with (Path(self.log) / f"{self.number}.begun").open("a") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(self.seconds)
        if (Path(self.log) / f"{self.number}.fails").exists():
            raise RuntimeError(f"kernel {self.number} cannot be compiled by process {os.getpid()}")
        path.write_text(str(os.getpid()))

    def __str__(self) -> str:
        return f"{SlowMask.__name__}() {self.number}"


# Kernels are decoded from classes of tileattn alone.
SlowJob.__module__ = job.__name__
job.SlowJob = SlowJob  # type: ignore[attr-defined]


def begun(of: SlowJob) -> list[int]:
    """The processes that have begun to compile a kernel."""
    path = Path(of.log) / f"{of.number}.begun"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def compiled_by(of: SlowJob) -> int | None:
    """The process that compiled a kernel; None while it is not in the cache."""
    path = kernel_cache().find(of.key)
    return None if path is None else int(path.read_text())


def is_running(process: int) -> bool:
    """Whether one of a process' threads exists and is no zombie."""
    states = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for thread in Path(f"/proc/{process}/task").iterdir():
            states.append((thread / "stat").read_text().rpartition(")")[2].split()[0])
    return any(state not in "ZX" for state in states)


def until(condition: Any, what: str, patience_s: float = PATIENCE_S) -> None:
    """Waits until a condition holds, or fails."""
    end = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < end, f"in {patience_s:.0f} s it did not happen that {what}"
        time.sleep(0.02)


def jobs(folder: Path, *seconds: float) -> list[SlowJob]:
    """Kernels that take so long to compile."""
    return [SlowJob(number, str(folder), each) for number, each in enumerate(seconds)]


def without_child(folder: Path, monkeypatch: Any) -> Iterator[Path]:
    """The fixture of a test: an empty cache, a machine with two cores, and no child before or after."""
    monkeypatch.setenv("TILEATTN_CACHE_DIR", str(folder / "cache"))
    monkeypatch.delenv(background.VARIABLE, raising=False)
    monkeypatch.setattr(batch, "CORES", 2)
    end_child()  # another test's
    yield folder / "cache"
    end_child()


def child() -> int:
    """The process of the child."""
    assert background._child is not None
    return background._child.process.pid


def end_child() -> None:
    """Ends the child if there is one."""
    if background._child is not None:
        background._child.end()
        background._child = None


def program(code: str) -> str:
    """A program with slow kernels. Whether this machine has two cores does not matter."""
    return f"""
import os, signal, sys, time
from tileattn.kernels.tilelang.build import background, batch
from tests.tools.lowering import find_nvcc
from tests.tools.slow_jobs import SlowJob, begun, until
batch.CORES = 2
{textwrap.dedent(code)}
"""
