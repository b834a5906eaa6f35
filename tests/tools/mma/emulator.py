"""Runs the ladder's kernels on a CPU: their sources, compiled with g++ against emulator.h."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import torch

from tileattn.kernels.mma import rungs

COMPILER = shutil.which("g++")
NVCC = shutil.which("nvcc")
HERE = Path(__file__).parent
SOURCES = Path(rungs.__file__).parent
POINTERS, NUMBERS = 5, 14  # of the kernel's parameters: tensors, then sizes and strides; then the scale


class Kernel:
    """One kernel of the ladder, called with the arguments of a launch; tensors are on the CPU."""

    def __init__(self, kernel: rungs.Kernel, folder: Path) -> None:
        self.threads = kernel.tiles.threads
        macros = "".join(f"#define {name} {value}\n" for name, value in kernel.macros().items())
        names = ["q", "k", "v", "o", "lse", *(f"n{i}" for i in range(NUMBERS)), "scale"]
        kinds = ["const Element*"] * 3 + ["Element*", "float*"] + ["long long"] * NUMBERS + ["double"]
        declared = ", ".join(f"{kind} {name}" for kind, name in zip(kinds, names, strict=True))
        program = f"""{macros}#include "{HERE / "emulator.h"}"
#include "{SOURCES / kernel.options.rung}.cu"
extern "C" void launch({declared}, long long blocks) {{
  thread_count = THREADS;
  for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) run_block([&] {{ attention({", ".join(names)}); }});
}}
"""
        source = folder / f"{abs(hash(kernel))}.cpp"
        source.write_text(program)
        library = source.with_suffix(".so")
        assert COMPILER is not None
        command = [COMPILER, "-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-o", str(library), str(source)]
        result = subprocess.run(command, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr[-4000:]
        self.function = ctypes.CDLL(str(library)).launch

    def __call__(self, blocks: int, *arguments: torch.Tensor | int | float | None) -> None:
        *tensors, scale = arguments
        passed = [
            ctypes.c_void_p(x.data_ptr() if isinstance(x, torch.Tensor) else x)
            if index < POINTERS
            else ctypes.c_longlong(x)
            for index, x in enumerate(tensors)
        ]
        self.function(*passed, ctypes.c_double(scale), ctypes.c_longlong(blocks))
