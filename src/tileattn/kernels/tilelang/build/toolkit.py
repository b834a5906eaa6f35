"""Where the compilers and TileLang's headers are, found as TileLang finds them, without importing it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
from pathlib import Path

HOST_COMPILERS = ("g++", "clang++", "c++")
USUAL = (Path("/usr/local/cuda"), Path("/opt/nvidia/hpc_sdk/Linux_x86_64"))


def cuda_home() -> Path | None:
    """The folder of the CUDA toolkit; None without one."""
    named = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    home = Path(named) if named else _of_path() or _of_pip() or next(filter(Path.exists, USUAL), None)
    return home if home is not None and home.exists() else None


def _of_path() -> Path | None:
    found = shutil.which("nvcc")
    if found is None:
        return None
    nvcc = os.path.abspath(found)  # PATH may have relative folders
    # NVIDIA's HPC SDK has its compilers one folder further down.
    levels = 2 if "hpc_sdk" in nvcc.lower() and "cuda" not in nvcc.lower() else 1
    beside = Path(nvcc).parents[levels]
    # A link elsewhere leads to the toolkit, unless the link's own folder is one.
    return beside if (beside / "include" / "cuda_runtime.h").exists() else Path(nvcc).resolve().parents[levels]


def _of_pip() -> Path | None:
    """The toolkit in the package nvidia-cuda-nvcc."""
    try:
        files = importlib.metadata.files("nvidia-cuda-nvcc") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((Path(str(file.locate())).parents[1] for file in files if file.name == "nvcc"), None)


def nvcc() -> str:
    """The path of nvcc.

    Raises:
        RuntimeError: there is none.
    """
    home = cuda_home()
    path = None if home is None else home / "bin" / "nvcc"
    if path is not None and path.is_file():
        return str(path)
    raise RuntimeError(
        f"there is no nvcc, not {path or 'where TileLang looks for it'}: install a CUDA toolkit or, for pip's, "
        "tileattn[cuda]"
    )


def host_compiler() -> str:
    """The host's C and C++ compiler.

    Raises:
        RuntimeError: there is none.
    """
    named = os.environ.get("CXX") or os.environ.get("CC")
    found = named or next((path for name in HOST_COMPILERS if (path := shutil.which(name))), None)
    if found is None:
        raise RuntimeError(f"there is no host compiler ({', '.join(HOST_COMPILERS)}): install g++, or set CXX")
    return found


def headers_of_kernels() -> list[Path]:
    """The folders of headers that TileLang's source for a device includes."""
    package = _package("tilelang")
    templates, cutlass = os.environ.get("TL_TEMPLATE_PATH"), os.environ.get("TL_CUTLASS_PATH")
    return [Path(templates or package / "src"), Path(cutlass or package / "3rdparty" / "cutlass" / "include")]


def headers_of_hosts() -> list[Path]:
    """The folders of headers that TileLang's source for the host includes."""
    return [_package("tilelang") / "3rdparty" / "tvm" / "include", _package("tvm_ffi") / "include"]


def _package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"{name} is not installed")
    return Path(spec.origin).parent
