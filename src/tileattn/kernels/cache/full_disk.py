"""A disk that is full while a kernel is compiled: one error that says where, how much is needed, and what to set."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT)
# What the compilers that run as programs of their own print.
TEXTS = ("No space left on device", "Disk quota exceeded", *map(os.strerror, FULL))
# Of one kernel, with room to spare: while it is compiled, in the system's folder for temporary files (5.3 MiB were seen
# at head dim 256), and of what is kept (0.1 MiB).
COMPILING_BYTES, KEPT_BYTES = 16 * 2**20, 2**20


class FullDiskError(OSError):
    """There is no space left for a kernel."""


@contextlib.contextmanager
def explained(folder: Path, variable: str) -> Iterator[None]:
    """Inside, an error that a full disk has caused becomes a :class:`FullDiskError`.

    Args:
        folder: where the compiled kernel is to be kept.
        variable: the environment variable that names another.
    """
    try:
        yield
    except FullDiskError:
        raise
    except Exception as error:
        if not _is_full(error):
            raise
        temporary = Path(tempfile.gettempdir())
        raise FullDiskError(
            errno.ENOSPC,
            f"no space is left to compile a kernel: {_mib(KEPT_BYTES)} are needed in {folder}, which has "
            f"{_free(folder)}, and {_mib(COMPILING_BYTES)} for a while in {temporary}, which has {_free(temporary)}; "
            f"make room, or set {variable} (for the first) or TMPDIR (for the second) to a folder that has it "
            f"({type(error).__name__}: {error})",
        ) from error


def _is_full(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno in FULL:
        return True
    return any(text in str(error) for text in TEXTS)


def _free(folder: Path) -> str:
    """Of the folder or, before it is made, of the one above."""
    for each in (folder, *folder.parents):
        with contextlib.suppress(OSError):
            return _mib(shutil.disk_usage(each).free)
    return "an unknown rest"


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"
