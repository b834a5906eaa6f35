"""Makes a shared library of generated sources: nvcc and the host's compiler at the same time, then the linker.

Imports no TileLang, whose headers it needs.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from . import nvcc, toolkit
from .sources import HOST_OPTIONS, Sources, image_with

IMAGE = "__tvm_ffi__library_bin"  # the name by which TVM's loader finds the image
ASSEMBLY = f"""\
.section .rodata
.globl {IMAGE}
.type {IMAGE}, %object
.balign 16
{IMAGE}:
.incbin "image"
.size {IMAGE}, .-{IMAGE}
.section .note.GNU-stack,"",%progbits
"""


def build_library(sources: Sources, arch: str, path: Path) -> None:
    """Compiles the sources of a kernel for NVIDIA's GPUs into the shared library `path`.

    Raises:
        RuntimeError: a compiler refuses them, or there is none; the message has what it says.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "host.c").write_text(sources.host)
        (folder / "image.s").write_text(ASSEMBLY)
        headers = [f"-I{each}" for each in toolkit.headers_of_hosts()]
        toolkit.nvcc()  # an error before anything starts: without it the rest is of no use
        compiler = [toolkit.host_compiler(), "-fPIC"]
        host = _start([*compiler, "-c", *HOST_OPTIONS, *headers, "host.c", "-o", "host.o"], folder)
        try:
            (folder / "image").write_bytes(image_with(sources.image, nvcc.cubin(sources.device, arch)))
        except BaseException:
            host.kill()
            host.communicate()
            raise
        _check(host, host.communicate()[0])
        linker = _start([*compiler, "-shared", "host.o", "image.s", "-o", str(path.absolute())], folder)
        _check(linker, linker.communicate()[0])


def _start(command: Sequence[str], folder: Path) -> subprocess.Popen[str]:
    try:
        return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    except OSError as error:
        raise RuntimeError(
            f"the host's compiler {command[0]!r} cannot be run ({error}); CXX and CC name one program, without options"
        ) from error


def _check(process: subprocess.Popen[str], said: str) -> None:
    if process.returncode != 0:
        command = " ".join(map(str, process.args))  # type: ignore[arg-type]
        raise RuntimeError(f"the host's compiler ended with exit status {process.returncode}:\n{said}\n{command}")
