"""The bundles that are installed in this environment, and the kernels in them.

A bundle is a package with an entry point of the group ``tileattn.kernels``. Entry points are read at the first kernel
that is looked up, not at the import of tileattn, and nothing of a bundle is imported: its folder is found and its
manifest is read. A kernel is taken only if it was compiled from the source that this version of tileattn generates, by
the TileLang that would compile it here, and if its file has the checksum that the manifest names.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from ...installation import version
from .. import packages
from ..cache import sources
from . import lock
from .manifest import KERNELS, RUNTIME, Manifest, ManifestError, checksum, identity, read

GROUP = "tileattn.kernels"


@dataclass(frozen=True, eq=False)
class Bundle:
    """An installed bundle."""

    folder: Path
    manifest: Manifest

    def __str__(self) -> str:
        return f"{self.manifest.distribution} in {self.folder}"

    def path(self, key: str) -> Path:
        """The library of a kernel, by its identity."""
        return self.folder / KERNELS / f"{key}.so"


@functools.cache
def bundles() -> tuple[Bundle, ...]:
    """The bundles of this environment, whose manifests can be read; a warning names each of the others.

    Those that were compiled by the CUDA toolkit of PyTorch's major version come first: their kernels run with any
    driver that PyTorch runs with.
    """
    found = []
    for point in _entry_points():
        try:
            found.append(_bundle(point.value))
        except ManifestError as error:
            _warn(f"the bundle of kernels {point.name} ({point.value}) is not used: {error}")
    major = (torch.version.cuda or "").partition(".")[0]
    return tuple(sorted(found, key=lambda each: each.manifest.versions.get("cuda", "").partition(".")[0] != major))


def of_architecture(arch: str) -> tuple[Bundle, ...]:
    """The installed bundles of an architecture."""
    return tuple(each for each in bundles() if each.manifest.arch == arch)


def absence(arch: str) -> str | None:
    """The reason to refuse a call because nothing here has kernels for an architecture; None if something has.

    TileLang compiles any kernel. A bundle has some; which it lacks is known when a kernel is looked up.
    """
    reason = packages.absence("tilelang", extra="compile")
    if reason is None or of_architecture(arch):
        return None
    return f"{reason}, nor is a bundle of kernels for {arch}"


def find(facts: str, modules: tuple[str, ...], arch: str) -> Path | None:
    """The library of a kernel in an installed bundle, or None.

    Args:
        facts: which kernel it is.
        modules: full names of the modules that generate and compile it.
        arch: the architecture.
    """
    of_arch = of_architecture(arch)
    if not of_arch:
        return None
    key = identity(facts)
    for bundle in of_arch:
        if key in bundle.manifest.kernels and _is_current(bundle, key, modules, arch) and _is_intact(bundle, key):
            return bundle.path(key)
    return None


def runtime() -> Bundle | None:
    """The first bundle that brings the libraries which load kernels, or None."""
    return next((each for each in bundles() if each.manifest.runtime and _has_runtime(each)), None)


def _entry_points() -> Iterator[importlib.metadata.EntryPoint]:
    """The entry points of bundles. Packages whose metadata is damaged are passed over: they are no business of ours."""
    try:
        yield from importlib.metadata.entry_points(group=GROUP)
        return
    except Exception:  # whatever the parser raises for the metadata of any package
        distributions = importlib.metadata.distributions()
    for distribution in distributions:
        try:
            points = [point for point in distribution.entry_points if point.group == GROUP]
        except Exception:
            continue
        yield from points


def _bundle(module: str) -> Bundle:
    if not module.isidentifier():  # to find a package inside of another imports that one
        raise ManifestError("it names no package of the top level")
    try:
        spec = importlib.util.find_spec(module)
    except Exception as error:  # import hooks raise what they like
        raise ManifestError(f"its package is not found ({type(error).__name__}: {error})") from error
    if spec is None or not spec.submodule_search_locations:
        raise ManifestError("its package is not found")
    folder = Path(next(iter(spec.submodule_search_locations)))
    return Bundle(folder, read(folder))


def _is_current(bundle: Bundle, key: str, modules: tuple[str, ...], arch: str) -> bool:
    """Whether a bundle's kernel was compiled from the source that this version of tileattn generates.

    The source includes headers of TileLang, which no digest covers: so TileLang's version must be equal as well, that
    of the one which is installed here, or else of the one which the lock was made with.
    """
    entry, locked = bundle.manifest.kernels[key], lock.of(arch)
    source = locked.digests.get(key)
    current = entry.generators == sources.digest(*modules) if source is None else entry.source == source
    if not current:
        _warn_of_version(bundle)
        return False
    needed = _tilelang() or (None if source is None else locked.tilelang)
    if needed is not None and bundle.manifest.versions.get("tilelang") != needed:
        _warn_of_tilelang(bundle, needed)
        return False
    return True


@functools.cache
def _tilelang() -> str | None:
    """The version of the installed TileLang; None without one."""
    if packages.absence("tilelang") is not None:
        return None
    try:
        return importlib.metadata.version("tilelang")
    except importlib.metadata.PackageNotFoundError:  # imported from a tree, without an install
        return None


def _is_intact(bundle: Bundle, key: str) -> bool:
    path = bundle.path(key)
    return _is_as_recorded(bundle, path, bundle.manifest.kernels[key].sha256)


def _has_runtime(bundle: Bundle) -> bool:
    folder = bundle.folder / RUNTIME
    return all(_is_as_recorded(bundle, folder / name, sha256) for name, sha256 in bundle.manifest.runtime.items())


@functools.cache
def _is_as_recorded(bundle: Bundle, path: Path, sha256: str) -> bool:
    try:
        if checksum(path) == sha256:
            return True
        wrong = "its checksum is not the one in the manifest"
    except OSError as error:
        wrong = f"it cannot be read ({error})"
    _warn(
        f"{path} is not loaded: {wrong}; install {bundle.manifest.distribution} again "
        f"(pip install --force-reinstall {bundle.manifest.distribution})"
    )
    return False


@functools.cache
def _warn_of_version(bundle: Bundle) -> None:
    built_by = bundle.manifest.versions.get("tileattn", "of an unknown version")
    _warn(
        f"{bundle} was made by tileattn {built_by}. This is tileattn {version()}, which "
        "generates some of its kernels otherwise, so those are compiled instead. Install a bundle of this version "
        f"(pip install --upgrade {bundle.manifest.distribution})"
    )


@functools.cache
def _warn_of_tilelang(bundle: Bundle, needed: str) -> None:
    built_by = bundle.manifest.versions.get("tilelang", "of an unknown version")
    _warn(
        f"{bundle} was compiled by TileLang {built_by}, and TileLang {needed} is needed here, so its kernels are "
        f"compiled instead. Install a bundle that was made with it, or TileLang {built_by}"
    )


def _warn(text: str) -> None:
    warnings.warn(f"tileattn: {text}", stacklevel=2)
