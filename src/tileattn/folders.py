"""The folders in which tileattn keeps a user's files: compiled kernels and the tuner's results."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import platformdirs


def named_by(variable: str) -> Path | None:
    """The path in an environment variable, with ``~`` expanded as in a shell; None if it is unset or empty.

    Raises:
        FileNotFoundError: the path begins with a home directory that is not known.
    """
    value = os.environ.get(variable)
    if not value:
        return None
    try:
        return Path(value).expanduser()
    except RuntimeError as error:
        raise FileNotFoundError(
            f"{variable}={value!r} begins with a home directory that is not known ({error}): give the whole path"
        ) from error


def user_cache(variable: str) -> Path:
    """The platform's cache folder for tileattn: for files that can be made again.

    Args:
        variable: the environment variable that sets another folder; used in the error message.

    Raises:
        FileNotFoundError: the user has no home directory; the message names the variable.
    """
    return _platforms(platformdirs.user_cache_path, variable, "compiled kernels")


def user_data(variable: str) -> Path:
    """The platform's data folder for tileattn: for files to keep. Arguments and errors as :func:`user_cache`."""
    return _platforms(platformdirs.user_data_path, variable, "the tuner's results")


def _platforms(path_of: Callable[[str], Path], variable: str, what: str) -> Path:
    try:
        path = path_of("tileattn")
    except (RuntimeError, KeyError, OSError) as error:
        raise _homeless(variable, what) from error
    # Without a home directory, some versions of platformdirs return a path with "~" in it, a relative path.
    if not path.is_absolute():
        raise _homeless(variable, what)
    return path


def _homeless(variable: str, what: str) -> FileNotFoundError:
    user = f"user {os.geteuid()}" if hasattr(os, "geteuid") else "this user"
    return FileNotFoundError(
        f"{user} has no home directory, where {what} would be kept: there is neither HOME nor an entry in the password "
        f"database. Set {variable} (or HOME) to a place that can be written"
    )
