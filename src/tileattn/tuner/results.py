"""The tuner's results by device, call and sizes, in one JSON file in the user's data folder.

The file is read once per process. A new result is merged with the file under a lock and written to a temporary file,
which then replaces it. Reading changes nothing. A damaged file is renamed before a new one replaces it. Files that are
not tileattn's, or that a newer tileattn wrote, are never replaced.

    {"version": 1, "devices": {"NVIDIA H200 (sm_90a)": {CALL: {"p64 q4096 k4096 g1": {"config": {...}, "ms": ...}}}}}
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import json
import os
import stat
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock
import torch

from .. import folders
from . import state

VARIABLE = "TILEATTN_TUNING_FILE"
VERSION = 1
LOCK_TIMEOUT_S = 60.0
MOST_BYTES = 2**28  # a result takes some hundred

Devices = dict[str, dict[str, dict[str, dict[str, Any]]]]


@dataclass(frozen=True)
class Result:
    """The fastest configuration of a call.

    Attributes:
        config: The configuration's fields, and under "schedule" the name of its class.
        ms: Its time, in milliseconds.
        default_ms: The time of the default configuration on the same tensors.
        candidates: Number of candidates that were measured.
        when: The date, as YYYY-MM-DD.
        versions: Versions of the packages that compiled and ran it.
    """

    config: dict[str, Any]
    ms: float
    default_ms: float
    candidates: int
    when: str
    versions: str


def default_file() -> Path:
    """The path of the results: ``$TILEATTN_TUNING_FILE``, or ``tuning.json`` in the platform's data folder.

    Raises:
        FileNotFoundError: Neither is known, because the user has no home directory.
    """
    return folders.named_by(VARIABLE) or folders.user_data(VARIABLE) / "tuning.json"


def device_name(arch: str) -> str:
    """Name and architecture of the current GPU, as a key of the results."""
    return f"{torch.cuda.get_device_name()} ({arch})" if torch.cuda.is_available() else f"no GPU ({arch})"


def bucket(sizes: tuple[int, int, int, int]) -> str:
    """The key of sizes that share a result: each is rounded up to a power of two, lengths to at least 64.

    Args:
        sizes: batch * heads, seqlen_q, seqlen_k, query heads per key/value head.
    """
    pairs, seqlen_q, seqlen_k, group = sizes
    return f"p{_up(pairs)} q{_up(max(seqlen_q, 64))} k{_up(max(seqlen_k, 64))} g{_up(group)}"


def _up(number: int) -> int:
    return 1 << (max(number, 1) - 1).bit_length()


# --- Reading ---


def find(arch: str, call: str, sizes: tuple[int, int, int, int]) -> dict[str, Any] | None:
    """The fastest configuration of a call, as :attr:`Result.config`; None if the call was never tuned."""
    devices = _devices()
    if not devices:
        return None
    entry = devices.get(device_name(arch), {}).get(call, {}).get(bucket(sizes))
    return None if entry is None else entry["config"]


@functools.cache
def _devices() -> Devices:
    """All results, as read when this process first asked or last stored one."""
    try:
        path = default_file()
    except FileNotFoundError as error:
        if os.environ.get(VARIABLE):
            warnings.warn(f"tileattn: {error}; calls use their defaults", stacklevel=2)
        return {}  # a user without a home has kept none
    return read(path)


def read(path: Path) -> Devices:
    """The results of a file, empty if it is missing. An unusable file is left as it is, with a warning."""
    try:
        return _load(path)
    except _UnusableError as error:
        warnings.warn(f"tileattn: {error}; it stays as it is, and calls use their defaults", stacklevel=2)
        return {}


class _UnusableError(Exception):
    """The file cannot be used and must not be replaced: another program's, unreadable, or a newer tileattn's."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"the tuner's results in {path} cannot be used ({why})")


class _DamagedError(_UnusableError):
    """A regular file that was read and is not what :func:`keep` writes."""


def _load(path: Path) -> Devices:
    """The results of a file, empty if it is missing.

    Raises:
        _UnusableError: The path is no regular file, cannot be read now, or was written by a newer tileattn.
        _DamagedError: The file holds no results.
    """
    try:
        # Before it is opened: a pipe would be waited for.
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise _UnusableError(path, "it is no regular file")
        if status.st_size > MOST_BYTES:
            raise _UnusableError(path, f"it has {status.st_size} bytes; the most that are read are {MOST_BYTES}")
        content = path.read_bytes()
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise _UnusableError(path, error.strerror or str(error)) from error
    try:
        whole = json.loads(content)
        version, devices = whole["version"], whole["devices"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _DamagedError(path, f"{type(error).__name__}: {error}") from error
    if isinstance(version, int) and version > VERSION:
        raise _UnusableError(path, f"a newer tileattn wrote them: their version is {version}, this one's {VERSION}")
    if version != VERSION or not _is_whole(devices):
        raise _DamagedError(path, "it does not hold results")
    return devices


def _is_whole(devices: Any) -> bool:
    """Whether the content has the structure that :func:`keep` writes."""

    def of_dicts(value: Any, depth: int) -> bool:
        if depth == 0:
            return _is_entry(value)
        return isinstance(value, dict) and all(of_dicts(inner, depth - 1) for inner in value.values())

    return of_dicts(devices, 3)


def _is_entry(entry: Any) -> bool:
    """Whether a JSON object has the fields of a :class:`Result`, with their types."""
    if not isinstance(entry, dict) or set(entry) != {field.name for field in dataclasses.fields(Result)}:
        return False
    times = [entry["ms"], entry["default_ms"]]
    return (
        isinstance(entry["config"], dict)
        and all(map(_is_shallow, entry["config"].values()))
        and all(type(time) in (int, float) and 0 < time <= sys.float_info.max for time in times)
        and type(entry["candidates"]) is int
        and isinstance(entry["when"], str)
        and isinstance(entry["versions"], str)
    )


def _is_shallow(value: Any) -> bool:
    """Whether a value can be shown and written again. Backends ignore values that are no configuration."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return not any(isinstance(each, (dict, list)) for each in inner)


# --- Writing ---


def check_writable() -> None:
    """Checks before any measurement that results can be written. The file is not changed, even if damaged.

    Raises:
        OSError: They cannot. The message names the file and how to choose another.
    """
    path = default_file()
    with _locked(path):
        with contextlib.suppress(_DamagedError):  # it makes room when a result is there
            _load_unless_foreign(path)
        # Another file beside it, as `_write` makes: a lock that is there already says nothing about the folder.
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
        os.close(handle)
        os.unlink(name)


def keep(arch: str, call: str, sizes: tuple[int, int, int, int], result: Result) -> None:
    """Adds or replaces a result. Later calls of this and of other processes use it."""
    path = default_file()
    with _locked(path):
        devices = _load_to_replace(path)
        devices.setdefault(device_name(arch), {}).setdefault(call, {})[bucket(sizes)] = dataclasses.asdict(result)
        _write(path, devices)
    _devices.cache_clear()
    state.forget_prepared()


def _load_to_replace(path: Path) -> Devices:
    """The results of a file that will be replaced. A damaged file is renamed.

    Raises:
        OSError: The file must not be replaced.
    """
    try:
        return _load_unless_foreign(path)
    except _DamagedError as error:
        aside = path.with_name(f"{path.name}.unreadable-{time.time_ns()}")
        os.replace(path, aside)
        warnings.warn(f"tileattn: {error}; it is kept as {aside}, and a new file begins", stacklevel=3)
        return {}


def _load_unless_foreign(path: Path) -> Devices:
    """As :func:`_load`, for a caller that will replace the file.

    Raises:
        OSError: The file must not be replaced.
        _DamagedError: The file holds no results.
    """
    try:
        return _load(path)
    except _DamagedError:
        raise
    except _UnusableError as error:
        raise OSError(str(error)) from error


def clear() -> int:
    """Removes all results and returns their number. A file without readable results is left as it is."""
    path = default_file()
    with _locked(path):
        count = sum(1 for _ in entries(read(path)))
        if count:
            path.unlink(missing_ok=True)
    _devices.cache_clear()
    state.forget_prepared()
    return count


def entries(devices: Devices) -> Iterator[tuple[str, str, str, Result]]:
    """All results, with device, call and bucket."""
    for device, calls in devices.items():
        for call, buckets in calls.items():
            for name, entry in buckets.items():
                yield device, call, name, Result(**entry)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(path.with_name(f"{path.name}.lock"), timeout=LOCK_TIMEOUT_S):
            yield
    except filelock.Timeout:
        raise
    except OSError as error:
        why = f"the tuner's results {path} cannot be written ({error}); set {VARIABLE} to another"
        # Without a number an error would be called "[Errno None]".
        raise (OSError(why) if error.errno is None else OSError(error.errno, why)) from error


def _write(path: Path, devices: Devices) -> None:
    """Writes the file atomically."""
    text = json.dumps({"version": VERSION, "devices": devices}, indent=1)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(name, path)
    except OSError as error:
        Path(name).unlink(missing_ok=True)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise OSError(error.errno, f"{error.strerror}: they take {len(text)} bytes") from error
        raise
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
