"""The error for a full disk during compilation: it names the folder, the bytes needed and the variables to set."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT)
# Messages of compilers that run as subprocesses.
TEXTS = ("No space left on device", "Disk quota exceeded", *map(os.strerror, FULL))
# Upper estimates for one kernel: temporary files during compilation (5.3 MiB measured at head dim 256), and the file in
# the cache (0.1 MiB measured).
COMPILING_BYTES, KEPT_BYTES = 16 * 2**20, 2**20


class FullDiskError(OSError):
    """The disk has no space left for a kernel."""


@contextlib.contextmanager
def explained(folder: Path, variable: str) -> Iterator[None]:
    """A context that turns errors caused by a full disk into :class:`FullDiskError`.

    Args:
        folder: the folder for the compiled kernel.
        variable: the environment variable that sets another folder.
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
    """The free bytes on the folder's disk, as text; if the folder does not exist, its first parent that does counts."""
    for each in (folder, *folder.parents):
        with contextlib.suppress(OSError):
            return _mib(shutil.disk_usage(each).free)
    return "an unknown rest"


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"
