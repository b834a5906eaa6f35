"""The child process that compiles in the background (background.py): kernels from stdin, one a line, in that order.

It ends when it has had nothing to do for `IDLE_S` seconds, and when its parent ends: then stdin is closed, and Linux
sends a signal. A process that the parent forked may hold stdin open, and so the parent's number is looked at as well.
The compilers that it started end with it, and what they wrote in the folder for temporary files is removed.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import queue
import select
import shutil
import signal
import sys
import tempfile
import threading
from typing import Any, NoReturn

from ...cache.store import kernel_cache
from . import text

IDLE_S = 20.0  # a parent that needs more then starts another one, which takes some 4 s to import TileLang
LOOK_EVERY_S = 1.0
NICE = 5
PR_SET_PDEATHSIG = 1

Lines = queue.SimpleQueue[bytes]


def main(parent: int) -> NoReturn:
    """Compiles what is read, until it is time to end.

    parent: the process that started this one.
    """
    with contextlib.suppress(OSError):
        os.nice(NICE)
    scratch = tempfile.mkdtemp(prefix="tileattn-background-")
    tempfile.tempdir = os.environ["TMPDIR"] = scratch
    _end_with(parent, scratch)
    lines: Lines = queue.SimpleQueue()
    threading.Thread(target=_read, args=(parent, scratch, lines), daemon=True).start()
    while True:
        try:
            line = lines.get(timeout=IDLE_S)
        except queue.Empty:
            _end(scratch)
        with contextlib.suppress(Exception):  # the call that needs the kernel compiles it and raises its own error
            _compile(line)


def _compile(line: bytes) -> None:
    """Compiles a kernel unless another process does."""
    found = json.loads(line)
    text.import_modules(found["modules"])
    job = text.decode(found["job"])
    if not kernel_cache().is_being_built(job.key):
        job.compile()


def _end_with(parent: int, scratch: str) -> None:
    """Makes this process end on SIGTERM, and when its parent does."""

    def end(*_: Any) -> None:
        _end(scratch)

    def look(*_: Any) -> None:  # Linux sends this signal also when the thread ends that started this process
        if os.getppid() != parent:
            _end(scratch)

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGUSR1, look)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGUSR1)
    look()  # it may have ended before


def _read(parent: int, scratch: str, lines: Lines) -> None:
    """Reads lines, in a thread of its own, which runs while TileLang and nvcc compile."""
    pending = b""
    while os.getppid() == parent:
        ready, _, _ = select.select([0], [], [], LOOK_EVERY_S)
        if not ready:
            continue
        read = os.read(0, 2**16)
        if not read:
            break
        *whole, pending = (pending + read).split(b"\n")
        for line in whole:
            lines.put(line)
    _end(scratch)


def _end(scratch: str) -> NoReturn:
    """Ends this process and its compilers, which are in its process group, at once."""
    shutil.rmtree(scratch, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)
    os._exit(1)
