"""Runs TileLang kernels on a CPU: the code that TileLang generates for a GPU (sm_80), compiled with g++.

Threads, warps, shared memory, barriers, matrix instructions and asynchronous copies behave as on the GPU, one block of
threads after another. It is slow, and it shows neither races nor missing waits; but it runs the generated code itself,
with its layouts, its masks and its ends of tiles. It needs Linux, TileLang and g++ 12 or newer.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .kernel import Kernel


def emulate(function: Any, *, folder: Path | None = None) -> Kernel:
    """Makes a TileLang kernel run on the CPU, in the place of ``tilelang.compile(function)``.

    The code is what TileLang generates for an NVIDIA GPU of compute capability 8.0. Generating and compiling it takes
    some seconds. The result is called with CPU tensors, and writes into those of them that are outputs; a causal kernel
    over 2 heads of 200 tokens takes less than a second. Races and missing waits do not show, and times mean nothing.

    It runs on Linux (x86-64 is tested; on Windows under WSL 2, on a Mac in a Linux container), with TileLang and g++ 12
    or newer. It knows the instructions that matrix products, reductions and copies in float16, bfloat16 and float32
    compile to; a kernel that uses others is refused.

    Args:
        function: a function under ``@T.prim_func`` with one ``T.Kernel``.
        folder: where to keep the generated C++ program and its library, to read; by default no file is left.

    Returns:
        A callable that takes the function's arguments: CPU tensors of the declared dtypes and shapes, and numbers.

    Raises:
        RuntimeError: another system, no g++, or a kernel with an instruction that the emulator lacks.
        ImportError: TileLang is not installed.
        TypeError: not a function under ``@T.prim_func``.
    """
    if sys.platform != "linux":
        raise RuntimeError(
            f"emulate() runs on Linux, and this is {sys.platform}; use WSL 2 on Windows, a Linux container on a Mac"
        )
    if importlib.util.find_spec("tilelang") is None:
        raise ImportError("emulate() needs TileLang, which is not installed: pip install tilelang")
    if shutil.which("g++") is None:
        raise RuntimeError(
            "emulate() needs g++ 12 or newer, and none was found: apt install g++, or dnf install gcc-c++"
        )
    from tvm.tirx import PrimFunc

    from .kernel import Kernel

    if not isinstance(function, PrimFunc):
        raise TypeError(f"function must be one under @T.prim_func, got {type(function).__name__}")
    return Kernel(function, folder)
