"""The lock: the digest of the source that this version generates, for each kernel of the preset "default".

A bundle holds such digests, too. Where both agree, the bundle's kernel is what would be compiled here, and neither
TileLang nor a compiler is needed to know it. A comment edited in a generator changes no digest. A changed instruction
does. TileLang's headers are compiled with the source but are not in the digest, so the lock names TileLang's version.
``tileattn bundle --lock`` writes the file.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent / "locks"


TILELANG = "tilelang"  # begins the line with the version


class Lock(NamedTuple):
    """What a lock says.

    Attributes:
        tilelang: the version of TileLang that generated the sources; None where there is no lock.
        digests: by `manifest.identity`.
    """

    tilelang: str | None
    digests: Mapping[str, str]


@functools.cache
def of(arch: str) -> Lock:
    """The lock of an architecture, which is empty where there is no file."""
    path = path_of(arch)
    return read(path) if path.is_file() else Lock(None, {})


def path_of(arch: str) -> Path:
    """The file of an architecture's digests."""
    return FOLDER / f"{arch}.txt"


def read(path: Path) -> Lock:
    """The lock in a file: TileLang's version, a line for each kernel, and lines of comment that begin with "#"."""
    lines = path.read_text().splitlines()
    digests = dict(line.split() for line in lines if line and not line.startswith("#"))
    return Lock(digests.pop(TILELANG, None), digests)


def write(path: Path, found: Lock, comment: str) -> None:
    """Writes the digests, sorted, so that a change shows as the lines that it changes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [*(f"# {line}" for line in comment.splitlines()), f"{TILELANG} {found.tilelang}"]
    lines += [f"{key} {found.digests[key]}" for key in sorted(found.digests)]
    path.write_text("\n".join(lines) + "\n")
