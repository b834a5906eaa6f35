"""From a rung's source to a cubin, by NVRTC through cuda-core."""

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
INSTALL = "pip install 'tileattn[mma]'"
_IMPORTING = threading.Lock()  # cuda.core 1.2 cannot be imported by two threads at a time


@functools.cache
def has_compiler() -> bool:
    """Whether cuda-core is installed."""
    try:
        return importlib.util.find_spec("cuda.core") is not None
    except ModuleNotFoundError:  # not even the package `cuda`
        return False


def build_cubin(kernel: Kernel, arch: str, path: Path) -> str:
    """Compiles a kernel for an architecture into `path`; needs no GPU. Returns what the assembler says of it."""
    with _IMPORTING:
        from cuda.core import Program, ProgramOptions

    options = ProgramOptions(
        name=f"{kernel.variant.rung}.cu",
        arch=arch,
        std="c++17",
        define_macro=[(name, str(value)) for name, value in kernel.macros().items()],
        include_path=[str(SOURCES)],
        ptxas_options=["-v"],
    )
    log = io.StringIO()
    cubin = Program((SOURCES / f"{kernel.variant.rung}.cu").read_text(), "c++", options).compile("cubin", logs=log)
    path.write_bytes(cubin.code)
    return log.getvalue()


def cache_key(kernel: Kernel, arch: str) -> str:
    """All that decides what the compiled kernel is."""
    return f"mma | {kernel} | {arch} | {_source_digest()} | {_toolchain()}"


@functools.cache
def _source_digest() -> str:
    """Of the device code and of what compiles it, so that editing them compiles anew."""
    device = {file.name: file.read_bytes() for file in (*SOURCES.glob("*.cu"), *SOURCES.glob("*.cuh"))}
    return digest_of(device | closure([__name__]))


@functools.cache
def _toolchain() -> str:
    return (
        ", ".join(f"{name} {_version(name)}" for name in ("tileattn", "cuda-core", "cuda-bindings")) + f", {_nvrtc()}"
    )


def _nvrtc() -> str:
    """Which NVRTC compiles: pip's package, or else the release of the one that the loader finds."""
    if (found := _version("nvidia-cuda-nvrtc")) is not None:
        return f"nvrtc {found}"
    from cuda.bindings import nvrtc

    _, major, minor = nvrtc.nvrtcVersion()
    return f"nvrtc {major}.{minor}"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
