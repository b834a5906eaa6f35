"""Compiled kernels, kept on disk.

One library a key, in the user's cache folder. A library is written to a temporary file and then renamed, under a
lock, so that concurrent processes compile a kernel once and never see half of it; its checksum is kept beside it, so
that a truncated or foreign file is compiled over instead of loaded. Nothing is loaded that another user could have
written (trust.py). A folder that can be read and not written, such as one in an image, is loaded from; what it lacks is
built in the user's own.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import filelock

from ... import folders
from . import full_disk, trust
from .full_disk import FullDiskError

VARIABLE = "TILEATTN_CACHE_DIR"
LOCK_TIMEOUT_S = 600.0
MOST_RECORD_BYTES = 2**24
# Folders of builds, with the hash of their key or, of older versions, without; and when one is surely left over.
BUILD_FOLDER = re.compile(r"\.build-([0-9a-f]{32}-)?\w{8}")
LEFT_OVER_S = 24 * 3600.0


def default_folder() -> Path:
    """Where kernels are looked for first: ``$TILEATTN_CACHE_DIR``, or the user's own folder.

    Raises:
        FileNotFoundError: neither is known; the message says what to set.
    """
    return folders.named_by(VARIABLE) or user_folder()


def user_folder() -> Path:
    """The user's own: in the platform's cache folder for tileattn."""
    return folders.user_cache(VARIABLE) / "kernels"


def kernel_cache(suffix: str = ".so") -> KernelCache:
    """The cache in :func:`default_folder`, beside which the user's own folder has what it lacks and cannot take."""
    named = folders.named_by(VARIABLE)
    return (
        KernelCache(user_folder(), suffix, repairs=True) if named is None else KernelCache(named, suffix, user_folder)
    )


class KernelCache:
    """A folder of compiled kernels.

    Args:
        folder: created when the first kernel is written, for this user alone.
        suffix: of the files' names.
        own: says which folder is used beside one that exists and cannot be written.
        repairs: whether `folder` is made private where it is this user's and others can write it. Otherwise it is
            refused.
    """

    def __init__(
        self, folder: Path, suffix: str = ".so", own: Callable[[], Path] | None = None, repairs: bool = False
    ) -> None:
        self.folder = folder
        self.suffix = suffix
        self.own = own
        self.repairs = repairs

    def path(self, key: str) -> Path:
        """Where the library of a key is, or would be."""
        return self.folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}{self.suffix}"

    def find(self, key: str) -> Path | None:
        """The library of a key, if it is there and whole; nothing is written.

        Raises:
            PermissionError: the folder, or the library, could have been written by others, or cannot be read.
        """
        path, _ = self._look(key)
        beside = self._beside() if path is None else None
        return path if beside is None else beside.find(key)

    def find_or_build(self, key: str, build: Callable[[Path], None]) -> Path:
        """The library of a key; where it is missing or damaged, ``build(path)`` has to write it to a path.

        Raises:
            PermissionError: as in :meth:`find`.
            OSError: the folder cannot be written, or the disk is full; the message names the folder and how to choose
                another.
        """
        found, _ = self._look(key)
        if found is not None:
            return found
        beside = self._beside()
        if beside is not None:
            return beside.find_or_build(key, build)
        path = self.path(key)
        lock = filelock.FileLock(path.with_suffix(".lock"), timeout=LOCK_TIMEOUT_S)
        with self._writing():
            _make_private(self.folder)
            lock.acquire()
        try:
            # Another process may have built it while this one waited.
            found, damage = self._look(key)
            if damage is not None:
                warnings.warn(f"tileattn: the kernel {path} is compiled again: {damage}", stacklevel=2)
            return found or self._build(key, path, build)
        finally:
            lock.release()

    def _beside(self) -> KernelCache | None:
        """The user's own cache, if this one is there and cannot be written."""
        if self.own is None or not self.folder.is_dir() or trust.is_written_by(self.folder):
            return None
        folder = self.own()
        return None if folder == self.folder else KernelCache(folder, self.suffix, repairs=True)

    # --- Reading ---

    def _look(self, key: str) -> tuple[Path | None, str | None]:
        """The library of a key, or else what is wrong with what is in its place; None and None where nothing is."""
        path = self.path(key)
        record = path.with_suffix(".json")
        try:
            trust.check(self.folder, self.repairs)
            known = _read_record(record)
            trust.check(path)
            trust.check(record)
            if not stat.S_ISREG(path.stat().st_mode):
                return None, "it is no regular file"
            checksum = _checksum(path)
        except (FileNotFoundError, NotADirectoryError):
            return None, None
        except PermissionError as error:
            if error.errno is None:  # of trust.py
                raise
            raise PermissionError(
                error.errno,
                f"the kernel cache {self.folder} cannot be read ({error}); let this user read it (chmod -R a+rX), or "
                f"set {VARIABLE} to another folder",
            ) from error
        except _DamagedError as error:
            return None, str(error)
        except OSError as error:
            return None, f"it cannot be read ({error})"
        if known.get("key") != key:
            return None, f"its record {record} is of another kernel"
        if known.get("sha256") != checksum:
            return None, f"its checksum is not the one in {record}"
        return path, None

    # --- Writing ---

    def _build(self, key: str, path: Path, build: Callable[[Path], None]) -> Path:
        self._remove_leftovers(path)
        with self._writing():
            folder = tempfile.TemporaryDirectory(dir=self.folder, prefix=f".build-{path.stem}-")
        with folder as scratch:
            fresh = Path(scratch) / path.name
            with full_disk.explained(self.folder, VARIABLE):
                build(fresh)
            record = Path(scratch) / "record.json"
            text = json.dumps({"key": key, "sha256": _checksum(fresh), "bytes": fresh.stat().st_size})
            with self._writing():
                record.write_text(text)
                for file, place in ((fresh, path), (record, path.with_suffix(".json"))):
                    trust.keep_others_out(file)
                    os.replace(file, place)
        return path

    def _remove_leftovers(self, path: Path) -> None:
        """Folders of builds that were killed: of this key, whose lock is held, and of any that are a day old."""
        for folder in self.folder.glob(".build-*"):
            named = BUILD_FOLDER.fullmatch(folder.name)
            with contextlib.suppress(OSError):  # it is gone, or not ours
                old = time.time() - folder.stat().st_mtime > LEFT_OVER_S
                if named and (old or named[1] == f"{path.stem}-"):
                    shutil.rmtree(folder)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Says of an error while the folder is written which folder it is, and how to choose another."""
        try:
            with full_disk.explained(self.folder, VARIABLE):
                yield
        except (filelock.Timeout, FullDiskError):
            raise
        except OSError as error:
            # OSError chooses its subclass (PermissionError, ...) by the number.
            raise OSError(
                error.errno,
                f"the kernel cache {self.folder} cannot be written ({error}); set {VARIABLE} to another folder",
            ) from error


class _DamagedError(Exception):
    """A record is there, and is not what is written here."""


def _read_record(path: Path) -> dict[str, Any]:
    # Before it is opened: a pipe would be waited for.
    found = path.stat()
    if not stat.S_ISREG(found.st_mode) or found.st_size > MOST_RECORD_BYTES:
        raise _DamagedError(f"{path} is no record of it")
    try:
        record = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise _DamagedError(f"its record {path} is damaged ({type(error).__name__}: {error})") from error
    if not isinstance(record, dict):
        raise _DamagedError(f"its record {path} is damaged (it is no object)")
    return record


def _make_private(folder: Path) -> None:
    """Creates a folder, and those above that are missing, for this user alone, whatever the umask."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    for each in reversed(missing):
        each.mkdir(mode=0o700, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)  # an error if it is there, but no folder


def _checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
