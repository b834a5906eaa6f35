"""The line on a terminal while a kernel is compiled."""

from __future__ import annotations

import contextlib
import io
import os
import re
import select
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tileattn.kernels.tilelang.build import progress

PATIENCE_S = 60.0


@contextlib.contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Inside, stderr is a terminal; its other end, from which the test reads. (pytest undoes it in fixtures.)"""
    ours, theirs = os.openpty()
    with os.fdopen(theirs, "w") as stderr, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stderr)
        patch.setenv("TERM", "xterm")
        patch.setattr(progress, "AFTER_S", 0.0)
        patch.setattr(progress, "EVERY_S", 0.01)
        patch.setattr(progress, "_count", 4)
        yield ours
    os.close(ours)


def read_until(end: int, text: str) -> str:
    found = ""
    while text not in found:
        ready, _, _ = select.select([end], [], [], PATIENCE_S)
        assert ready, f"no {text!r} in {found!r}"
        found += os.read(end, 4096).decode()
    return found


def test_a_terminal_has_a_line_that_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch) as end:
        with progress.progress_line("forward of [x] " + "y" * 99):
            line = read_until(end, "forward of [x]")
        assert re.search(r"compiling kernel 5 of this process, \d+ s: forward", line)
        read_until(end, "\x1b[1A\x1b[2K")  # up by one line, and erase it


def test_an_error_ends_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(end: int) -> None:
        with progress.progress_line("forward"):
            read_until(end, "s: forward")
            raise RuntimeError("no compiler")

    with terminal(monkeypatch) as end, pytest.raises(RuntimeError, match="no compiler"):
        fails(end)
    assert progress._one_line.acquire(blocking=False)
    progress._one_line.release()


def test_one_line_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[Any] = []
    monkeypatch.setattr(progress, "_show", lambda what, ended: lines.append(what))
    with terminal(monkeypatch), progress.progress_line("first"), progress.progress_line("second"):
        pass
    assert lines == ["first"]


def test_without_another_thread_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """As at a limit of threads, or while the interpreter ends: the kernel is compiled all the same."""

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with terminal(monkeypatch):
        monkeypatch.setattr(threading.Thread, "start", start)
        with progress.progress_line("forward"):
            compiled = True
        assert compiled
    assert progress._one_line.acquire(blocking=False)
    progress._one_line.release()


@pytest.mark.parametrize("stderr", [io.StringIO(), None])
def test_without_a_terminal_there_is_none(stderr: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setattr(threading, "Thread", None)
    with progress.progress_line("forward"):
        pass
    assert stderr is None or stderr.getvalue() == ""


def test_child_processes_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress.multiprocessing, "parent_process", lambda: object())
    with terminal(monkeypatch):
        monkeypatch.setattr(threading, "Thread", None)
        with progress.progress_line("forward"):
            pass


def test_rich_is_not_imported_before_there_is_a_line() -> None:
    code = (
        "import sys\n"
        "from tileattn.kernels.tilelang.build.progress import progress_line\n"
        "with progress_line('forward'): pass\n"
        "assert 'rich' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stderr=subprocess.PIPE)
