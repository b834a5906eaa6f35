"""Headers that nvcc need not read for TileLang's sources, and what stands in their place.

CUTLASS and TileLang draw in the C++ library's streams, containers and algorithms, and all shapes of wgmma, of which
device code uses nothing. A folder of headers with the same names comes before them; nvcc then reads 2.5 of 4.8 MB, and
takes 3.1 instead of 4.5 seconds of processor time for a forward kernel, with the same instructions
(tests/kernels/tilelang/build/test_nvcc.py).
"""

from __future__ import annotations

from pathlib import Path

# Of <cute/arch/mma_sm90_gmma.hpp>, TileLang's intrin.h calls these three (PTX ISA: wgmma.fence, commit_group and
# wait_group); the rest of it are the shapes of wgmma.mma_async.
WARPGROUP = """\
#pragma once
namespace cute {
__device__ __forceinline__ void warpgroup_arrive() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void warpgroup_commit_batch() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int N> __device__ __forceinline__ void warpgroup_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
}
"""
GMMA = "cute/arch/mma_sm90_gmma.hpp"
# Headers that define the products of whole tiles by CUTLASS, or all shapes of wgmma.
OF_PRODUCTS = ("tl_templates/cuda/instruction/wgmma.h", "tl_templates/cuda/gemm")
# Of the C++ library, for printing and sorting on the host.
OF_THE_HOST = ("iostream", "iomanip", "functional", "algorithm")
# Includes that TileLang always writes, and parts of names that say that a source uses them.
UNUSED = {
    "#include <tl_templates/cuda/scan.h>\n": ("Scan", "Cum"),
    "#include <tl_templates/cuda/debug.h>\n": ("debug_print", "device_assert", "assert(", "printf"),
}


def without_unused(code: str) -> str:
    """The source without the includes of headers that it does not use."""
    for line, names in UNUSED.items():
        rest = code.replace(line, "")
        if not any(name in rest for name in names):
            code = rest
    return code


def write_stand_ins(code: str, folder: Path) -> None:
    """Writes the headers that a source may have in place of larger ones into a folder, which nvcc searches first."""
    for name in OF_THE_HOST:
        (folder / name).touch()
    if not any(header in code for header in OF_PRODUCTS):
        file = folder / GMMA
        file.parent.mkdir(parents=True)
        file.write_text(WARPGROUP)
