"""Loading compiled kernels and calling them; imports neither TileLang nor its compiler."""

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

from ....call.facts import AttentionCall
from ....call.fp8 import FP8
from ....variant.key import program
from ...cache.sources import digest
from ...cache.store import kernel_cache
from .amd.config import AmdConfig
from .defaults import Config, default

TILELANG = __package__.rpartition(".")[0]


@functools.cache
def forward_function(call: AttentionCall, config: Config | None = None) -> Callable[..., Any]:
    """The compiled forward kernel of a call, from the cache on disk or compiled now (some seconds).

    Args:
        call: the static facts; ``needs_grad`` does not matter.
        config: tile sizes; None takes the default.
    """
    path = ensure_compiled(call, config or default(call))
    return _load(path)["forward"]


def ensure_compiled(call: AttentionCall, config: Config) -> Path:
    """The shared library of a call's forward kernel, compiled if the cache does not hold it.

    For fp8 and packed sequences that of the kernel in front of it as well.
    """

    def build(path: Path) -> None:
        from ..build.compile import build_library
        from .schedules import kernel_of

        build_library(kernel_of(call, config), call.arch, path)

    if call.dtype == FP8:
        ensure_transpose_compiled(call)
    if call.packed:
        ensure_plan_compiled(call.arch)
    return kernel_cache().find_or_build(cache_key(call, config), build)


@functools.cache
def transpose_function(call: AttentionCall) -> Callable[..., Any]:
    """The compiled kernel that lays out fp8 values for the forward kernel: ``transpose(v, transposed)``."""
    return _load(ensure_transpose_compiled(call))["transpose"]


def ensure_transpose_compiled(call: AttentionCall) -> Path:
    """The shared library of :func:`transpose_function`."""

    def build(path: Path) -> None:
        from ..build.compile import build_library
        from .transpose_fp8 import transpose_kernel

        build_library(transpose_kernel(call), call.arch, path)

    return kernel_cache().find_or_build(transpose_key(call), build)


def transpose_key(call: AttentionCall) -> str:
    """All that decides what the compiled transposition is: of the call, head_dim_v and the architecture alone."""
    return f"transpose_fp8 | {call.head_dim_v} {call.arch} | {source_digest('forward.transpose_fp8')} | {_toolchain()}"


@functools.cache
def plan_function(arch: str) -> Callable[..., Any]:
    """The compiled planning kernel of packed sequences (plan_kernel.py), from the cache on disk or compiled now."""
    return _load(ensure_plan_compiled(arch))["plan"]


def ensure_plan_compiled(arch: str) -> Path:
    """The shared library of :func:`plan_function`."""

    def build(path: Path) -> None:
        from ..build.compile import build_library
        from ..packed.plan_kernel import plan_kernel

        build_library(plan_kernel(arch), arch, path)

    return kernel_cache().find_or_build(plan_key(arch), build)


def plan_key(arch: str) -> str:
    """All that decides what the compiled planning kernel is: of a call, the architecture alone."""
    return f"sequence_plan | {arch} | {source_digest('packed.plan_kernel')} | {_toolchain()}"


def cache_key(call: AttentionCall, config: Config) -> str:
    """All that decides what the compiled kernel is."""
    facts = (
        f"{call.dtype} {call.head_dim} {call.head_dim_v} sink={call.sink} lse={call.return_lse} "
        f"aligned={call.aligned} dropout={call.dropout} {call.arch}"
    )
    if call.packed:
        facts += " packed"
    text = config.kernel_text if isinstance(config, AmdConfig) else str(config)
    source = source_digest("forward.schedules")
    return f"forward | {facts} | {text} | {program(call.variant)} | {source} | {_toolchain()}"


def source_digest(module: str) -> str:
    """Of the code that generates the kernels of a module of this package, so that editing it recompiles them.

    Args:
        module: its name below this package: the one that holds the function that returns the TileLang function.
    """
    return digest(f"{TILELANG}.{module}", f"{TILELANG}.build.compile")


@functools.cache
def _toolchain() -> str:
    """Versions of TileLang and of the CUDA toolkit (or HIP) that compile the kernels."""
    return f"tileattn {_version('tileattn')}, tilelang {_version('tilelang')}, {_device_compiler()}"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _device_compiler() -> str:
    """The toolkit's version file, read without starting the compiler."""
    nvcc = os.environ.get("CUDACXX") or shutil.which("nvcc")
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or (nvcc and str(Path(nvcc).resolve().parents[1]))
    if home and (Path(home) / "version.json").is_file():
        versions = json.loads((Path(home) / "version.json").read_text())
        return f"cuda {versions.get('cuda_nvcc', versions.get('cuda', {})).get('version')}"
    return f"cuda {_version('nvidia-cuda-nvcc')}"


@functools.cache
def _runtime() -> Any:
    """TVM's runtime and TileLang's additions to it (tensor maps), without TileLang's Python package."""
    import tvm_ffi

    spec = importlib.util.find_spec("tilelang")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("tilelang is not installed: pip install tilelang")
    for name in ("libtvm_runtime.so", "libtilelang.so"):
        ctypes.CDLL(str(Path(spec.origin).parent / "lib" / name), mode=ctypes.RTLD_GLOBAL | os.RTLD_LAZY)
    return tvm_ffi


def _load(path: Path) -> Any:
    return _runtime().load_module(str(path))
