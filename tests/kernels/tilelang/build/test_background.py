"""Kernels that a child process compiles in the background: found, waited for, and gone with its parent."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tools import slow_jobs
from tests.tools.lowering import find_nvcc
from tests.tools.slow_jobs import FOREVER_S, SlowJob, begun, child, compiled_by, end_child, jobs, program, until
from tileattn.call.facts import AttentionCall
from tileattn.kernels.cache.store import kernel_cache
from tileattn.kernels.tilelang.backward.library import BackwardJob
from tileattn.kernels.tilelang.behind import behind_forward, expected
from tileattn.kernels.tilelang.build import background, batch, library
from tileattn.kernels.tilelang.build.job import KernelJob
from tileattn.kernels.tilelang.forward.defaults import default
from tileattn.kernels.tilelang.forward.library import Job

COMPILERS_PATIENCE_S = 500.0

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="looks at processes in /proc"),
    pytest.mark.skipif(importlib.util.find_spec("tilelang") is None, reason="it is off without TileLang"),
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    yield from slow_jobs.without_child(tmp_path, monkeypatch)


# --- What the child compiles ---


def test_a_call_finds_what_the_child_compiled(tmp_path: Path) -> None:
    (job,) = jobs(tmp_path, 0)
    background.start([job])
    until(lambda: compiled_by(job) is not None, "the child compiled a kernel")
    assert compiled_by(job) == child()
    job.compile()
    assert begun(job) == [child()]


@pytest.mark.slow(reason="a process that imports PyTorch, 4 s")
def test_a_call_waits_for_what_the_child_compiles(tmp_path: Path) -> None:
    (job,) = jobs(tmp_path, 1)
    background.start([job])
    until(lambda: begun(job), "the child began")
    assert compiled_by(job) is None
    job.compile()
    assert compiled_by(job) == child()
    assert begun(job) == [child()]


def test_a_call_compiles_what_the_child_has_not_begun(tmp_path: Path) -> None:
    first, second = jobs(tmp_path, FOREVER_S, 0)
    background.start([first, second])
    until(lambda: begun(first), "the child began")
    second.compile()
    assert compiled_by(second) == os.getpid()
    assert begun(first) == [child()]


@pytest.mark.slow(reason="processes that import PyTorch, 9 s")
def test_the_child_leaves_out_what_a_call_compiles(tmp_path: Path) -> None:
    first, second, third = jobs(tmp_path, 1, FOREVER_S, 0)
    call = subprocess.Popen([sys.executable, "-c", program(f"SlowJob(1, {str(tmp_path)!r}, {FOREVER_S}).compile()")])
    try:
        until(lambda: begun(second), "the other process began")
        background.start([first, second, third])
        until(lambda: compiled_by(third) is not None, "the child compiled the third kernel")
        assert compiled_by(first) == compiled_by(third) == child()
        assert begun(second) == [call.pid]
    finally:
        call.kill()
        call.wait()


def test_an_error_is_raised_by_the_call_that_needs_the_kernel(tmp_path: Path) -> None:
    bad, good = jobs(tmp_path, 0, 0)
    (tmp_path / "0.fails").touch()
    background.start([bad, good])
    until(lambda: compiled_by(good) is not None, "the child went on behind the error")
    with pytest.raises(RuntimeError, match=f"^kernel 0 cannot be compiled by process {os.getpid()}$"):
        bad.compile()
    assert begun(bad) == [child(), os.getpid()]


@pytest.mark.slow(reason="two processes that import PyTorch, 5 s")
def test_a_child_that_was_killed_is_replaced(tmp_path: Path) -> None:
    first, second = jobs(tmp_path, FOREVER_S, 0)
    background.start([first])
    until(lambda: begun(first), "the child began")
    before = child()
    os.kill(before, signal.SIGKILL)
    until(lambda: background._child is not None and not background._child.is_alive(), "the child was killed")
    background.start([second])
    until(lambda: compiled_by(second) is not None, "another child compiled")
    assert compiled_by(second) == child()
    assert child() != before


def test_several_starts_use_one_child_and_each_kernel_once(tmp_path: Path) -> None:
    first, second, third = jobs(tmp_path, 0, 0, 0)
    background.start([first, second])
    one = child()
    background.start([second, first])
    background.start([second, third])
    until(lambda: compiled_by(third) is not None, "the child compiled all")
    assert [compiled_by(each) for each in (first, second, third)] == [one] * 3
    assert [begun(each) for each in (first, second, third)] == [[one]] * 3


def test_what_is_in_the_cache_starts_no_child(tmp_path: Path) -> None:
    (job,) = jobs(tmp_path, 0)
    job.compile()
    background.start([job])
    assert background._child is None


def test_what_a_bundle_has_starts_no_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library.installed, "find", lambda facts, modules, arch: Path("kernel.so"))
    background.start(jobs(tmp_path, 0))
    assert background._child is None


# --- When a kernel is compiled ---


def test_a_kernel_that_is_compiled_starts_those_behind_it(tmp_path: Path) -> None:
    first, second, third = jobs(tmp_path, 0, 0, 0)
    with background.behind(lambda: [first, second]), background.behind(lambda: [third]):
        assert background._child is None
        first.compile()
    until(lambda: compiled_by(second) is not None, "the child compiled")
    assert compiled_by(first) == os.getpid()
    assert compiled_by(second) == compiled_by(third) == child()  # in this order: the innermost's first
    assert (begun_at(third), begun_at(second)) == tuple(sorted((begun_at(third), begun_at(second))))
    assert begun(first) == [os.getpid()]


def begun_at(job: SlowJob) -> int:
    return (Path(job.log) / f"{job.number}.begun").stat().st_mtime_ns


def test_a_kernel_that_is_there_does_not_ask_for_those_behind_it(tmp_path: Path) -> None:
    (job,) = jobs(tmp_path, 0)
    job.compile()
    with background.behind(lambda: pytest.fail("asks")):
        job.compile()


def test_outside_nothing_is_behind(tmp_path: Path) -> None:
    first, second = jobs(tmp_path, 0, 0)
    with background.behind(lambda: [second]):
        pass
    first.compile()
    assert background._child is None


def test_an_error_of_those_behind_leaves_the_call_alone(tmp_path: Path) -> None:
    def refuse() -> Any:
        raise NotImplementedError("no tile fits")

    (job,) = jobs(tmp_path, 0)
    with background.behind(refuse):
        job.compile()
    assert compiled_by(job) == os.getpid()


def test_a_process_that_cannot_be_started_leaves_the_call_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = jobs(tmp_path, 0, 0)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-python"))
    with background.behind(lambda: [second]):
        first.compile()
    assert compiled_by(first) == os.getpid()
    with pytest.raises(FileNotFoundError, match="no-python"):
        background.start([second])


def test_a_call_meets_the_child_from_the_other_end(tmp_path: Path) -> None:
    longest, middle, short = jobs(tmp_path, FOREVER_S, 0, 0)
    assert background.taken([longest, middle, short]) == [longest, short, middle]
    background.start([longest])
    assert background.taken([longest, middle, short]) == [short, middle, longest]
    end_child()
    assert background.taken([longest]) == [longest]


def test_a_full_pipe_ends_the_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads nothing while it imports torch."""
    monkeypatch.setattr(SlowJob, "__str__", lambda job: f"{job.number}")
    background.start(SlowJob(number, "x" * 10000) for number in range(20))
    assert background._child is None


# --- Where it is off ---


def test_off_by_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert background.is_on()
    monkeypatch.setenv(background.VARIABLE, "0")
    first, second = jobs(tmp_path, 0, 0)
    with background.behind(lambda: [second]):
        first.compile()
    background.start([second])
    assert background._child is None
    monkeypatch.setenv(background.VARIABLE, "1")
    assert background.is_on()


def test_another_value_of_the_variable_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(background.VARIABLE, "off")
    first, second = jobs(tmp_path, 0, 0)
    message = r"^TILEATTN_BACKGROUND must be 0 \(nothing is compiled in the background\) or 1, got 'off'$"
    with background.behind(lambda: [second]), pytest.raises(ValueError, match=message):
        first.compile()
    first.compile()  # nothing would be compiled behind it


def test_off_while_a_graph_is_captured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    background.start(jobs(tmp_path, 0))
    assert background._child is None
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert background.is_on()


OFF = {
    "without TileLang": (background, "tilelang_libraries", lambda: None),
    "on one core": (batch, "CORES", 1),
    "in child processes": (background.multiprocessing, "parent_process", lambda: object()),
    "while the interpreter ends": (background.sys, "is_finalizing", lambda: True),
    "behind the end": (background, "_has_ended", True),
}


@pytest.mark.parametrize("case", OFF)
def test_off(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*OFF[case])
    background.start(jobs(tmp_path, 0))
    assert background._child is None


# --- Real kernels ---


@pytest.mark.slow  # compiles the kernels of both passes, in a minute or more
@pytest.mark.skipif(find_nvcc() is None, reason="there is no nvcc (pip install 'tileattn[cuda]')")
def test_the_child_compiles_the_backward_kernels_behind_the_forward_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    call = AttentionCall(torch.bfloat16, 64, 64, "Causal()", arch="sm_90a", needs_grad=True)
    shape = torch.Size((1, 512, 2, 64))
    compiled: list[KernelJob] = []
    compiling = background.compiling
    monkeypatch.setattr(background, "compiling", lambda job: compiling(compiled.append(job) or job))
    own = Job(dataclasses.replace(call, needs_grad=False), default(call))
    others = [*behind_forward(own.call, expected(call, 0.125), False, False, shape, shape)]
    with background.behind(lambda: others):
        own.compile()
    worker = child()
    until(lambda: all(job.is_there() for job in others), "the child compiled all", COMPILERS_PATIENCE_S)
    for job in others:
        assert kernel_cache().find(job.key) is not None
        job.compile()
    assert compiled == [own]
    assert child() == worker
    assert [job.kernel for job in others if isinstance(job, BackwardJob)] == ["main", "finish", "prepare"]
