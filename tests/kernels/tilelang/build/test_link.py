"""Libraries that are linked of generated sources: they hold what TileLang's own export puts into them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("tilelang")
import tvm_ffi
from tilelang.backend.module import create_backend_context
from tilelang.engine.lower import device_codegen, host_codegen, lower_to_host_device_ir
from tvm import runtime

from tests.kernels.tilelang.build.test_nvcc import KERNEL, needs_nvcc
from tests.tools.lowering import find_nvcc
from tileattn.kernels.tilelang.build import compile as compile_module
from tileattn.kernels.tilelang.build import link, nvcc, toolkit
from tileattn.kernels.tilelang.build.compile import build_library, sources
from tileattn.kernels.tilelang.build.sources import Sources, image_with
from tileattn.kernels.tilelang.packed.plan_kernel import plan_kernel

ARCH = "sm_90a"
CUBIN = b"\x7fELF some machine code"
LOADED = """
import sys
from tileattn.kernels.bundles.runtime import runtime
assert runtime().load_module(sys.argv[1])["plan"] is not None
assert "tilelang" not in sys.modules
"""


def exported(cubin: bytes, path: Path) -> None:
    """The plan of packed calls as TileLang's own export makes a library of it, with other machine code."""
    callback = "tilelang_callback_cuda_compile"
    real = tvm_ffi.get_global_func(callback)
    tvm_ffi.register_global_func(callback, lambda *_: bytearray(cubin), override=True)
    try:
        function = plan_kernel(ARCH)
        target = compile_module.target_of(ARCH)
        with target, compile_module._pass_context(function):
            context = create_backend_context(target, None, "auto")
            host, device, *_ = lower_to_host_device_ir(function, context)
            library = host_codegen(host, context)
            library.import_module(device_codegen(device, context))
            runtime.Executable(library).export_library(str(path), options=["-x", "c"])
    finally:
        tvm_ffi.register_global_func(callback, real, override=True)


@pytest.fixture(autouse=True)
def some_nvcc(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is none, `nvcc.cubin` is replaced in the tests that run."""
    if find_nvcc() is None:
        monkeypatch.setattr(toolkit, "nvcc", lambda: "nvcc")


def image_of(library: Path) -> bytes:
    """What a library holds for TVM's loader."""
    found = subprocess.run(["readelf", "-Ws", "--dyn-syms", str(library)], capture_output=True, text=True, check=True)
    line = next(line for line in found.stdout.splitlines() if line.endswith(link.IMAGE)).split()
    start, size = int(line[1], 16), int(line[2])
    return library.read_bytes()[start : start + size]


def functions_of(library: Path) -> list[str]:
    found = subprocess.run(["nm", "-D", "--defined-only", str(library)], capture_output=True, text=True, check=True)
    return sorted(name for line in found.stdout.splitlines() if (name := line.split()[-1]).startswith("__tvm_ffi"))


def test_a_library_is_that_of_tilelangs_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exported(CUBIN, tmp_path / "exported.so")
    monkeypatch.setattr(nvcc, "cubin", lambda code, arch: CUBIN)
    build_library(plan_kernel(ARCH), ARCH, tmp_path / "linked.so")
    assert CUBIN in image_of(tmp_path / "linked.so")
    assert image_of(tmp_path / "linked.so") == image_of(tmp_path / "exported.so")
    assert functions_of(tmp_path / "linked.so") == functions_of(tmp_path / "exported.so")
    assert "__tvm_ffi_plan" in functions_of(tmp_path / "linked.so")


@needs_nvcc
def test_a_library_is_made_and_loaded_without_tilelang(tmp_path: Path) -> None:
    path = tmp_path / "library.so"
    link.build_library(sources(plan_kernel(ARCH), ARCH), ARCH, path)
    subprocess.run([sys.executable, "-c", LOADED, str(path)], check=True)


def test_the_compilers_run_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's compiler waits here until nvcc's work is done: in turns this would not end."""
    done, compiler = tmp_path / "done", tmp_path / "compiler"
    waiting = f'case "$*" in *" -c "*) while [ ! -e {done} ]; do sleep 0.1; done;; esac'
    compiler.write_text(f'#!/bin/sh\n{waiting}\nexec g++ "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setattr(toolkit, "host_compiler", lambda: str(compiler))

    def cubin(code: str, arch: str) -> bytes:
        time.sleep(0.1)
        done.touch()
        return CUBIN

    monkeypatch.setattr(nvcc, "cubin", cubin)
    link.build_library(sources(plan_kernel(ARCH), ARCH), ARCH, tmp_path / "library.so")
    assert CUBIN in image_of(tmp_path / "library.so")


def test_what_a_compiler_refuses_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = sources(plan_kernel(ARCH), ARCH)
    monkeypatch.setattr(nvcc, "cubin", lambda code, arch: CUBIN)
    with pytest.raises(RuntimeError, match=r"(?s)the host's compiler ended with exit status 1:.*nonsense.*host\.c"):
        link.build_library(good._replace(host="nonsense"), ARCH, tmp_path / "library.so")
    with pytest.raises(RuntimeError, match=r"(?s)the host's compiler ended with exit status 1:.* -shared "):
        link.build_library(good, ARCH, tmp_path / "none" / "library.so")
    assert os.listdir(tmp_path) == []


def test_a_compiler_that_cannot_be_run_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "ccache g++")
    monkeypatch.setattr(toolkit, "nvcc", lambda: "nvcc")
    said = r"the host's compiler 'ccache g\+\+' cannot be run \(.*\); CXX and CC name one program, without options"
    with pytest.raises(RuntimeError, match=said):
        link.build_library(Sources("", ""), ARCH, tmp_path / "library.so")


def test_a_missing_nvcc_is_named_before_the_hosts_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolkit, "cuda_home", lambda: None)
    monkeypatch.setattr(toolkit, "host_compiler", pytest.fail)
    with pytest.raises(RuntimeError, match="there is no nvcc"):
        link.build_library(Sources("", ""), ARCH, tmp_path / "library.so")


def test_a_failing_nvcc_ends_the_hosts_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\nexec sleep 300\n")
    compiler.chmod(0o755)
    monkeypatch.setattr(toolkit, "host_compiler", lambda: str(compiler))
    monkeypatch.setattr(toolkit, "nvcc", lambda: "nvcc")

    def cubin(code: str, arch: str) -> bytes:
        raise RuntimeError("nvcc ended")

    monkeypatch.setattr(nvcc, "cubin", cubin)
    with pytest.raises(RuntimeError, match="nvcc ended"):
        link.build_library(Sources("", ""), ARCH, tmp_path / "library.so")


@pytest.mark.parametrize("image", [b"", b"ptx", b"\x08" + bytes(7) + b"\x04" + bytes(7) + b"cudaptx"])
def test_another_image_is_refused(image: bytes) -> None:
    with pytest.raises(ValueError, match=r"otherwise than TileLang 0\.1\.15, .*: pip install tilelang=="):
        image_with(image, CUBIN)


def test_sources_of_amds_kernels_have_no_image() -> None:
    assert Sources(KERNEL, "").image == b""
