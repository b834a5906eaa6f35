"""The other end of worker.py: starts the process of the baselines, asks it for rows, and starts it anew if it dies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
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


class ProcessEnded(Exception):
    """The process of the baselines ended instead of answering."""


class Elsewhere:
    """The process of the baselines, as a context manager; it starts with the first request."""

    def __init__(self, device: torch.device, dtype: torch.dtype, rounds: int) -> None:
        self._start = {"device": str(device), "dtype": str(dtype).removeprefix("torch."), "rounds": rounds}
        self._process: subprocess.Popen[str] | None = None
        self._never_started: ProcessEnded | None = None
        self.versions: dict[str, str] = {}

    def __enter__(self) -> Elsewhere:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def ceilings(self, when: str) -> Ceiling:
        """The ceilings as the process measures them. Raises `ProcessEnded` if it dies."""
        return Ceiling(**self._ask({"ceilings": when}))

    def measure(self, case: Case, methods: Sequence[Method]) -> Measured:
        """What the process measures of a row; if it dies, a failure of each method."""
        names = [method.name for method in methods]
        try:
            answer = self._ask({"case": asdict(case), "methods": names})
        except ProcessEnded as error:
            return Measured([], [Missing(case.name, name, FAILED, str(error)) for name in names], [str(error)])
        rows = [Row(**each) for each in answer["rows"]]
        missing = [Missing(**each) for each in answer["missing"]]
        return Measured(rows, missing, answer["failures"])

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        if self._never_started is not None:  # it would end at its start again
            raise self._never_started
        if self._process is None:
            environment = {**os.environ, "PYTHONPATH": search_path()}
            self._process = subprocess.Popen(
                [sys.executable, "-m", MODULE],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
                text=True,
            )
            try:
                self.versions = self._exchange(self._start)["versions"]
            except ProcessEnded as error:
                self._never_started = error
                raise
        return self._exchange(request)

    def _exchange(self, request: dict[str, Any]) -> dict[str, Any]:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self._process = None
            raise ProcessEnded(f"the process of the baselines ended with exit code {process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def search_path() -> str:
    """PYTHONPATH of the process: the baselines' site before all else, then what this process has, and tileattn."""
    own = Path(tileattn.__file__).parents[1]
    paths = [site(), os.environ.get("PYTHONPATH"), own]
    return os.pathsep.join(str(path) for path in paths if path)
