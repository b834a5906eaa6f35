"""The child process that compiles in the background ends with its parent, in whatever way that ends."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tools import slow_jobs
from tests.tools.lowering import find_nvcc
from tests.tools.slow_jobs import (
    FOREVER_S,
    PATIENCE_S,
    begun,
    child,
    compiled_by,
    is_running,
    jobs,
    program,
    until,
)
from tileattn.kernels.tilelang.build import background

COMPILERS_PATIENCE_S = 500.0

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="looks at processes in /proc"),
    pytest.mark.skipif(importlib.util.find_spec("tilelang") is None, reason="it is off without TileLang"),
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    yield from slow_jobs.without_child(tmp_path, monkeypatch)


def started(folder: Path, then: str, **options: Any) -> tuple[subprocess.Popen[str], int]:
    """A process whose child compiles for ever, and what it does then; and its child."""
    code = f"""
job = SlowJob(0, {str(folder)!r}, {FOREVER_S})
background.start([job])
until(lambda: begun(job), "the child began")
print(background._child.process.pid, flush=True)
"""
    parent = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", program(code + textwrap.dedent(then))],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )
    assert parent.stdout is not None
    line = parent.stdout.readline()
    assert line, parent.communicate()[1]
    return parent, int(line)


WAYS = {
    "the end of the program": ("", 0, ""),
    "an exception": ("raise KeyError('mine')", 1, "KeyError: 'mine'"),
    "sys.exit": ("sys.exit(3)", 3, ""),
    "os._exit": ("os._exit(4)", 4, ""),
    "kill -9": ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ""),
    "SIGTERM": ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, ""),
}


SLOW_WAYS = ("an exception", "sys.exit", "os._exit", "SIGTERM")  # two processes each; the others find the same


@pytest.mark.slow_cases("the end of the program", reason="two processes that import PyTorch, 9 s")
@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=pytest.mark.slow) if way in SLOW_WAYS else way for way in WAYS]
)
def test_the_end_neither_waits_for_the_child_nor_leaves_it_behind(way: str, tmp_path: Path) -> None:
    """The kernel would take ten minutes."""
    then, status, error = WAYS[way]
    parent, worker = started(tmp_path, then)
    _, errors = parent.communicate(timeout=PATIENCE_S)
    assert parent.returncode == status
    assert errors.strip().endswith(error)
    assert error or not errors
    until(lambda: not is_running(worker), "the child ended")


@pytest.mark.slow(reason="processes that import PyTorch, 8 s")
def test_a_process_that_the_parent_forked_does_not_keep_the_child(tmp_path: Path) -> None:
    """It holds the other end of the child's stdin open."""
    then = f"""
    if os.fork() == 0:
        time.sleep({FOREVER_S})
    print("forked", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
    """
    parent, worker = started(tmp_path, then, start_new_session=True)
    try:
        parent.wait(PATIENCE_S)
        until(lambda: not is_running(worker), "the child ended")
        os.killpg(parent.pid, 0)  # the forked process is still there
    finally:
        os.killpg(parent.pid, signal.SIGKILL)
        parent.communicate()


@pytest.mark.slow(reason="processes that import PyTorch, 10 s")
def test_a_forked_process_neither_uses_nor_ends_the_child(tmp_path: Path) -> None:
    then = f"""
    forked = os.fork()
    if forked == 0:
        assert background._child is None
        sys.exit(5)  # by way of what is registered with atexit
    assert os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]) == 5
    other = SlowJob(1, {str(tmp_path)!r})
    background.start([other])
    time.sleep(1)
    print(background._child.is_alive(), background._child.process.pid, other.key in background._child.handed)
    """
    parent, worker = started(tmp_path, then)
    output, errors = parent.communicate(timeout=PATIENCE_S)
    assert (output.split(), errors) == (["True", str(worker), "True"], "")
    until(lambda: not is_running(worker), "the child ended")


@pytest.mark.slow(reason="processes that import PyTorch, 8 s")
def test_ctrl_c_does_not_reach_the_child(tmp_path: Path) -> None:
    # A shell that runs the tests in the background makes its children ignore Ctrl-C.
    then = """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    print("sleeps", flush=True)
    try:
        time.sleep(600)
    except KeyboardInterrupt:
        time.sleep(1)
        print(background._child.is_alive(), flush=True)
        raise
    """
    parent, worker = started(tmp_path, then, start_new_session=True)
    assert parent.stdout is not None
    assert parent.stdout.readline().strip() == "sleeps"
    os.killpg(parent.pid, signal.SIGINT)
    output, errors = parent.communicate(timeout=PATIENCE_S)
    assert output.strip() == "True"
    assert errors.strip().endswith("KeyboardInterrupt")
    until(lambda: not is_running(worker), "the child ended")


def test_the_child_ends_when_it_has_nothing_to_do(tmp_path: Path) -> None:
    """In a process whose children wait for a shorter time."""
    code = f"""
    from tileattn.kernels.tilelang.build import worker
    worker.IDLE_S = 0.1
    worker.main({os.getpid()})
    """
    worker = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdin=subprocess.PIPE, start_new_session=True
    )
    assert worker.wait(PATIENCE_S) == -signal.SIGKILL
    assert worker.stdin is not None
    worker.stdin.close()


def test_the_child_outlives_the_thread_that_started_it(tmp_path: Path) -> None:
    """Linux sends the signal of a parent's death for each thread."""
    first, second = jobs(tmp_path, 2, 0)
    thread = threading.Thread(target=lambda: (background.start([first, second]), until(lambda: begun(first), "begun")))
    thread.start()
    thread.join()
    until(lambda: compiled_by(second) is not None, "the child went on")
    assert compiled_by(first) == compiled_by(second) == child()


@pytest.mark.slow  # imports TileLang and starts its compilers
@pytest.mark.skipif(find_nvcc() is None, reason="there is no nvcc (pip install 'tileattn[cuda]')")
def test_a_child_that_compiles_a_real_kernel_ends_with_its_parent(tmp_path: Path, cache: Path) -> None:
    """It is killed while TileLang or nvcc runs, and leaves no files in the folder for temporary files."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    code = """
    from tileattn.kernels.tilelang.packed.library import PlanJob
    background.start([PlanJob("sm_90a")])
    print(background._child.process.pid, flush=True)
    time.sleep(600)
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", program(code)],
        stdout=subprocess.PIPE,
        text=True,
        env=dict(os.environ, TMPDIR=str(scratch)),
    )
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    until(lambda: list(cache.glob(".build-*")), "the child began to compile", COMPILERS_PATIENCE_S)
    parent.kill()
    parent.communicate()
    until(lambda: not is_running(worker), "the child ended")
    assert not list(scratch.iterdir())
    assert not list(cache.glob("*.so"))
