"""`KernelCache`: compiled kernels on disk, one library per key, by default in the user's cache folder.

A library is written to a temporary file and then renamed, under a lock: concurrent processes compile a kernel once and
never read a partial file. A record beside the library has its checksum; a truncated or foreign file is not loaded but
compiled again. A file that another user could have written is not loaded (`trust`). A read-only folder, such as one in
a container image, is read; kernels that it lacks are built in the user's own folder.
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
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import filelock

from ... import folders
from . import full_disk, trust
from .full_disk import FullDiskError

VARIABLE = "TILEATTN_CACHE_DIR"
LOCK_TIMEOUT_S = 600.0
MOST_RECORD_BYTES = 2**24
# Names of build folders: with the hash of their key, or without it in older versions of tileattn. A build folder
# of this age is a leftover of a killed process.
BUILD_FOLDER = re.compile(r"\.build-([0-9a-f]{32}-)?\w{8}")
LEFT_OVER_S = 24 * 3600.0


def default_folder() -> Path:
    """The folder that is searched first: ``$TILEATTN_CACHE_DIR``, or else the user's own folder.

    Raises:
        FileNotFoundError: there is neither; the message names the variables to set.
    """
    return folders.named_by(VARIABLE) or user_folder()


def user_folder() -> Path:
    """The user's own folder for kernels, in the platform's cache folder for tileattn."""
    return folders.user_cache(VARIABLE) / "kernels"


def kernel_cache(suffix: str = ".so") -> KernelCache:
    """The cache in :func:`default_folder`. If that folder is read-only, new kernels go to the user's own folder."""
    named = folders.named_by(VARIABLE)
    return (
        KernelCache(user_folder(), suffix, repairs=True) if named is None else KernelCache(named, suffix, user_folder)
    )


class KernelCache:
    """A folder of compiled kernels.

    Args:
        folder: created with the first kernel, accessible to this user only.
        suffix: of the files' names.
        own: returns the folder for kernels that `folder` lacks, if `folder` exists and cannot be written.
        repairs: what to do if others can write to `folder`: True makes it private if it belongs to this user; otherwise
            reading raises PermissionError.
    """

    def __init__(
        self, folder: Path, suffix: str = ".so", own: Callable[[], Path] | None = None, repairs: bool = False
    ) -> None:
        self.folder = folder
        self.suffix = suffix
        self.own = own
        self.repairs = repairs

    def path(self, key: str) -> Path:
        """The path of a key's library, which need not exist."""
        return self.folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}{self.suffix}"

    def find(self, key: str, noted: str | None = None) -> Path | None:
        """The path of a key's library if it exists and is intact, else None. Writes nothing.

        Args:
            key: as for :meth:`find_or_build`.
            noted: as for :meth:`find_or_build`.

        Raises:
            PermissionError: others could have written the folder or the library, or this user cannot read them.
        """
        path, _ = self._look(key, noted)
        beside = self._beside() if path is None else None
        return path if beside is None else beside.find(key, noted)

    def holds(self, key: str) -> bool:
        """Whether there is a library of a key, which is not looked into: :meth:`find` may find it damaged."""
        beside = self._beside()
        return self.path(key).exists() or (beside is not None and beside.holds(key))

    def is_being_built(self, key: str) -> bool:
        """Whether a process, this one or another, is building a key's library."""
        beside = self._beside()
        if beside is not None:
            return beside.is_being_built(key)
        lock = self._lock(key)
        if not Path(lock.lock_file).exists():
            return False
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            return True
        lock.release()
        return False

    def record(self, path: Path) -> dict[str, Any]:
        """What is kept beside a library that :meth:`find` has found: what `build` returned is in it.

        Empty where another process has just replaced or removed it.
        """
        try:
            return _read_record(path.with_suffix(".json"))
        except (OSError, _DamagedError):
            return {}

    def find_or_build(
        self, key: str, build: Callable[[Path], Mapping[str, str] | None], noted: str | None = None
    ) -> Path:
        """The path of a key's library, which is built first if it is missing or damaged.

        Args:
            key: all facts that determine the library.
            build: ``build(path)`` compiles the library and writes it to `path`. What it returns is kept in the record.
            noted: an entry that the record must have; a library without it, of an older version of tileattn, is built
                again.

        Raises:
            PermissionError: as in :meth:`find`.
            OSError: the folder cannot be written, or the disk is full; the message names the folder and the variable
                that sets another.
        """
        library, _ = self._look(key, noted)
        if library is not None:
            return library
        beside = self._beside()
        if beside is not None:
            return beside.find_or_build(key, build, noted)
        path = self.path(key)
        lock = self._lock(key)
        with self._writing():
            _make_private(self.folder)
            lock.acquire()
        try:
            # Another process may have built it while this one waited.
            library, damage = self._look(key, noted)
            if damage is not None:
                warnings.warn(f"tileattn: the kernel {path} is compiled again: {damage}", stacklevel=2)
            return library or self._build(key, path, build)
        finally:
            lock.release()

    def _lock(self, key: str) -> filelock.BaseFileLock:
        return filelock.FileLock(self.path(key).with_suffix(".lock"), timeout=LOCK_TIMEOUT_S)

    def _beside(self) -> KernelCache | None:
        """The user's own cache if this folder exists and cannot be written, else None."""
        if self.own is None or not self.folder.is_dir() or trust.is_written_by(self.folder):
            return None
        folder = self.own()
        return None if folder == self.folder else KernelCache(folder, self.suffix, repairs=True)

    # --- Reading ---

    def _look(self, key: str, noted: str | None = None) -> tuple[Path | None, str | None]:
        """(path of a key's library, None), (None, what is wrong with its file), or (None, None) if there is no file."""
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
            if error.errno is None:  # raised by trust.check
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
        if noted is not None and noted not in known:
            return None, f"its record {record} has no {noted!r}"
        return path, None

    # --- Writing ---

    def _build(self, key: str, path: Path, build: Callable[[Path], Mapping[str, str] | None]) -> Path:
        self._remove_leftovers(path)
        with self._writing():
            folder = tempfile.TemporaryDirectory(dir=self.folder, prefix=f".build-{path.stem}-")
        with folder as scratch:
            fresh = Path(scratch) / path.name
            with full_disk.explained(self.folder, VARIABLE):
                more = build(fresh) or {}
            record = Path(scratch) / "record.json"
            text = json.dumps({"key": key, "sha256": _checksum(fresh), "bytes": fresh.stat().st_size, **more})
            with self._writing():
                record.write_text(text)
                for file, place in ((fresh, path), (record, path.with_suffix(".json"))):
                    trust.keep_others_out(file)
                    os.replace(file, place)
        return path

    def _remove_leftovers(self, path: Path) -> None:
        """Removes the folders of killed builds: those of this key, whose lock is held, and any that are a day old."""
        for folder in self.folder.glob(".build-*"):
            name = BUILD_FOLDER.fullmatch(folder.name)
            with contextlib.suppress(OSError):  # another process has removed the folder, or another user owns it
                old = time.time() - folder.stat().st_mtime > LEFT_OVER_S
                if name and (old or name[1] == f"{path.stem}-"):
                    shutil.rmtree(folder)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """A context for writing: errors name the folder and the variable that sets another."""
        try:
            with full_disk.explained(self.folder, VARIABLE):
                yield
        except (filelock.Timeout, FullDiskError):
            raise
        except OSError as error:
            # OSError's constructor returns the subclass for the number (PermissionError, ...).
            raise OSError(
                error.errno,
                f"the kernel cache {self.folder} cannot be written ({error}); set {VARIABLE} to another folder",
            ) from error


class _DamagedError(Exception):
    """A record exists, but `_build` did not write it like this."""


def _read_record(path: Path) -> dict[str, Any]:
    # Check the kind of file before opening it: opening a pipe would block.
    status = path.stat()
    if not stat.S_ISREG(status.st_mode) or status.st_size > MOST_RECORD_BYTES:
        raise _DamagedError(f"{path} is no record of it")
    try:
        record = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise _DamagedError(f"its record {path} is damaged ({type(error).__name__}: {error})") from error
    if not isinstance(record, dict):
        raise _DamagedError(f"its record {path} is damaged (it is no object)")
    return record


def _make_private(folder: Path) -> None:
    """Creates a folder and its missing parents, accessible to this user only, independent of the umask."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    for each in reversed(missing):
        each.mkdir(mode=0o700, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)  # raises if the path exists and is not a folder


def _checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
