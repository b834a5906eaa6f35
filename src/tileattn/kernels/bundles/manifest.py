"""`Manifest`: what a bundle of compiled kernels holds, as the file ``manifest.json`` in it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FORMAT = 1
FILE = "manifest.json"
KERNELS, RUNTIME = "kernels", "runtime"  # folders of a bundle


class ManifestError(ValueError):
    """A manifest is damaged, or of another format."""


@dataclass(frozen=True)
class Entry:
    """One kernel of a bundle.

    Attributes:
        sha256: of the library, in hexadecimal digits.
        source: the digest of the source that the library was compiled from (`lock`).
        generators: the digest of tileattn's files that generated it (`kernels/cache/sources.py`).
    """

    sha256: str
    source: str
    generators: str


@dataclass(frozen=True)
class Manifest:
    """What a bundle holds.

    Attributes:
        distribution: the package's name for pip, such as "tileattn-kernels-sm90a-cu13".
        arch: the architecture that its kernels run on, such as "sm_90a".
        preset: the name of the set of kernels.
        versions: of tileattn, tilelang, apache-tvm-ffi and cuda (not for AMD), which made it.
        runtime: the libraries that load its kernels, in the order in which they are loaded, by their SHA-256.
        kernels: by :func:`identity`.
    """

    distribution: str
    arch: str
    preset: str
    versions: dict[str, str]
    runtime: dict[str, str]
    kernels: dict[str, Entry]

    def write(self, folder: Path) -> None:
        """Writes the file into a bundle's folder."""
        text = json.dumps({"format": FORMAT, **asdict(self)}, indent=0, sort_keys=False)
        (folder / FILE).write_text(text + "\n")


def identity(facts: str) -> str:
    """A kernel's identity in bundles and lock: of its facts alone, and so the same however it is generated."""
    return hashlib.sha256(facts.encode()).hexdigest()[:32]


def checksum(path: Path) -> str:
    """A file's SHA-256 in hexadecimal digits."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def read(folder: Path) -> Manifest:
    """The manifest of a bundle's folder.

    Raises:
        ManifestError: it is missing, damaged, or of a format that this version does not know.
    """
    try:
        given = json.loads((folder / FILE).read_bytes())
        found = given.pop("format")
        if found != FORMAT:
            raise ManifestError(f"its format is {found!r}, and this version of tileattn reads format {FORMAT}")
        manifest = Manifest(**{**given, "kernels": {key: Entry(**each) for key, each in given["kernels"].items()}})
        _check(manifest)
    except OSError as error:
        raise ManifestError(f"{folder / FILE} cannot be read ({error})") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        if isinstance(error, ManifestError):
            raise
        raise ManifestError(f"{folder / FILE} is damaged ({type(error).__name__}: {error})") from error
    return manifest


def _check(manifest: Manifest) -> None:
    texts: list[Any] = [manifest.distribution, manifest.arch, manifest.preset, *manifest.kernels]
    for part in (manifest.versions, manifest.runtime):
        texts += [*part, *part.values()]
    texts += [text for each in manifest.kernels.values() for text in (each.sha256, each.source, each.generators)]
    if not all(isinstance(text, str) for text in texts):
        raise ManifestError("it has values that are no text")
    names = [*manifest.runtime, *manifest.kernels]
    if any("/" in name or "\\" in name or name.startswith(".") for name in names):
        raise ManifestError("it names files outside of its folder")
