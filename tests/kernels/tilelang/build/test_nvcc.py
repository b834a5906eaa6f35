"""The shortened source that nvcc gets in place of TileLang's: nvcc makes the same machine code of it."""

from __future__ import annotations

import struct
import subprocess
from pathlib import Path

import pytest
import torch

pytest.importorskip("tilelang")
import tvm_ffi
from tilelang.env import CUTLASS_INCLUDE_DIR, TILELANG_TEMPLATE_PATH

from tests.tools.lowering import find_nvcc, lower
from tileattn.call.facts import AttentionCall, BackwardCall
from tileattn.kernels.tilelang.backward.kernels import kernel
from tileattn.kernels.tilelang.build import nvcc
from tileattn.kernels.tilelang.build.compile import build_library, device_source
from tileattn.kernels.tilelang.forward.config import HopperConfig
from tileattn.kernels.tilelang.packed.plan_kernel import plan_kernel

ARCH = "sm_90a"
KERNEL = 'extern "C" __global__ void kernel(float* x) { x[0] = 1; }\n'

needs_nvcc = pytest.mark.skipif(find_nvcc() is None, reason="there is no nvcc (pip install 'tileattn[cuda]')")


def forward_source(q_in_registers: bool) -> str:
    call = AttentionCall(torch.bfloat16, 64, 64, arch=ARCH)
    return lower(call, HopperConfig(128, 80, q_in_registers=q_in_registers))


def backward_source() -> str:
    call = AttentionCall(torch.float16, 64, 64, "Causal()", needs_grad=True, arch=ARCH)
    return device_source(kernel(BackwardCall(call, (True, True, True, False)), "main"), ARCH)


def sections(cubin: bytes) -> dict[str, bytes]:
    """The machine code of a cubin, which is an ELF file, and its constants."""
    (table,) = struct.unpack_from("<Q", cubin, 40)
    size, count, index_of_names = struct.unpack_from("<HHH", cubin, 58)
    headers = [struct.unpack_from("<IIQQQQ", cubin, table + i * size) for i in range(count)]
    start = headers[index_of_names][4]
    by_name = {}
    for name, _, _, _, offset, length in headers:
        text = cubin[start + name : cubin.index(b"\0", start + name)].decode()
        if text.startswith((".text.", ".nv.constant0.")):
            by_name[text] = cubin[offset : offset + length]
    return by_name


def as_tilelang_does(code: str, folder: Path) -> bytes:
    """Compiled by the command that TileLang 0.1.15 runs."""
    source, result = folder / "kernel.cu", folder / "kernel.cubin"
    source.write_text(code)
    options = ["--cubin", "-O3", "-lineinfo", f"-arch={ARCH}", "-std=c++20", "--use_fast_math"]
    headers = [f"-I{TILELANG_TEMPLATE_PATH}", f"-I{CUTLASS_INCLUDE_DIR}"]
    subprocess.run([str(find_nvcc()), *options, *headers, "-o", str(result), str(source)], check=True)
    return result.read_bytes()


@needs_nvcc
@pytest.mark.parametrize(
    "of",
    [
        # Lowering a kernel and compiling it twice takes 6 seconds and more.
        pytest.param(lambda: forward_source(False), id="forward", marks=pytest.mark.slow),
        pytest.param(backward_source, id="backward", marks=pytest.mark.slow),
    ],
)
def test_the_machine_code_is_the_same(of: object, tmp_path: Path) -> None:
    code = of()  # type: ignore[operator]
    assert nvcc.with_own_products(code) != code
    assert (nvcc.with_own_draw(code) != code) is ("forward_kernel" in code)
    expected = sections(as_tilelang_does(code, tmp_path))
    assert any(name.startswith(".text.") and len(text) > 10_000 for name, text in expected.items())
    assert sections(nvcc.cubin(code, ARCH)) == expected


@pytest.mark.parametrize("q_in_registers", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_product_is_defined_once(q_in_registers: bool) -> None:
    code = forward_source(q_in_registers)
    own = nvcc.with_own_products(code)
    assert nvcc.HEADER not in own
    used = {match[0] for match in nvcc.PRODUCT.finditer(code)}
    assert len(used) == 2  # S = Q K^T and O += P V
    assert own.count("template <> TL_DEVICE void wgmma_") == len(used)
    assert own.endswith(code.split(nvcc.HEADER)[1])


def test_what_is_not_understood_stays() -> None:
    """Sources with unknown products stay as they are. For those of fp8 see test_fp8_lowering.py."""
    assert nvcc.with_own_products(KERNEL) == KERNEL
    known = forward_source(False)
    unknown = known + "// tl::wgmma_sp<1>\n"
    assert nvcc.with_own_products(unknown) == unknown


def test_other_atomic_operations_keep_their_header() -> None:
    draws = forward_source(False)
    assert nvcc.ATOMICS in draws
    assert nvcc.ATOMICS not in nvcc.with_own_draw(draws)
    for other in (
        "AtomicAddx2(x, y)",
        "AtomicAddRet((&(tickets[0])), 2)",
        "cuda::atomic_ref<int> x",
        "cuda_cast<half>(x)",
    ):
        assert nvcc.with_own_draw(draws + other) == draws + other
    for none in (KERNEL, nvcc.ATOMICS + KERNEL):
        assert nvcc.with_own_draw(none) == none


@needs_nvcc
def test_what_nvcc_refuses_is_said() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)nvcc ended with exit status 1:.*nonsense.*-arch=sm_90a"):
        nvcc.cubin(KERNEL.replace("x[0]", "nonsense"), ARCH)


@pytest.mark.parametrize("toolkit", [None, "/nowhere"])
def test_without_nvcc_it_says_what_to_install(toolkit: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def path() -> str:
        if toolkit is None:
            raise RuntimeError("Cannot find CUDA")
        return f"{toolkit}/bin/nvcc"

    monkeypatch.setattr(nvcc, "get_nvcc_compiler", path)
    with pytest.raises(RuntimeError, match=r"there is no nvcc, not (where|/nowhere).*: .* tileattn\[cuda\]"):
        nvcc.cubin(KERNEL, ARCH)


@pytest.mark.slow(reason="lowers a kernel, 5 s")
@needs_nvcc
def test_tilelang_asks_here_only_inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    cubin = nvcc.cubin
    monkeypatch.setattr(nvcc, "cubin", lambda code, arch: asked.append(arch) or cubin(code, arch))
    monkeypatch.setattr(nvcc, "tilelang_callback_cuda_compile", lambda *_: bytearray(b"TileLang's"))
    build_library(plan_kernel(ARCH), ARCH, tmp_path / "library.so")
    assert asked == [ARCH]
    assert bytes(tvm_ffi.get_global_func(nvcc.CALLBACK)("code", None, None)) == b"TileLang's"
    with pytest.raises(KeyError), nvcc.compiling():
        raise KeyError
    assert bytes(tvm_ffi.get_global_func(nvcc.CALLBACK)("code", None, None)) == b"TileLang's"
