"""Whether compiled kernels that lie somewhere may be loaded: a library runs with all rights of the process.

So whoever can write it, or the folder that it is in, must be this user or root. The folder of the cache, the library
and its record are checked, and where one is a symbolic link, what it leads to and the folder of that. Folders above are
not: who can rename those can put a folder of theirs in its place, but it belongs to them, and is refused.

On Windows there are neither owners nor modes to look at, and nothing is checked; a user's folders are private there.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

# Python has these on every platform but Windows.
HAS_OWNERS = hasattr(os, "geteuid")
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def check(path: Path, repairs: bool = False) -> None:
    """That a folder or file is written by this user or root alone.

    Args:
        path: must exist; symbolic links are followed.
        repairs: whether to take the right to write from group and others, where it is this user's.

    Raises:
        PermissionError: others can write it; the message says what to do.
    """
    if not HAS_OWNERS:
        return
    real = Path(os.path.realpath(path, strict=True))
    _check(real, repairs)
    if path.is_symlink() and not real.is_dir():
        _check(real.parent, repairs=False)


def is_written_by(path: Path) -> bool:
    """Whether this process may make files in a folder."""
    effective = {"effective_ids": True} if os.access in os.supports_effective_ids else {}
    return os.access(path, os.W_OK | os.X_OK, **effective)


def keep_others_out(path: Path) -> None:
    """Takes the right to write a new file from group and others, whatever the umask."""
    if HAS_OWNERS:
        path.chmod(stat.S_IMODE(path.stat().st_mode) & ~OTHERS_WRITE)


def _check(real: Path, repairs: bool) -> None:
    found = real.stat()
    if found.st_uid not in (0, os.geteuid()):
        raise _refused(real, f"belongs to {_user(found.st_uid)}, and this is {_user(os.geteuid())}", "have root own it")
    if not found.st_mode & OTHERS_WRITE:
        return
    if repairs and found.st_uid == os.geteuid():
        real.chmod(0o700)
        return
    mode = f"{stat.S_IMODE(found.st_mode):o}"
    raise _refused(real, f"can be written by other users (its mode is {mode})", f"chmod go-w {real}")


def _refused(real: Path, why: str, repair: str) -> PermissionError:
    return PermissionError(
        f"no kernel is loaded from the cache: {real} {why}, so that code of others could run here. Remove it, or, if "
        f"you trust what is in it, {repair}, or set TILEATTN_CACHE_DIR to a folder of your own"
    )


def _user(number: int) -> str:
    import pwd

    try:
        return f"{pwd.getpwuid(number).pw_name} ({number})"
    except KeyError:
        return f"user {number}"
