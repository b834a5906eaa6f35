"""Libraries of compiled kernels: their cache keys, and loading. Imports neither TileLang nor its compiler."""

from __future__ import annotations

import functools
import importlib.metadata
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ....installation import pip_install
from ...bundles import installed
from ...bundles.runtime import runtime, tilelang_libraries
from ...cache.sources import digest
from ...cache.store import kernel_cache
from . import ahead, background, link, record, toolkit
from .collection import collection_paused
from .progress import progress_line

if TYPE_CHECKING:
    from .job import KernelJob

TILELANG = __package__.rpartition(".")[0]


def generators(module: str) -> tuple[str, str]:
    """The full names of the modules that generate and compile a kernel.

    Args:
        module: below :data:`TILELANG`, the one that has the function that returns the TileLang function.
    """
    return f"{TILELANG}.{module}", f"{TILELANG}.build.compile"


def key_of(facts: str, module: str) -> str:
    """A kernel's key in the cache, from all that decides what it is compiled to.

    Args:
        facts: of the kernel, which name it, too.
        module: as for :func:`generators`. Its sources are in the key, so that editing them recompiles its kernels.
    """
    return f"{facts} | {digest(*generators(module))} | {toolchain()}"


def find_or_compile(job: KernelJob) -> Path:
    """The shared library of a kernel: from an installed bundle, from the cache on disk, or compiled now (some seconds).

    Raises:
        RuntimeError: no bundle has it, and TileLang, which would compile it, is not installed.
    """
    record.note(job)
    facts, module = job.name
    bundled = installed.find(facts, generators(module), job.arch)
    if bundled is not None:
        return bundled
    if tilelang_libraries() is None:
        raise RuntimeError(_text_of_missing(job))
    return compile_into_cache(job)


def is_there(job: KernelJob) -> bool:
    """Whether a bundle has a kernel, or the cache on disk has its files, which are not looked into."""
    facts, module = job.name
    return installed.find(facts, generators(module), job.arch) is not None or kernel_cache().holds(job.key)


SOURCE = "source"  # of a record in the cache: the digest of the source that the library was compiled from


def compile_into_cache(job: KernelJob, noted: str | None = None) -> Path:
    """The shared library of a kernel in the cache on disk, compiled now if it is missing. Bundles do not matter.

    Args:
        job: the kernel.
        noted: an entry that its record must have, as for `KernelCache.find_or_build`.
    """

    def build(path: Path) -> dict[str, str]:
        background.compiling(job)
        with progress_line(str(job)), collection_paused():
            return {SOURCE: _build(job, path)}

    return kernel_cache().find_or_build(job.key, build, noted)


def _build(job: KernelJob, path: Path) -> str:
    """Compiles a kernel, from its source where the package has it. Returns the digest of the source."""
    facts, module = job.name
    sources = ahead.find(facts, generators(module), job.arch, version("tilelang"))
    if sources is not None:
        link.build_library(sources, job.arch, path)
        return sources.digest
    from .compile import build_library

    return build_library(job.function(), job.arch, path)


def _text_of_missing(job: KernelJob) -> str:
    names = ", ".join(str(each) for each in installed.of_architecture(job.arch)) or "none is installed"
    return (
        f"no kernel for {job}: no bundle of kernels for {job.arch} has it as this version of tileattn needs it "
        f"({names}), and TileLang, which would compile it, is not installed. Install TileLang "
        f"({pip_install('compile')}), make a bundle with this kernel (tileattn record, tileattn bundle), or pass "
        'backend="torch"'
    )


@functools.cache
def toolchain() -> str:
    """Versions of TileLang and of the CUDA toolkit (or HIP) that compile the kernels."""
    return f"tilelang {version('tilelang')}, {device_compiler()}"


def version(package: str) -> str:
    """The version of an installed package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def device_compiler() -> str:
    """The toolkit's version file, read without starting the compiler."""
    home = toolkit.cuda_home()
    if home is not None and (home / "version.json").is_file():
        versions = json.loads((home / "version.json").read_text())
        return f"cuda {versions.get('cuda_nvcc', versions.get('cuda', {})).get('version')}"
    return f"cuda {version('nvidia-cuda-nvcc')}"


def load(path: Path) -> Any:
    """A shared library; its functions are its items."""
    module = runtime().load_module(str(path))
    return module if torch.cuda.device_count() < 2 else _KeepsDevice(module)


class _KeepsDevice:
    """A library that leaves the current device as it is: what TileLang generates makes it that of the tensors."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def __getitem__(self, name: str) -> Callable[..., Any]:
        function = self.module[name]

        def launch(*arguments: Any) -> Any:
            before = torch.cuda.current_device()
            try:
                return function(*arguments)
            finally:
                if torch.cuda.current_device() != before:
                    torch.cuda.set_device(before)

        return launch
