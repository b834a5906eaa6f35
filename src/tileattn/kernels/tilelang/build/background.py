"""Kernels compiled in a child process, behind the one that a call compiles itself.

A call says which kernels will be needed next (:func:`behind`). When it has to compile a kernel, a child process with a
low priority compiles the others meanwhile, into the same cache and under the same locks. A call that needs one of them
finds it, waits for it, or compiles it itself where the child has not begun or has failed. So no error of the child is
shown: it comes up again at the call that needs the kernel.

The child has a session of its own, so that Ctrl-C does not reach it. It ends when this process ends, in whatever way
(worker.py), and nothing waits for it. docs/design/first-call.md has the reasons.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, TypeVar

import torch

from ...bundles.runtime import tilelang_libraries
from . import text

if TYPE_CHECKING:
    from .job import KernelJob

VARIABLE = "TILEATTN_BACKGROUND"
WORKER = f"{__package__}.worker"

Job = TypeVar("Job", bound="KernelJob")


class _Child:
    """A child process.

    Attributes:
        handed: the keys of the kernels that it was sent.
    """

    def __init__(self) -> None:
        # Its modules are found where this process finds them; its current folder has no say. It sees no GPU, where it
        # would take memory, and its kernels are none that the program asked for (`tileattn record`).
        path = [each for each in sys.path if isinstance(each, str)]
        code = f"import sys; sys.path[:] = {path!r}; from {WORKER} import main; main({os.getpid()})"
        environment = dict(os.environ, CUDA_VISIBLE_DEVICES="", HIP_VISIBLE_DEVICES="") | {VARIABLE: "0"}
        environment.pop("TILEATTN_RECORD", None)
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env=environment,
        )
        assert self.process.stdin is not None
        self.pipe = self.process.stdin.fileno()
        os.set_blocking(self.pipe, False)
        self.handed: set[str] = set()

    def is_alive(self) -> bool:
        return self.process.poll() is None

    def send(self, job: KernelJob) -> None:
        """Hands a kernel over. Raises OSError where the child has ended or its pipe is full."""
        line = json.dumps({"job": text.encode(job), "modules": text.modules_of(str(job))}).encode() + b"\n"
        if os.write(self.pipe, line) < len(line):
            raise BlockingIOError("the pipe is full")
        self.handed.add(job.key)

    def end(self) -> None:
        """Ends the child and its compilers, without waiting."""
        if self.is_alive():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGTERM)
        self.forget()

    def forget(self) -> None:
        """Leaves the child to itself. Python would warn of an object whose process was not waited for."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        self.process.returncode = self.process.returncode or 0


_lock = threading.Lock()
_child: _Child | None = None
_has_ended = False  # the interpreter is shutting down
_wanted: ContextVar[tuple[Callable[[], Iterable[KernelJob]], ...]] = ContextVar("wanted", default=())


@contextlib.contextmanager
def behind(jobs: Callable[[], Iterable[KernelJob]]) -> Iterator[None]:
    """Inside, when a kernel has to be compiled, these are compiled behind it, the first one first.

    jobs: asked for only then.
    """
    token = _wanted.set((*_wanted.get(), jobs))
    try:
        yield
    finally:
        _wanted.reset(token)


def compiling(job: KernelJob) -> None:
    """Says that this process begins to compile a kernel. Those that are wanted behind it go to the child.

    Raises:
        ValueError: ``TILEATTN_BACKGROUND`` is neither 0 nor 1.
    """
    wanted = _wanted.get()
    if not wanted or not is_on():
        return
    # Whatever is wrong with one of the others is raised by the call that needs it, and this call needs none of them.
    with contextlib.suppress(Exception):
        start(each for jobs in reversed(wanted) for each in jobs() if each.key != job.key)


def start(jobs: Iterable[KernelJob]) -> None:
    """Compiles kernels in the child, in this order, those that neither a bundle nor the cache has. Does not wait.

    Raises:
        ValueError: as in :func:`compiling`.
        OSError: no process can be started.
    """
    global _child
    if not is_on():
        return
    with _lock:
        if _has_ended:
            return
        for job in jobs:
            child = _child if _child is not None and _child.is_alive() else None
            if (child is not None and job.key in child.handed) or job.is_there():
                continue
            if child is None:
                child = _child = _Child()
            try:
                child.send(job)
            except OSError:
                child.end()
                _child = None
                return


def taken(jobs: Sequence[Job]) -> list[Job]:
    """The order in which a call takes kernels that it needs together, the longest of which is the first.

    The call begins with the longest, unless the child had it before, and meets the child from the other end.
    """
    first, *others = jobs
    child = _child
    has_first = child is not None and child.is_alive() and first.key in child.handed
    return [*reversed(others), first] if has_first else [first, *reversed(others)]


def is_on() -> bool:
    """Whether kernels may be compiled in the background: where TileLang is installed, and two cores are there for it.

    Not in child processes, nor while a CUDA graph is captured, nor where ``TILEATTN_BACKGROUND=0`` is set.

    Raises:
        ValueError: as in :func:`compiling`.
    """
    from .batch import CORES  # not when tileattn is imported

    value = os.environ.get(VARIABLE, "1")
    if value not in ("0", "1"):
        raise ValueError(f"{VARIABLE} must be 0 (nothing is compiled in the background) or 1, got {value!r}")
    return bool(
        value == "1"
        and CORES > 1
        and not sys.is_finalizing()
        and multiprocessing.parent_process() is None
        and sys.executable
        and hasattr(os, "killpg")
        and tilelang_libraries() is not None
        and not _is_captured()
    )


def _is_captured() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _end() -> None:
    """Ends the child with this process."""
    global _child, _has_ended
    _has_ended = True
    if _child is not None:
        _child.end()
        _child = None


def _after_fork() -> None:
    """In a forked process: the child is the parent's."""
    global _child, _lock
    _lock = threading.Lock()
    if _child is not None:
        _child.forget()
        _child = None


atexit.register(_end)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
