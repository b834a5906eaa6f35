"""Checks that only this user or root can write a compiled kernel: a loaded library has all rights of the process.

Three paths are checked: the cache's folder, the library and its record. For a symbolic link, the target and the
target's folder are checked. Parent folders are not: a user who can rename them could substitute a folder, but that
folder would belong to that user and be refused.

Windows has no owners and modes of this kind, so nothing is checked there; a user's folders are private on Windows.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

# Whether files have owners and modes: on every platform but Windows.
HAS_OWNERS = hasattr(os, "geteuid")
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def check(path: Path, repairs: bool = False) -> None:
    """Checks that only this user or root can write a folder or file.

    Args:
        path: must exist; symbolic links are followed.
        repairs: whether to make the path private (mode 700) if it belongs to this user and others can write it.

    Raises:
        PermissionError: others can write the path; the message says what to do.
    """
    if not HAS_OWNERS:
        return
    real = Path(os.path.realpath(path, strict=True))
    _check(real, repairs)
    if path.is_symlink() and not real.is_dir():
        _check(real.parent, repairs=False)


def is_written_by(path: Path) -> bool:
    """Whether this process may create files in a folder."""
    effective = {"effective_ids": True} if os.access in os.supports_effective_ids else {}
    return os.access(path, os.W_OK | os.X_OK, **effective)


def keep_others_out(path: Path) -> None:
    """Removes the permission of group and others to write a file, independent of the umask."""
    if HAS_OWNERS:
        path.chmod(stat.S_IMODE(path.stat().st_mode) & ~OTHERS_WRITE)


def _check(real: Path, repairs: bool) -> None:
    owner, permissions = real.stat().st_uid, real.stat().st_mode
    if owner not in (0, os.geteuid()):
        raise _refused(real, f"belongs to {_user(owner)}, and this is {_user(os.geteuid())}", "have root own it")
    if not permissions & OTHERS_WRITE:
        return
    if repairs and owner == os.geteuid():
        real.chmod(0o700)
        return
    mode = f"{stat.S_IMODE(permissions):o}"
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
