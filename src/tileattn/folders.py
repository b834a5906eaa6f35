"""Where tileattn keeps files of a user: compiled kernels, and what the tuner has found."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import platformdirs


def named_by(variable: str) -> Path | None:
    """The path that an environment variable names, with ``~`` as the shell reads it; None where it is unset or empty.

    Raises:
        FileNotFoundError: it begins with the home directory of a user who has none.
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
    """The platform's folder for files of tileattn that can be made again.

    Args:
        variable: the environment variable that names another, for the error.

    Raises:
        FileNotFoundError: the user has no home directory; the message names the variable.
    """
    return _platforms(platformdirs.user_cache_path, variable, "compiled kernels")


def user_data(variable: str) -> Path:
    """As :func:`user_cache`, for files that cannot."""
    return _platforms(platformdirs.user_data_path, variable, "the tuner's results")


def _platforms(find: Callable[[str], Path], variable: str, what: str) -> Path:
    try:
        path = find("tileattn")
    except (RuntimeError, KeyError, OSError) as error:
        raise _homeless(variable, what) from error
    # Where nothing says what "~" is, versions of platformdirs leave it as it is: a folder of this name would be made.
    if not path.is_absolute():
        raise _homeless(variable, what)
    return path


def _homeless(variable: str, what: str) -> FileNotFoundError:
    user = f"user {os.geteuid()}" if hasattr(os, "geteuid") else "this user"
    return FileNotFoundError(
        f"{user} has no home directory, where {what} would be kept: there is neither HOME nor an entry in the password "
        f"database. Set {variable} (or HOME) to a place that can be written"
    )
