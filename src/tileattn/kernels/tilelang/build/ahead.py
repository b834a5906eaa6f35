"""Sources that were generated ahead: nvcc makes kernels of them, and a first call waits for nothing of TileLang.

A file in the package has those of an architecture: in a clone of sm_90a alone, in a release of others, too
(``tileattn bundle --sources`` writes it). A source is taken only if the files that generate it are those of this
installation, so that a changed generator is never passed over, and if TileLang, whose headers it includes, has the
version that generated it.

``TILEATTN_SOURCES=0`` lets TileLang generate every source. The file has two parts, each compressed: what is there,
which every look-up reads, and the sources.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ...bundles.manifest import identity
from ...cache.sources import closure, digest_of
from .sources import Sources

FOLDER = Path(__file__).parent / "generated"
FORMAT = 1
VARIABLE = "TILEATTN_SOURCES"
# Modules that compile a source and have no part in generating it.
COMPILING = frozenset(f"{__package__}.{name}" for name in ("headers", "link", "nvcc", "sources", "toolkit"))


class Generated(NamedTuple):
    """The sources of a kernel, and the digest of tileattn's files that generated them."""

    sources: Sources
    generators: str


class Content(NamedTuple):
    """What a file has: TileLang's version, and the kernels by `identity`."""

    tilelang: str
    kernels: dict[str, Generated]


def path_of(arch: str) -> Path:
    """The file of an architecture."""
    return FOLDER / f"{arch}.json.xz"


@functools.cache
def digest_of_generators(*modules: str) -> str:
    """The digest of all files that decide a kernel's sources.

    Args:
        modules: full names, those of `library.generators`.
    """
    files = closure(modules)
    return digest_of({name: files[name] for name in files.keys() - COMPILING})


def find(facts: str, modules: tuple[str, ...], arch: str, tilelang: str) -> Sources | None:
    """The sources of a kernel, or None where they have to be generated.

    Args:
        facts: which kernel it is.
        modules: full names of the modules that generate and compile it.
        arch: the architecture.
        tilelang: the version of TileLang that is installed.

    Raises:
        ValueError: ``TILEATTN_SOURCES`` is neither 0 nor 1.
    """
    wanted = os.environ.get(VARIABLE, "1")
    if wanted not in ("0", "1"):
        raise ValueError(f"{VARIABLE} must be 0 (TileLang generates every source) or 1, got {wanted!r}")
    path, key = path_of(arch), identity(facts)
    if wanted == "0" or not path.is_file():
        return None
    try:
        version, generators, rest = _index(path)
        if version != tilelang or generators.get(key) != digest_of_generators(*modules):
            return None
        found = _sources(rest)
        if key not in found:
            raise ValueError("it is damaged (a kernel of its list has no source)")
        return found[key]
    except (OSError, ValueError, ImportError) as error:
        warnings.warn(f"tileattn: {path} is not read, and kernels are generated anew: {error}", stacklevel=2)
        return None


def read(path: Path) -> Content:
    """All that a file has.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is damaged, or of another format.
        ImportError: this Python has no module lzma.
    """
    version, generators, rest = _index(path)
    sources = _sources(rest)
    return Content(version, {key: Generated(sources[key], generators[key]) for key in generators})


def write(path: Path, tilelang: str, kernels: Mapping[str, Generated]) -> None:
    """Writes a file that :func:`read` reads, whole or not at all."""
    import lzma

    index = {
        "format": FORMAT,
        "tilelang": tilelang,
        "kernels": {key: kernels[key].generators for key in sorted(kernels)},
    }
    of = {key: each.sources for key, each in sorted(kernels.items())}
    sources = {key: (each.device, each.host, each.image.hex()) for key, each in of.items()}
    content = b"".join(lzma.compress(json.dumps(part).encode(), preset=9) for part in (index, sources))
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        try:
            file.write(content)
            file.close()
            os.chmod(file.name, 0o644)
            os.replace(file.name, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(file.name)
            raise


def _index(path: Path) -> tuple[str, dict[str, str], bytes]:
    """TileLang's version, the digests of generators by `identity`, and the part of the file behind them."""
    index, rest = _decompressed(path.read_bytes())
    try:
        if index["format"] != FORMAT:
            raise ValueError(f"its format is {index['format']!r}, and this version of tileattn reads {FORMAT}")
        return str(index["tilelang"]), dict(index["kernels"]), rest
    except (KeyError, TypeError) as error:
        raise ValueError(f"it is damaged ({type(error).__name__}: {error})") from error


def _sources(part: bytes) -> dict[str, Sources]:
    try:
        found = _decompressed(part)[0].items()
        return {key: Sources(device, host, bytes.fromhex(image)) for key, (device, host, image) in found}
    except (AttributeError, TypeError) as error:
        raise ValueError(f"it is damaged ({type(error).__name__}: {error})") from error


def _decompressed(content: bytes) -> tuple[Any, bytes]:
    """The JSON in the first part of a file, and the bytes behind that part."""
    import lzma  # a Python may be built without it

    decompressor = lzma.LZMADecompressor()
    try:
        return json.loads(decompressor.decompress(content)), decompressor.unused_data
    except (lzma.LZMAError, EOFError) as error:
        raise ValueError(f"it is damaged ({type(error).__name__}: {error})") from error
