"""The libraries that load a kernel: TVM's runtime and what TileLang adds to it, without TileLang's Python package.

Where TileLang is installed, its own libraries are taken. A bundle brings TVM's runtime and the one function of
TileLang's library that kernels call (``tensor_maps.c``), for environments without TileLang.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import threading
from pathlib import Path
from typing import Any

from . import installed
from .manifest import RUNTIME

OF_TILELANG = ("libtvm_runtime.so", "libtilelang.so")
TENSOR_MAPS = "libtileattn_tensor_maps.so"
DRIVER = "libcuda.so.1"
_loading = threading.Lock()


def runtime() -> Any:
    """The module ``tvm_ffi``, after the libraries that its loader of kernels needs.

    Raises:
        ModuleNotFoundError: neither TileLang nor a bundle with these libraries is installed.
    """
    with _loading:  # a library that registers a function twice fails
        return _loaded()


@functools.cache
def _loaded() -> Any:
    import tvm_ffi

    if folder := tilelang_libraries():
        for name in OF_TILELANG:
            _load(folder / name)
        return tvm_ffi
    bundle = installed.runtime()
    if bundle is None:
        raise ModuleNotFoundError("no library loads compiled kernels: neither TileLang nor a bundle of kernels has one")
    for name in bundle.manifest.runtime:
        library = _load(bundle.folder / RUNTIME / name)
        if name == TENSOR_MAPS and library.tileattn_register_tensor_maps(*_of_driver()) != 0:
            raise RuntimeError(f"{bundle.folder / RUNTIME / name} cannot be registered with apache-tvm-ffi")
    return tvm_ffi


def tilelang_libraries() -> Path | None:
    """The folder of TileLang's libraries, or None where it is not installed. TileLang is not imported."""
    spec = importlib.util.find_spec("tilelang")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent / "lib"


def _load(path: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL | os.RTLD_LAZY)


def _of_driver() -> tuple[ctypes.c_void_p, ctypes.c_void_p]:
    """The addresses of the functions of CUDA's driver that make tensor maps and name errors; NULL without a driver."""
    try:
        driver = ctypes.CDLL(DRIVER)
        functions = driver.cuTensorMapEncodeTiled, driver.cuGetErrorName
    except (OSError, AttributeError):
        return ctypes.c_void_p(), ctypes.c_void_p()
    return ctypes.cast(functions[0], ctypes.c_void_p), ctypes.cast(functions[1], ctypes.c_void_p)
