"""Compiles HIP source for gfx942 to a code object, with clang and ROCm's headers; runs nothing.

On Debian: ``apt-get install clang-19 lld-19 rocm-device-libs libamdhip64-dev``. Debian's HIP is 5.2, older than
TileLang requires. Its header for bfloat16 has another name. The header of rocWMMA is missing, but nothing of it is
used. The device library for gfx942 is that of gfx940, its predecessor with the same instructions.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import tilelang

CLANG = next((path for name in ("clang-19", "clang-20", "clang-18", "clang") if (path := shutil.which(name))), None)
HEADERS = Path("/usr/include/hip/hip_runtime.h")
DEVICE_LIBRARIES = Path("/usr/lib/x86_64-linux-gnu/amdgcn/bitcode")
MISSING = CLANG is None or not HEADERS.is_file() or not DEVICE_LIBRARIES.is_dir()
REASON = "needs clang-19, lld-19, rocm-device-libs and libamdhip64-dev"
# Templates for products that are no inline instructions, and for printing: they need headers of newer releases.
UNUSED = re.compile(r"^#include <tl_templates/hip/(gemm|debug)\.h>$", re.MULTILINE)


@dataclass(frozen=True)
class Usage:
    """What a thread of a kernel uses: registers, bytes of scratch memory, and registers that are spilled."""

    vgprs: int
    agprs: int
    scratch: int
    spilled: int
    scalars_spilled: int


def compile_hip(source: str, folder: Path) -> Usage:
    """Compiles a kernel to ``folder/kernel.co``; fails with clang's message."""
    assert CLANG is not None
    (folder / "hip").mkdir(exist_ok=True)
    (folder / "rocwmma").mkdir(exist_ok=True)
    (folder / "hip" / "hip_bf16.h").write_text("#include <hip/hip_bfloat16.h>\n")
    (folder / "rocwmma" / "rocwmma.hpp").write_text("")
    (folder / "kernel.hip").write_text(UNUSED.sub("", source))
    command = [
        *(CLANG, "-x", "hip", "--cuda-device-only", "--no-gpu-bundle-output", "--offload-arch=gfx942"),
        *(f"--rocm-device-lib-path={_device_libraries(folder)}", "--rocm-path=/usr", f"-I{folder}"),
        *(f"-I{Path(tilelang.__file__).parent / 'src'}", "-D__HIP_PLATFORM_AMD__"),
        *("-O3", "-ffast-math", "-std=c++17", "-w", "-Rpass-analysis=kernel-resource-usage"),
        *("-c", "kernel.hip", "-o", "kernel.co"),
    ]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-4000:]
    assert (folder / "kernel.co").read_bytes()[:4] == b"\x7fELF"

    def number(name: str) -> int:
        match = re.search(rf"remark: +{re.escape(name)}: (\d+)", result.stderr)
        assert match is not None, (name, result.stderr)
        return int(match[1])

    return Usage(
        number("VGPRs"),
        number("AGPRs"),
        number("ScratchSize [bytes/lane]"),
        number("VGPRs Spill"),
        number("SGPRs Spill"),
    )


def _device_libraries(folder: Path) -> Path:
    """A folder with the installed ones, and gfx940's under gfx942's name where that is not there."""
    libraries = folder / "bitcode"
    if not libraries.exists():
        libraries.mkdir()
        for file in DEVICE_LIBRARIES.glob("*.bc"):
            (libraries / file.name).symlink_to(file)
        wanted = libraries / "oclc_isa_version_942.bc"
        if not wanted.exists():
            wanted.symlink_to(DEVICE_LIBRARIES / "oclc_isa_version_940.bc")
    return libraries
