"""fp8 kernels of the Hopper schedule, lowered and assembled without a GPU. Values: see the conformance suite."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.tools.lowering import BIAS, IDS, SLOPES, assemble, find_nvcc, lower, make_call
from tileattn import ALiBi, Bias, Causal, SoftCap
from tileattn.call.facts import AttentionCall
from tileattn.call.fp8 import FP8
from tileattn.kernels.tilelang import backend
from tileattn.kernels.tilelang.build.compile import device_source
from tileattn.kernels.tilelang.build.nvcc import with_own_products
from tileattn.kernels.tilelang.forward.transpose_fp8 import transpose_kernel
from tileattn.kernels.tilelang.tile.softmax import key_of_column

CALLS = {
    "plain-64": make_call(dim=64, sink=True, dtype=FP8),
    "plain": make_call(dtype=FP8),
    "plain-16": make_call(dim=16, dtype=FP8),
    "causal-64": make_call(Causal(), dim=64, dtype=FP8),
    "causal-256": make_call(Causal(), dim=256, sink=True, dtype=FP8),
    "causal-192/128": make_call(Causal(), dim=192, dim_v=128, dtype=FP8),
    "softcap-80": make_call(Causal(), SoftCap(30.0), dim=80, dtype=FP8),
    "composed": make_call(IDS & Causal(), ALiBi(SLOPES), Bias(BIAS), dtype=FP8),
}


@pytest.mark.parametrize(
    "call",
    [pytest.param(call, id=name, marks=pytest.mark.slow) for name, call in CALLS.items()],  # 10 s and more each
)
def test_kernel(call: AttentionCall, tmp_path: Path) -> None:
    source = lower(call)
    assert "tl::wgmma_ss<tl::DataType::kFloat8_e4m3" in source
    assert "tl::wgmma_rs<tl::DataType::kFloat8_e4m3" in source
    # The weights pass from accumulator to operand within each thread, two at a time.
    assert "__nv_cvt_float2_to_fp8x2" in source
    assert with_own_products(source) == source
    nvcc = find_nvcc()
    if nvcc is None:
        pytest.skip("lowered, but not assembled: there is no nvcc (pip install 'tileattn[cuda]')")
    log = assemble(nvcc, source, call.arch, tmp_path)
    assert not re.search(r"C75\d\d|serialized|setmaxnreg ignored", log), log
    assert set(re.findall(r"(\d+) bytes spill", log)) == {"0"}, log


@pytest.mark.slow_cases("128", reason="lowers a kernel, 4 s")
@pytest.mark.parametrize("dim", [16, 128])
def test_transposition(dim: int, tmp_path: Path) -> None:
    call = make_call(dim=dim, dtype=FP8)
    source = device_source(transpose_kernel(call), call.arch)
    assert "tl::tma_store(" in source
    nvcc = find_nvcc()
    if nvcc is not None:
        assert set(re.findall(r"(\d+) bytes spill", assemble(nvcc, source, call.arch, tmp_path))) == {"0"}


def test_threads_hold_the_weights_that_they_take() -> None:
    """A thread holds columns 8g + 2t, + 1 of a row of D, and reads 16g + 4t .. + 3 of A (PTX ISA, wgmma.m64nNk32)."""
    columns = range(64)
    assert sorted(map(key_of_column, columns)) == list(columns)
    for column in columns:
        key = key_of_column(column)
        assert key // 16 == column // 16
        assert key % 8 // 2 == column % 16 // 4


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (make_call(dtype=FP8, arch="sm_89"), "sm_90a only"),
        (make_call(dtype=FP8, aligned=False), "multiples of 16 bytes"),
        (make_call(dim=40, dtype=FP8), "head_dim must be a multiple of 16 from 16 to 256 in fp8, not 40"),
        (make_call(dim_v=272, dtype=FP8), "head_dim_v must be a multiple of 16"),
        (make_call(dtype=FP8, needs_grad=True), "backward"),
        (make_call(dtype=torch.float8_e5m2), "float8_e4m3fn"),
    ],
)
def test_refusals(call: AttentionCall, reason: str) -> None:
    assert reason in (backend.refusal(call) or "")


def test_what_is_accepted() -> None:
    for call in CALLS.values():
        assert backend.refusal(call) is None
