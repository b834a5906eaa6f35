"""Triton's decode kernels, compiled for GPUs that this machine does not have: they fit, and hardly spill."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.tools.triton_kernels.compiler import SHARED_BYTES, compiled

pytest.importorskip("triton")

SPILLED_BYTES = 64  # by a version of Triton other than the one that the configurations were chosen with

QUICK: dict[str, dict[str, dict[str, Any]]] = {
    "sm_90a": {
        "pages of 16": {"head_dim": 128, "page": 16},
        "chunks": {"head_dim": 128, "page": 64, "packed": True, "q_len": 40},
    },
    "sm_80": {"pages of 64": {"head_dim": 64, "page": 64}},
    "gfx942": {"contiguous": {"head_dim": 64}},
}


@functools.cache
def quick(arch: str) -> dict[str, dict[str, Any]]:
    """The report of each call's decode kernel; behind it comes that of the kernel that merges."""
    reports = compiled(arch, [{"decode": True, **call} for call in QUICK[arch].values()])
    assert [report["kernel"] for report in reports] == ["decode_kernel", "merge_kernel"] * len(QUICK[arch])
    for report in reports:
        assert report["shared"] <= SHARED_BYTES[arch], report
        assert report["spills"] <= SPILLED_BYTES, report
    return dict(zip(QUICK[arch], reports[::2], strict=True))


def test_few_rows_take_small_products() -> None:
    report = quick("sm_90a")["pages of 16"]
    assert report["mma"] > 0, report
    assert report["wgmma"] == 0, report
    assert report["cp_async"] > 0, report


def test_many_rows_take_warpgroups() -> None:
    _takes_warpgroups(quick("sm_90a")["chunks"])


@pytest.mark.slow(reason="6 s")
def test_fixed_parts_take_warpgroups() -> None:
    report, _ = compiled("sm_90a", [{"decode": True, "head_dim": 128, "page": 16, "fixed": 1024}])
    assert report["shared"] <= SHARED_BYTES["sm_90a"], report
    assert report["spills"] <= SPILLED_BYTES, report
    _takes_warpgroups(report)


def _takes_warpgroups(report: dict[str, Any]) -> None:
    assert report["wgmma"] > 0, report
    assert report["mma"] == 0, report
    assert report["cp_async"] > 0, report


def test_keys_and_values_of_a_page_are_copied_ahead() -> None:
    """Two tiles or more of K and V are in shared memory, although the page's number must be loaded before."""
    assert quick("sm_90a")["pages of 16"]["shared"] >= 2 * 2 * 64 * 128 * 2


def test_ampere() -> None:
    report = quick("sm_80")["pages of 64"]
    assert report["mma"] > 0, report
    assert report["cp_async"] > 0, report


@pytest.mark.slow(reason="3 s; test_compile.py compiles a kernel for AMD")
def test_amd_has_matrix_instructions() -> None:
    report = quick("gfx942")["contiguous"]
    assert report["mma"] > 0, report


SLOW = [
    (arch, call)
    for arch in ("sm_90a", "sm_80", "gfx942")
    for call in (
        {"head_dim": 64, "variant": "prefix|window+alibi+softcap", "page": 3},
        {"head_dim": 128, "variant": "documents+bias_tiles_fp16_bh", "dtype": "bfloat16", "page": 64},
        {"head_dim": 192, "head_dim_v": 128, "q_len": 16},
        {"head_dim": 256, "page": 1},
        {"head_dim": 256, "page": 64, "q_len": 16, "packed": True},
        {"head_dim": 256, "page": 16, "fixed": 1024},
        {"head_dim": 80, "aligned": False, "q_len": 5},
        {"head_dim": 128, "dtype": "float32", "page": 16},
        {"head_dim": 256, "dtype": "float32", "fixed": 128},
        {"head_dim": 64, "variant": "function_empty_rows+bias+bias_tiles_1", "q_len": 40},
        {"head_dim": 256, "variant": "causal&documents+bias_b+bias_tiles", "q_len": 40},
        {"head_dim": 128, "variant": "loaded-ids", "page": 64, "q_len": 40, "packed": True, "listed": True},
        {"head_dim": 256, "variant": "local-global", "page": 16, "listed": True},
        {"head_dim": 128, "variant": "dilated", "dtype": "float32", "page": 3, "listed": True},
        {"head_dim": 64, "variant": "dilated", "page": 64, "fixed": 1024, "listed": True},
    )
]


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "call"), SLOW, ids=lambda value: value if isinstance(value, str) else str(value))
def test_other_calls(arch: str, call: dict[str, Any]) -> None:
    """In shared memory, that is; where scores are modified, and in float32, registers may spill."""
    for report in compiled(arch, [{"decode": True, **call}]):
        assert report["shared"] <= SHARED_BYTES[arch], report


@pytest.mark.slow
@pytest.mark.parametrize("page", [0, 16, 64])
def test_loops_over_lines_copy_as_far_ahead_as_over_ranges(page: int) -> None:
    """There are two of them: over mixed tiles, and over whole ones."""
    call = {"decode": True, "head_dim": 128, "variant": "dilated", "page": page}
    by_range, _, by_lines, _ = compiled("sm_90a", [call, {**call, "listed": True}])
    assert by_lines["cp_async"] == 2 * by_range["cp_async"]
    assert by_lines["shared"] <= by_range["shared"] + 16
