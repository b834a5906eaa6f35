"""Compiles a rung's source to a cubin with NVRTC, through cuda-core."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import io
import threading
from pathlib import Path

from ..cache.sources import closure, digest_of
from .rungs import Kernel

SOURCES = Path(__file__).parent
_IMPORTING = threading.Lock()  # two threads cannot import cuda.core 1.2 at the same time


@functools.cache
def has_compiler() -> bool:
    """Whether cuda-core is installed."""
    try:
        return importlib.util.find_spec("cuda.core") is not None
    except ModuleNotFoundError:  # the package `cuda` is not installed
        return False


def build_cubin(kernel: Kernel, arch: str, path: Path) -> str:
    """Compiles a kernel for an architecture and writes the cubin to `path`. Needs no GPU. Returns ptxas' log."""
    with _IMPORTING:
        from cuda.core import Program, ProgramOptions

    options = ProgramOptions(
        name=f"{kernel.options.rung}.cu",
        arch=arch,
        std="c++17",
        define_macro=[(name, str(value)) for name, value in kernel.macros().items()],
        include_path=[str(SOURCES)],
        ptxas_options=["-v"],
    )
    log = io.StringIO()
    cubin = Program((SOURCES / f"{kernel.options.rung}.cu").read_text(), "c++", options).compile("cubin", logs=log)
    path.write_bytes(cubin.code)
    return log.getvalue()


def cache_key(kernel: Kernel, arch: str) -> str:
    """The cubin's key in the cache: everything that the cubin depends on."""
    return f"mma | {kernel} | {arch} | {_source_digest()} | {_toolchain()}"


@functools.cache
def _source_digest() -> str:
    """The digest of the device code and of the modules that compile it: after an edit, kernels are compiled again."""
    device = {file.name: file.read_bytes() for file in (*SOURCES.glob("*.cu"), *SOURCES.glob("*.cuh"))}
    return digest_of(device | closure([__name__]))


@functools.cache
def _toolchain() -> str:
    return ", ".join(f"{name} {_version(name)}" for name in ("cuda-core", "cuda-bindings")) + f", {_nvrtc()}"


def _nvrtc() -> str:
    """NVRTC's version: of pip's package or, without it, of the library that the loader finds."""
    if (version := _version("nvidia-cuda-nvrtc")) is not None:
        return f"nvrtc {version}"
    from cuda.bindings import nvrtc

    _, major, minor = nvrtc.nvrtcVersion()
    return f"nvrtc {major}.{minor}"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
