"""The lock: the digest of the source that this version generates, for each kernel of the preset "default".

A bundle holds such digests, too. Where both agree, the bundle's kernel is what would be compiled here, and neither
TileLang nor a compiler is needed to know it. A comment edited in a generator changes no digest. A changed instruction
does.
``tileattn bundle --lock`` writes the file.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path

FOLDER = Path(__file__).parent / "locks"


@functools.cache
def digests(arch: str) -> Mapping[str, str]:
    """The digests for an architecture, by `manifest.identity`; empty where there is no lock for it."""
    path = path_of(arch)
    return read(path) if path.is_file() else {}


def path_of(arch: str) -> Path:
    """The file of an architecture's digests."""
    return FOLDER / f"{arch}.txt"


def read(path: Path) -> dict[str, str]:
    """The digests in a file: a line for each kernel, and lines of comment that begin with "#"."""
    lines = path.read_text().splitlines()
    return dict(line.split() for line in lines if line and not line.startswith("#"))


def write(path: Path, found: Mapping[str, str], comment: str) -> None:
    """Writes the digests, sorted, so that a change shows as the lines that it changes."""
    path.parent.mkdir(exist_ok=True)
    lines = [*(f"# {line}" for line in comment.splitlines()), *(f"{key} {found[key]}" for key in sorted(found))]
    path.write_text("\n".join(lines) + "\n")
