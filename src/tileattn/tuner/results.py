"""What the tuner has found, by device, call and sizes; kept in one JSON file in the user's data folder.

The file is read once per process. It is written under a lock, to another file that then takes its name, and holds what
other processes have added in the meantime. A file that cannot be read is renamed, not lost.

    {"version": 1, "devices": {"NVIDIA H200 (sm_90a)": {CALL: {"p64 q4096 k4096 g1": {"config": {...}, "ms": ...}}}}}
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock
import platformdirs
import torch

from . import state

VERSION = 1
LOCK_TIMEOUT_S = 60.0

Devices = dict[str, dict[str, dict[str, dict[str, Any]]]]


@dataclass(frozen=True)
class Result:
    """The fastest configuration of a call.

    Attributes:
        config: its fields, and under "schedule" the name of its class.
        ms: its time, in milliseconds.
        default_ms: that of the default configuration on the same tensors.
        candidates: how many were measured.
        when: the date, as YYYY-MM-DD.
        versions: of what compiled and ran it.
    """

    config: dict[str, Any]
    ms: float
    default_ms: float
    candidates: int
    when: str
    versions: str


def default_file() -> Path:
    """Where results are kept: ``$TILEATTN_TUNING_FILE``, or ``tuning.json`` in the platform's data folder."""
    return Path(os.environ.get("TILEATTN_TUNING_FILE") or platformdirs.user_data_path("tileattn") / "tuning.json")


def device_name(arch: str) -> str:
    """The present GPU and its architecture, as results name it."""
    return f"{torch.cuda.get_device_name()} ({arch})" if torch.cuda.is_available() else f"no GPU ({arch})"


def bucket(sizes: tuple[int, int, int, int]) -> str:
    """Sizes that share a result: each rounded up to a power of two, lengths to 64 at least.

    Args:
        sizes: batch * heads, seqlen_q, seqlen_k, query heads per key/value head.
    """
    pairs, seqlen_q, seqlen_k, group = sizes
    return f"p{_up(pairs)} q{_up(max(seqlen_q, 64))} k{_up(max(seqlen_k, 64))} g{_up(group)}"


def _up(number: int) -> int:
    return 1 << (max(number, 1) - 1).bit_length()


# --- Reading ---


def find(arch: str, call: str, sizes: tuple[int, int, int, int]) -> dict[str, Any] | None:
    """The configuration that was found to be the fastest, as :attr:`Result.config`, or None."""
    devices = _devices()
    if not devices:
        return None
    entry = devices.get(device_name(arch), {}).get(call, {}).get(bucket(sizes))
    return None if entry is None else entry["config"]


@functools.cache
def _devices() -> Devices:
    """All results, as they were when the process first asked (or last kept one)."""
    return read(default_file())


def read(path: Path) -> Devices:
    """The results of a file; none where it is missing. One that cannot be understood is renamed, with a warning."""
    try:
        content = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        return _set_aside(path, str(error))
    try:
        found = json.loads(content)
        version = found["version"]
        devices = found["devices"] if version == VERSION else None
    except (ValueError, KeyError, TypeError) as error:
        return _set_aside(path, f"{type(error).__name__}: {error}")
    if devices is None:
        return _set_aside(path, f"its version is {version!r}, not {VERSION}")
    return devices if _is_whole(devices) else _set_aside(path, "it does not hold results")


def _is_whole(devices: Any) -> bool:
    """Whether it is what :func:`keep` writes."""
    fields = {field.name for field in dataclasses.fields(Result)}

    def of_entry(entry: Any) -> bool:
        return isinstance(entry, dict) and set(entry) == fields and isinstance(entry["config"], dict)

    def of_dicts(value: Any, depth: int) -> bool:
        if depth == 0:
            return of_entry(value)
        return isinstance(value, dict) and all(of_dicts(inner, depth - 1) for inner in value.values())

    return of_dicts(devices, 3)


def _set_aside(path: Path, why: str) -> Devices:
    """Keeps a file that cannot be read under another name, for a person to look at."""
    aside = path.with_name(f"{path.name}.unreadable-{time.time_ns()}")
    try:
        os.replace(path, aside)
        where = f"it is kept as {aside}"
    except OSError as error:
        where = f"it stays there ({error})"
    warnings.warn(
        f"tileattn: the tuner's results in {path} cannot be read ({why}); {where}, and calls use their defaults",
        stacklevel=2,
    )
    return {}


# --- Writing ---


def keep(arch: str, call: str, sizes: tuple[int, int, int, int], result: Result) -> None:
    """Adds a result, or replaces it; the next calls of this process use it, and those of later processes."""
    path = default_file()
    with _locked(path):
        devices = read(path)
        devices.setdefault(device_name(arch), {}).setdefault(call, {})[bucket(sizes)] = dataclasses.asdict(result)
        _write(path, devices)
    _devices.cache_clear()
    state.forget_prepared()


def clear() -> int:
    """Removes all results; how many there were."""
    path = default_file()
    with _locked(path):
        count = sum(1 for _ in entries(read(path)))
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
        raise OSError(
            error.errno, f"the tuner's results {path} cannot be written ({error}); set TILEATTN_TUNING_FILE to another"
        ) from error


def _write(path: Path, devices: Devices) -> None:
    """Whole or not at all."""
    text = json.dumps({"version": VERSION, "devices": devices}, indent=1)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
