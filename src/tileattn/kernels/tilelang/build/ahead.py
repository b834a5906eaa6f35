"""Sources that were generated ahead: nvcc makes kernels of them, and a first call waits for nothing of TileLang.

A file in the package has those of an architecture: in a clone of sm_90a alone, in a release of others, too
(``tileattn bundle --sources`` writes it). A source is taken only if the files that generate it are those of this
installation, so that a changed generator is never passed over, and if TileLang, whose headers it includes, has the
version that generated it.
"""

from __future__ import annotations

import json
import lzma
import os
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from ...bundles.manifest import identity
from .sources import Sources

FOLDER = Path(__file__).parent / "generated"
FORMAT = 1


class Generated(NamedTuple):
    """The sources of a kernel, and the digest of tileattn's files that generated them (`cache.sources`)."""

    sources: Sources
    generators: str


def path_of(arch: str) -> Path:
    """The file of an architecture."""
    return FOLDER / f"{arch}.json.xz"


def find(facts: str, generators: str, arch: str, tilelang: str) -> Sources | None:
    """The sources of a kernel, or None where they have to be generated.

    Args:
        facts: which kernel it is.
        generators: the digest of the files that generate it here.
        arch: the architecture.
        tilelang: the version of TileLang that is installed.
    """
    path = path_of(arch)
    if not path.is_file():
        return None
    try:
        version, kernels = read(path)
    except (OSError, ValueError) as error:
        warnings.warn(f"tileattn: {path} is not read, and kernels are generated anew: {error}", stacklevel=2)
        return None
    found = kernels.get(identity(facts))
    return found.sources if found is not None and found.generators == generators and version == tilelang else None


def read(path: Path) -> tuple[str, dict[str, Generated]]:
    """TileLang's version, and the sources by `identity`.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is damaged, or of another format.
    """
    try:
        content = json.loads(lzma.decompress(path.read_bytes()))
        if content["format"] != FORMAT:
            raise ValueError(f"its format is {content['format']!r}, and this version of tileattn reads {FORMAT}")
        kernels = {
            key: Generated(Sources(device, host, bytes.fromhex(image)), generators)
            for key, (device, host, image, generators) in content["kernels"].items()
        }
        return str(content["tilelang"]), kernels
    except (lzma.LZMAError, EOFError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"it is damaged ({type(error).__name__}: {error})") from error


def write(path: Path, tilelang: str, kernels: Mapping[str, Generated]) -> None:
    """Writes a file that :func:`read` reads, whole or not at all."""
    content = {
        "format": FORMAT,
        "tilelang": tilelang,
        "kernels": {
            key: (each.sources.device, each.sources.host, each.sources.image.hex(), each.generators)
            for key, each in sorted(kernels.items())
        },
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(lzma.compress(json.dumps(content).encode(), preset=9))
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)
