"""Notes which kernels an application asks for, so that a bundle can be made of them (``tileattn record``).

Where ``TILEATTN_RECORD`` names a file, each process appends a line of JSON for each kernel that it looks up. A kernel
that cannot be noted is a warning, once in a process: recording never stops the application.
"""

from __future__ import annotations

import functools
import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from . import text

if TYPE_CHECKING:
    from .job import KernelJob

VARIABLE = "TILEATTN_RECORD"
_warned: set[str] = set()  # files that were warned of


def note(job: KernelJob) -> None:
    """Appends a kernel to the file that ``TILEATTN_RECORD`` names, if it does; warns if that fails."""
    given = os.environ.get(VARIABLE)
    if not given:
        return
    path = _absolute(given)
    try:
        if of_main := text.of_main(str(job)):
            raise ValueError(f"{of_main[0]} is defined in the main script: move it into a module that can be imported")
        line = json.dumps({"job": text.encode(job), "modules": text.modules_of(str(job))}) + "\n"
        _append(path, line.encode())
    except (OSError, TypeError, ValueError) as error:
        if path not in _warned:
            _warned.add(path)
            warnings.warn(
                f"tileattn: kernels are missing in {path} ({VARIABLE}), the first is {job}: {error}", stacklevel=2
            )


@functools.cache
def _absolute(given: str) -> str:
    """The path at the first kernel, so that a program that changes its folder later still writes one file."""
    return os.path.abspath(given)


def _append(path: str, line: bytes) -> None:
    # One write to a file opened for appending: lines of several processes do not mix.
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, line)
    finally:
        os.close(descriptor)


def read(path: Path) -> Iterator[KernelJob]:
    """The kernels in a file, each once.

    Raises:
        ValueError: a line is no record of a kernel; the message names the line.
    """
    seen = set()
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip() or line in seen:
            continue
        seen.add(line)
        try:
            found = json.loads(line)
            text.import_modules(found["modules"])
            job = text.decode(found["job"])
            _ = job.name  # traces the variant, whose classes must be known here
        except Exception as error:  # importing and tracing run the application's code
            raise ValueError(
                f"{path}, line {number}, is no record of a kernel by `tileattn record` of this version "
                f"({type(error).__name__}: {error})"
            ) from error
        yield job
