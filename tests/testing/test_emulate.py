"""emulate(): a TileLang kernel of one's own runs on the CPU, and what is missing or wrong is named."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tileattn.testing import emulate

COLUMNS, ROWS = 64, 16


@pytest.fixture(scope="module")
def product() -> Any:
    """o = a b^T for blocks of 16 rows of a, of which there may be any number; the last block may be cut."""
    T = pytest.importorskip("tilelang.language")
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    rows = T.dynamic("rows")

    @T.prim_func
    def kernel(
        a: T.Tensor((rows, COLUMNS), "float16"),
        b: T.Tensor((ROWS, COLUMNS), "float16"),
        o: T.Tensor((rows, ROWS), "float32"),
    ):
        with T.Kernel(T.ceildiv(rows, ROWS), threads=32) as block:
            left = T.alloc_shared([ROWS, COLUMNS], "float16")
            right = T.alloc_shared([ROWS, COLUMNS], "float16")
            out = T.alloc_fragment([ROWS, ROWS], "float32")
            T.copy(a[block * ROWS : (block + 1) * ROWS, :], left)
            T.copy(b, right)
            T.gemm(left, right, out, transpose_B=True, clear_accum=True)
            T.copy(out, o[block * ROWS : (block + 1) * ROWS, :])

    return kernel


def drawn(*shape: int) -> torch.Tensor:
    """Small integers, whose products and sums float16 and float32 hold exactly."""
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(0)).half()


@pytest.mark.slow  # g++ takes seconds; the emulated tests of the package's kernels run the same code
def test_a_kernel_runs_on_cpu_tensors(product: Any, tmp_path: Path) -> None:
    run = emulate(product, folder=tmp_path)
    assert {path.suffix for path in tmp_path.iterdir()} == {".cpp", ".so"}
    b = drawn(ROWS, COLUMNS)
    for rows in (16, 41):
        a, o = drawn(rows, COLUMNS), torch.full((rows, ROWS), float("nan"))
        run(a, b, o)
        assert torch.equal(o, a.float() @ b.float().T)
    a, o = drawn(16, COLUMNS), torch.empty(16, ROWS)
    for arguments, error, says in (
        ((a, b), TypeError, "takes 3 arguments, got 2"),
        ((a, b, 1.0), TypeError, "o must be a tensor, got float"),
        ((a.float(), b, o), ValueError, "a must be torch.float16, got torch.float32"),
        ((a[0], b, o), ValueError, r"a must have 2 dimensions, got shape \(64,\)"),
        ((a, b[:8], o), ValueError, "b must have size 16 in dimension 0, got 8"),
        ((a, b, o[:8]), ValueError, "o must have size 16 in dimension 0, got 8"),
        ((a, drawn(COLUMNS, ROWS).T, o), ValueError, "b must have stride 64 in dimension 0, got 1"),
        ((a.to("meta"), b, o), ValueError, "a must be on the CPU, where the emulator runs, got meta"),
    ):
        with pytest.raises(error, match=says):
            run(*arguments)


def test_what_the_emulator_lacks_is_named() -> None:
    T = pytest.importorskip("tilelang.language")
    if shutil.which("g++") is None:
        pytest.skip("needs g++")

    @T.prim_func
    def kernel(x: T.Tensor((32,), "float32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(32):
                x[i] = T.call_extern("float32", "__frcp_rz", x[i])

    with pytest.raises(RuntimeError, match=r"uses what the emulator lacks: .*__frcp_rz.* not declared"):
        emulate(kernel)


def test_a_function_that_is_no_kernel_is_refused() -> None:
    pytest.importorskip("tilelang")
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    with pytest.raises(TypeError, match=r"function must be one under @T\.prim_func, got function"):
        emulate(lambda q: q)


@pytest.mark.parametrize(
    ("lacking", "error", "says"),
    [
        ("linux", RuntimeError, r"runs on Linux, and this is darwin; use WSL 2 .*, a Linux container"),
        ("tilelang", ImportError, "needs TileLang, which is not installed: pip install tilelang"),
        ("g++", RuntimeError, r"needs g\+\+ 12 or newer, and none was found: apt install g\+\+"),
    ],
)
def test_what_is_missing_is_named(
    lacking: str, error: type[Exception], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin" if lacking == "linux" else "linux")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if lacking == "tilelang" else object())
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(error, match=says):
        emulate(None)
