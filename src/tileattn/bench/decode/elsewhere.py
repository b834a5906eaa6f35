"""The other end of worker.py: starts the process of the baselines, asks it for rows, and starts it anew if it dies."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

import tileattn
from tileattn.bench.decode.cases import Case
from tileattn.bench.decode.ceilings import Ceiling
from tileattn.bench.decode.flashinfer import site
from tileattn.bench.decode.methods import Method
from tileattn.bench.decode.rows import FAILED, Measured, Missing, Row

MODULE = "tileattn.bench.decode.worker"
ENDED = "the process of the baselines "  # how the reason begins of what ended with the process
MOST_ENDS = 6  # after so many ends of the process its methods are not tried again


@dataclass(frozen=True)
class Patience:
    """Seconds after which the process counts as hung, and is killed.

    ready: from its start until its kernels are built: FlashInfer compiles with nvcc where it has no modules.
    row: for a row.
    """

    ready: float = 1800.0
    row: float = 40.0


class ProcessEnded(Exception):
    """The process of the baselines ended, or was killed, instead of answering."""


class Elsewhere:
    """The process of the baselines, as a context manager; it starts with the first request."""

    def __init__(self, device: torch.device, dtype: torch.dtype, rounds: int, patience: Patience | None = None) -> None:
        self._start = {"device": str(device), "dtype": str(dtype).removeprefix("torch."), "rounds": rounds}
        self._patience = patience or Patience()
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._ends = 0
        self._given_up: str | None = None  # why the process is not started again
        self._unread: list[str] = []  # the keys of answers that are to come before the next request's
        self._deadline = 0.0  # for those
        self.versions: dict[str, str] = {}

    def __enter__(self) -> Elsewhere:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._kill()

    def begin(self, cases: Sequence[Case], methods: Sequence[Method]) -> None:
        """Starts the process, and has it build the kernels of these rows; does not wait for it."""
        with contextlib.suppress(ProcessEnded):
            self._run()
            self._send({"build": [asdict(case) for case in cases], "methods": [method.name for method in methods]})
            self._unread.append("built")

    def wait(self) -> None:
        """Waits until the kernels are built. If the process ends at that, the first row starts it again."""
        with contextlib.suppress(ProcessEnded):
            self._settle()

    def ceilings(self, when: str) -> Ceiling:
        """The ceilings as the process measures them. Raises `ProcessEnded` if it dies."""
        return Ceiling(**self._ask({"ceilings": when}))

    def measure(self, case: Case, methods: Sequence[Method]) -> Measured:
        """What the process measures of a row; if it dies, each method alone; if it dies again, a failure."""
        try:
            return self._measure(case, methods, self._patience.row)
        except ProcessEnded as error:
            together = _failed(case, methods, error)
        if len(methods) < 2 or self._given_up is not None:
            return together
        found = Measured(failures=together.failures)
        for method in methods:  # which of them it was, new processes show
            try:
                alone = self._measure(case, [method], self._patience.row / 2)
            except ProcessEnded as error:
                alone = _failed(case, [method], error)
            found.rows += alone.rows
            found.missing += alone.missing
            found.failures += alone.failures
        return found

    def _measure(self, case: Case, methods: Sequence[Method], seconds: float) -> Measured:
        answer = self._ask({"case": asdict(case), "methods": [method.name for method in methods]}, seconds)
        rows = [Row(**each) for each in answer["rows"]]
        missing = [Missing(**each) for each in answer["missing"]]
        return Measured(rows, missing, answer["failures"])

    def _ask(self, request: dict[str, Any], seconds: float | None = None) -> dict[str, Any]:
        self._run()
        self._settle()
        self._send(request)
        return self._receive(time.monotonic() + (seconds or self._patience.row))

    def _run(self) -> None:
        """Starts the process if there is none. Raises `ProcessEnded` if it has ended too often."""
        if self._process is not None and self._process.poll() is not None:  # it ended after its last answer
            self._process = None
        if self._process is not None:
            return
        if self._given_up is not None:
            raise ProcessEnded(self._given_up)
        process = subprocess.Popen(
            [sys.executable, "-m", MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": search_path()},
            text=True,
            start_new_session=True,  # Ctrl-C is for this process; and its compilers end with it
        )
        self._process, self._lines, self._unread = process, queue.SimpleQueue(), ["versions"]
        threading.Thread(target=_read, args=(process, self._lines), daemon=True).start()
        self._deadline = time.monotonic() + self._patience.ready
        self._send(self._start)

    def _settle(self) -> None:
        """Reads the answers about the start."""
        while self._unread:
            try:
                answer = self._receive(self._deadline)
            except ProcessEnded as error:
                if self._unread[0] == "versions":  # it would end at its start again
                    self._given_up = str(error)
                raise
            if self._unread.pop(0) == "versions":
                self.versions = answer["versions"]

    def _send(self, request: dict[str, Any]) -> None:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended: `_receive` says so
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()

    def _receive(self, deadline: float) -> dict[str, Any]:
        process = self._process
        assert process is not None
        try:
            line = self._lines.get(timeout=max(deadline - time.monotonic(), 0.01))
        except queue.Empty:
            raise self._ended("was killed: it did not answer in time") from None
        if not line:
            raise self._ended(f"ended with exit code {process.wait()}")
        try:
            answer: dict[str, Any] = json.loads(line)
        except ValueError:
            raise self._ended(f"was killed: its answer is not JSON: {line[:80]!r}") from None
        return answer

    def _ended(self, how: str) -> ProcessEnded:
        """Makes an end known, and the next request start the process anew."""
        self._kill()
        self._ends += 1
        what = f"{ENDED}{how}"
        if self._ends == MOST_ENDS:
            self._given_up = f"not tried: {what}, the last of {MOST_ENDS} ends"
        return ProcessEnded(what)

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError, ValueError):
                    pipe.close() if pipe is not None else None


def _failed(case: Case, methods: Sequence[Method], error: ProcessEnded) -> Measured:
    return Measured([], [Missing(case.name, method.name, FAILED, str(error)) for method in methods], [str(error)])


def _read(process: subprocess.Popen[str], lines: queue.SimpleQueue[str]) -> None:
    """Passes on the lines that a process writes, then an empty one."""
    assert process.stdout is not None
    with contextlib.suppress(OSError, ValueError):  # closed by `_kill`
        for line in process.stdout:
            lines.put(line)
    lines.put("")


def search_path() -> str:
    """PYTHONPATH of the process: the baselines' site before all else, then what this process has, and tileattn."""
    own = Path(tileattn.__file__).parents[1]
    paths = [site(), os.environ.get("PYTHONPATH"), own]
    return os.pathsep.join(str(path) for path in paths if path)
