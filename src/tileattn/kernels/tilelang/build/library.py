"""Libraries of compiled kernels: their cache keys, and loading. Imports neither TileLang nor its compiler."""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import importlib.util
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ...cache.sources import digest
from ...cache.store import kernel_cache
from .collection import collection_paused
from .progress import progress_line

TILELANG = __package__.rpartition(".")[0]


def key_of(facts: str, module: str) -> str:
    """A kernel's key in the cache, from all that decides what it is compiled to.

    Args:
        facts: of the kernel, which name it, too.
        module: below :data:`TILELANG`, the one that has the function that returns the TileLang function. Its sources
            are in the key, so that editing them recompiles its kernels.
    """
    return f"{facts} | {digest(f'{TILELANG}.{module}', f'{TILELANG}.build.compile')} | {toolchain()}"


def find_or_compile(key: str, kernel: Callable[[], Any], arch: str) -> Path:
    """The shared library of a kernel, from the cache on disk or compiled now (some seconds).

    Args:
        key: as :func:`key_of` makes it.
        kernel: makes the TileLang function; called where the cache does not hold the library.
        arch: of the device.
    """

    def build(path: Path) -> None:
        with progress_line(facts_of(key)), collection_paused():
            from .compile import build_library

            build_library(kernel(), arch, path)

    return kernel_cache().find_or_build(key, build)


def facts_of(key: str) -> str:
    """The kernel that a key is of, in a few words."""
    return " ".join(key.split(" | ")[:2])


@functools.cache
def toolchain() -> str:
    """Versions of TileLang and of the CUDA toolkit (or HIP) that compile the kernels."""
    return f"tileattn {version('tileattn')}, tilelang {version('tilelang')}, {device_compiler()}"


def version(package: str) -> str:
    """The version of an installed package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def device_compiler() -> str:
    """The toolkit's version file, read without starting the compiler."""
    nvcc = os.environ.get("CUDACXX") or shutil.which("nvcc")
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or (nvcc and str(Path(nvcc).resolve().parents[1]))
    if home and (Path(home) / "version.json").is_file():
        versions = json.loads((Path(home) / "version.json").read_text())
        return f"cuda {versions.get('cuda_nvcc', versions.get('cuda', {})).get('version')}"
    return f"cuda {version('nvidia-cuda-nvcc')}"


@functools.cache
def runtime() -> Any:
    """TVM's runtime and TileLang's additions to it (tensor maps), without TileLang's Python package."""
    import tvm_ffi

    spec = importlib.util.find_spec("tilelang")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("tilelang is not installed: pip install tilelang")
    for name in ("libtvm_runtime.so", "libtilelang.so"):
        ctypes.CDLL(str(Path(spec.origin).parent / "lib" / name), mode=ctypes.RTLD_GLOBAL | os.RTLD_LAZY)
    return tvm_ffi


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
