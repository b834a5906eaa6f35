"""Notes which kernels an application asks for, so that a bundle can be made of them (``tileattn record``).

Where ``TILEATTN_RECORD`` names a file, each process appends a line of JSON for each kernel that it looks up.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from . import text

if TYPE_CHECKING:
    from .job import KernelJob

VARIABLE = "TILEATTN_RECORD"


def note(job: KernelJob) -> None:
    """Appends a kernel to the file that ``TILEATTN_RECORD`` names, if it does.

    Raises:
        OSError: the file cannot be written.
    """
    path = os.environ.get(VARIABLE)
    if not path:
        return
    line = json.dumps({"job": text.encode(job), "modules": text.modules_of(str(job))}) + "\n"
    # One write to a file opened for appending: lines of several processes do not mix.
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, line.encode())
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
            yield text.decode(found["job"])
        except (ValueError, TypeError, KeyError, AttributeError, ImportError) as error:
            raise ValueError(
                f"{path}, line {number}, is no record of a kernel by `tileattn record` of this version "
                f"({type(error).__name__}: {error})"
            ) from error
