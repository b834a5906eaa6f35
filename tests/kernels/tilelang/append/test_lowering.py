"""The code that TileLang generates for append_kv, and what ptxas says about it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("tilelang")

from tests.tools.lowering import ARCHITECTURES, assemble, find_nvcc
from tileattn.call.appending import AppendCall
from tileattn.kernels.tilelang.append.kernel import append_kernel
from tileattn.kernels.tilelang.build.compile import device_source

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CALLS = {
    "plain": AppendCall(BF16, 128, 128, paged=True),
    "halves": AppendCall(BF16, 128, 128, 128, table_dtype=FP32, with_q=True, paged=True),
    "interleaved": AppendCall(FP16, 64, 96, 32, True, FP16, with_q=True, packed=True, paged=True, positions=True),
    "float32": AppendCall(FP32, 80, 80, 80, False, BF16, with_q=True, q_positions=True),
    "unaligned": AppendCall(BF16, 17, 5, 10, False, FP32, True, aligned=False, aligned_tables=False, packed=True),
}
QUICK = ("sm_90a-halves",)


def _kernels() -> list[object]:
    found = []
    for arch in ARCHITECTURES:
        for name, call in CALLS.items():
            marks = [] if f"{arch}-{name}" in QUICK else [pytest.mark.slow]  # lowering takes seconds
            found.append(pytest.param(arch, call, id=f"{arch}-{name}", marks=marks))
    return found


@pytest.mark.slow_cases("sm_90a-halves", reason="lowers a kernel, 7 s")
@pytest.mark.parametrize(("arch", "call"), _kernels())
def test_kernel(arch: str, call: AppendCall, tmp_path: Path) -> None:
    source = device_source(append_kernel(replace(call, arch=arch)), arch)
    _check_copies(call, source, arch)
    assert "__shared__" not in source
    assert "__syncthreads" not in source
    lets_next_start = arch in ("sm_90a", "sm_100a", "sm_120a")
    assert ("cudaTriggerProgrammaticLaunchCompletion" in source) == lets_next_start
    if arch in ("sm_80", "sm_90a") and (nvcc := find_nvcc()) is not None:
        report = assemble(nvcc, source, arch, tmp_path)
        assert "0 bytes spill stores, 0 bytes spill loads" in report, report


def _check_copies(call: AppendCall, source: str, arch: str) -> None:
    """Aligned rows are copied 16 bytes at a time, on AMD 8 bytes of 16-bit elements; addresses have 64 bits."""
    lines = [line for line in source.splitlines() if re.match(r"\s*(\*\(\w+\*\)\()?[kv]_cache( \+|\[)", line)]
    assert {name for name in ("k_cache", "v_cache") for line in lines if name in line} == {"k_cache", "v_cache"}
    assert all("_cache_stride0" in line and "((int64_t)" in line for line in lines)
    wide = [re.match(r"\s*\*\((uint4|float4|uint2|ushort4)\*\)", line) for line in lines]
    assert all(wide) if call.aligned else not any(wide), lines
    if call.aligned and arch.startswith("sm_"):
        assert {found[1] for found in wide if found} <= {"uint4", "float4"}
