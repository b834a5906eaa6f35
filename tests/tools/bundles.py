"""A made-up bundle of kernels, installed as pip installs one: a package and its dist-info in a folder of `sys.path`."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from tileattn.kernels.bundles import installed, lock, runtime
from tileattn.kernels.bundles.manifest import KERNELS, RUNTIME, Entry, Manifest, checksum, identity
from tileattn.kernels.cache import sources
from tileattn.kernels.tilelang.build.job import KernelJob
from tileattn.kernels.tilelang.build.library import generators

ARCH = "sm_90a"
NAME = "tileattn-kernels-sm90a-cu13"
LIBRARY, RUNTIME_LIBRARY = b"the library of a kernel", b"a library that loads kernels"
SOURCE = "0" * 32  # the digest of the source that a made-up kernel was compiled from
# Of this environment, as a kernel of another TileLang is not taken; any, where there is none.
TILELANG = "0.1.15" if find_spec("tilelang") is None else importlib.metadata.version("tilelang")
VERSIONS = {"tileattn": "0.0.1", "tilelang": TILELANG, "apache-tvm-ffi": "0.1", "cuda": "13.0.88"}


def entry_of(job: KernelJob) -> Entry:
    """The entry of a kernel that this version of tileattn generates, with the library `LIBRARY`."""
    return Entry("", SOURCE, sources.digest(*generators(job.name.module)))


def install(
    site: Path,
    kernels: Mapping[KernelJob, Entry],
    *,
    name: str = NAME,
    arch: str = ARCH,
    imports: str = "",
    versions: Mapping[str, str] = VERSIONS,
) -> Path:
    """Installs a bundle into a folder and returns the folder of its package.

    Args:
        site: the folder, which `on_path` puts on `sys.path`.
        kernels: an entry without a checksum gets that of `LIBRARY`.
        name: of the distribution.
        arch: of the kernels.
        imports: the code of the package's ``__init__.py``.
        versions: of what made it.
    """
    module = name.replace("-", "_")
    folder = site / module
    for each in (folder / KERNELS, folder / RUNTIME):
        each.mkdir(parents=True)
    (folder / "__init__.py").write_text(imports)
    (folder / RUNTIME / "libtvm_runtime.so").write_bytes(RUNTIME_LIBRARY)
    entries = {}
    for job, entry in kernels.items():
        key = identity(job.name.facts)
        library = folder / KERNELS / f"{key}.so"
        library.write_bytes(LIBRARY)
        entries[key] = replace(entry, sha256=entry.sha256 or checksum(library))
    loaded = {"libtvm_runtime.so": checksum(folder / RUNTIME / "libtvm_runtime.so")}
    Manifest(name, arch, "made up", dict(versions), loaded, entries).write(folder)
    register(site, name, module)
    return folder


def register(site: Path, name: str, module: str) -> None:
    """Writes the dist-info of a bundle, with its entry point."""
    info = site / f"{module}-0.0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.0.1\n")
    (info / "entry_points.txt").write_text(f"[{installed.GROUP}]\n{module} = {module}\n")


@contextmanager
def on_path(site: Path) -> Iterator[None]:
    """Inside, the bundles in a folder are installed, and no lock has a digest."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(site))
        patch.setattr(lock, "FOLDER", site / "locks")
        forget()
        yield
    forget()


def forget() -> None:
    """Empties what a process knows of installed bundles."""
    importlib.invalidate_caches()
    cached = (
        *(installed.bundles, installed._is_as_recorded, installed._warn_of_version, installed._warn_of_tilelang),
        *(installed._tilelang, lock.of, runtime._loaded),
    )
    for function in cached:
        function.cache_clear()
