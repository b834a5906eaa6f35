"""Compiles the CUDA that TileLang generates to a cubin: TileLang's nvcc command, with fewer headers to read.

Most of what nvcc takes for a kernel goes into headers. The changes here leave every instruction as it is
(tests/kernels/tilelang/build/test_nvcc.py):

- C++17 instead of C++20, in which the same headers draw in more of the C++ library;
- wgmma: TileLang's header defines each shape and type of it that there is, on top of two headers of CUTLASS. The kernel
  uses two or three of them, which are defined here instead (``wgmma.mma_async`` of the PTX ISA);
- atomic operations: TileLang's header draws in those of CUDA's C++ library; a forward kernel has one, which counts
  tiles;
- other headers of which device code uses nothing (headers.py);
- line numbers: they point into a file that is gone, and made up three quarters of what is kept on disk.

A source that does not compile with these changes is compiled with TileLang's own headers. TileLang is not imported.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

from . import toolkit
from .headers import without_unused, write_stand_ins

OPTIONS = ("--cubin", "-O3", "-std=c++17", "--use_fast_math")

HEADER = "#include <tl_templates/cuda/instruction/wgmma.h>\n"
ATOMICS = "#include <tl_templates/cuda/atomic.h>\n"
DRAW = "AtomicAddRet((&(tickets[0])), 1)"  # of the number of a tile (queue.py)
# What TileLang's comes to, by ``cuda::atomic_ref``.
OWN_DRAW = """\
TL_DEVICE int AtomicAddRet(int *counter, int amount) {
  int before;
  asm volatile("atom.add.relaxed.gpu.s32 %0,[%1],%2;" : "=r"(before) : "l"(counter), "r"(amount) : "memory");
  return before;
}
"""
# Products of 16-bit operands, the first from shared memory (ss) or registers (rs), with float32 sums.
PRODUCT = re.compile(
    r"tl::wgmma_(?P<kind>ss|rs)<tl::DataType::(?P<a>\w+), tl::DataType::(?P<b>\w+), tl::DataType::kFloat32, "
    r"64, (?P<columns>\d+), 16, (?P<a_down>true|false), (?P<b_down>true|false), 1, 1>"
)
PTX = {"kFloat16": "f16", "kBFloat16": "bf16"}
FIRST = {"ss": "uint64_t a", "rs": "const uint32_t *a"}


def cubin(code: str, arch: str) -> bytes:
    """Compiles a kernel's source.

    Raises:
        RuntimeError: nvcc refuses it; the message has what nvcc says. Or there is no nvcc.
    """
    shortened = without_unused(prepared(code))
    with tempfile.TemporaryDirectory() as folder:
        write_stand_ins(shortened, Path(folder))
        found = _run(shortened, arch, Path(folder), [f"-I{folder}"])
    if isinstance(found, str):  # perhaps a use of a header that has a stand-in
        with tempfile.TemporaryDirectory() as folder:
            found = _run(code, arch, Path(folder), [])
    if isinstance(found, str):
        raise RuntimeError(found)
    return found


def _run(code: str, arch: str, folder: Path, first: list[str]) -> bytes | str:
    """The cubin, or what nvcc says of a source that it refuses."""
    source, result = folder / "kernel.cu", folder / "kernel.cubin"
    source.write_text(code)
    headers = [*first, *(f"-I{path}" for path in toolkit.headers_of_kernels())]
    command = [toolkit.nvcc(), f"-ccbin={toolkit.host_compiler()}", f"-arch={arch}", *OPTIONS, *headers]
    run = subprocess.run(
        [*command, "-o", str(result), str(source)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    if run.returncode != 0:
        return f"nvcc ended with exit status {run.returncode}:\n{run.stdout}\n{' '.join(command)}"
    return result.read_bytes()


def prepared(code: str) -> str:
    """The source with the package's own definitions in the place of TileLang's headers of many more."""
    return with_own_draw(with_own_products(code))


def with_own_products(code: str) -> str:
    """The source with definitions of the products that it uses instead of TileLang's of all; of fp8 it keeps those."""
    products = [match for match in PRODUCT.finditer(code) if match["a"] == match["b"] and match["a"] in PTX]
    if HEADER not in code or len(products) != code.count("tl::wgmma_"):
        return code
    definitions = sorted({_definition(match) for match in products})
    declarations = [
        "template <DataType, DataType, DataType, int, int, int, bool, bool, int, int>\n"
        f"TL_DEVICE void wgmma_{kind}({first}, uint64_t b, uint32_t *sums, bool add);"
        for kind, first in FIRST.items()
    ]
    own = "\n".join(["namespace tl {", *declarations, *definitions, "}"])
    return code.replace(HEADER, f"#include <tl_templates/cuda/common.h>\n{own}\n")


def with_own_draw(code: str) -> str:
    """The source with a definition of the drawing of tickets instead of TileLang's of all atomic operations.

    One that has others, or none, keeps those, and so does one that uses `cuda_cast`, which comes with them.
    """
    draws = code.count(DRAW)
    if ATOMICS not in code or draws == 0 or code.lower().count("atomic") != 1 + draws or "cuda_cast" in code:
        return code
    return code.replace(ATOMICS, OWN_DRAW)


def _definition(product: re.Match[str]) -> str:
    """A warpgroup's 64 rows of one product: sums (+)= a b, columns / 2 of the sums in each thread.

    The operands of the instruction, in order: the sums, a (a descriptor or four registers), b's descriptor, and whether
    the sums are added to.
    """
    kind, in_registers = product["kind"], product["kind"] == "rs"
    sums = int(product["columns"]) // 2
    first = [f"%{sums + i}" for i in range(4 if in_registers else 1)]
    b = sums + len(first)
    down = [product["b_down"]] if in_registers else [product["a_down"], product["b_down"]]
    shape = f"m64n{product['columns']}k16.f32.{PTX[product['a']]}.{PTX[product['b']]}"
    a = f"{{{', '.join(first)}}}" if in_registers else first[0]
    signs_and_directions = ", ".join(["1", "1", *(str(int(each == "true")) for each in down)])
    instruction = (
        f"{{ .reg .pred p; setp.ne.b32 p, %{b + 1}, 0; wgmma.mma_async.sync.aligned.{shape} "
        f"{{{', '.join(f'%{i}' for i in range(sums))}}}, {a}, %{b}, p, {signs_and_directions}; }}"
    )
    outputs = ", ".join(f'"+f"(c[{i}])' for i in range(sums))
    inputs = ", ".join(f'"r"(a[{i}])' for i in range(4)) if in_registers else '"l"(a)'
    return (
        f"template <> TL_DEVICE void {product[0].removeprefix('tl::').replace('tl::', '')}"
        f"({FIRST[kind]}, uint64_t b, uint32_t *sums, bool add) {{\n"
        "  float *c = reinterpret_cast<float *>(sums);\n"
        f'  asm volatile("{instruction}" : {outputs} : {inputs}, "l"(b), "r"(static_cast<int>(add)));\n'
        "}"
    )
