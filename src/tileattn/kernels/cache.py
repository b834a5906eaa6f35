"""Compiled kernels, kept on disk.

One library a key, in the user's cache folder. A library is written to a temporary file and then renamed, under a
lock, so that concurrent processes compile a kernel once and never see half of it; its checksum is kept beside it, so
that a truncated or foreign file is compiled over instead of loaded.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import filelock
import platformdirs

LOCK_TIMEOUT_S = 600.0


def default_folder() -> Path:
    """Where kernels are kept: ``$TILEATTN_CACHE_DIR``, or the platform's cache folder for tileattn."""
    return Path(os.environ.get("TILEATTN_CACHE_DIR") or platformdirs.user_cache_path("tileattn") / "kernels")


class KernelCache:
    """A folder of compiled kernels.

    Args:
        folder: created when the first kernel is written.
        suffix: of the files' names.
    """

    def __init__(self, folder: Path, suffix: str = ".so") -> None:
        self.folder = folder
        self.suffix = suffix

    def path(self, key: str) -> Path:
        """Where the library of a key is, or would be."""
        return self.folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}{self.suffix}"

    def find(self, key: str) -> Path | None:
        """The library of a key, if it is there and whole."""
        path = self.path(key)
        try:
            record = json.loads(path.with_suffix(".json").read_text())
            whole = record["key"] == key and record["sha256"] == _checksum(path)
        except (OSError, ValueError, KeyError, TypeError):
            return None  # absent, or not written by us: it will be compiled
        return path if whole else None

    def find_or_build(self, key: str, build: Callable[[Path], None]) -> Path:
        """The library of a key; where it is missing or damaged, ``build(path)`` has to write it to a path.

        Raises:
            OSError: the folder cannot be written; the message names it and how to choose another.
        """
        found = self.find(key)
        if found is not None:
            return found
        path = self.path(key)
        lock = filelock.FileLock(path.with_suffix(".lock"), timeout=LOCK_TIMEOUT_S)
        with self._writing():
            self.folder.mkdir(parents=True, exist_ok=True)
            lock.acquire()
        try:
            # Another process may have built it while this one waited.
            return self.find(key) or self._build(key, path, build)
        finally:
            lock.release()

    def _build(self, key: str, path: Path, build: Callable[[Path], None]) -> Path:
        with self._writing():
            folder = tempfile.TemporaryDirectory(dir=self.folder, prefix=".build-")
        with folder as scratch:
            fresh = Path(scratch) / path.name
            build(fresh)
            record = Path(scratch) / "record.json"
            text = json.dumps({"key": key, "sha256": _checksum(fresh), "bytes": fresh.stat().st_size})
            with self._writing():
                record.write_text(text)
                os.replace(fresh, path)
                os.replace(record, path.with_suffix(".json"))
        return path

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Says of an error while the folder is written which folder it is, and how to choose another."""
        try:
            yield
        except filelock.Timeout:
            raise
        except OSError as error:
            # OSError chooses its subclass (PermissionError, ...) by the number.
            raise OSError(
                error.errno,
                f"the kernel cache {self.folder} cannot be written ({error}); set TILEATTN_CACHE_DIR to another folder",
            ) from error


def _checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
