"""append_kv's Triton kernel, compiled for GPUs that this machine does not have; new sizes compile nothing."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from tests.tools.triton_kernels import append_compiler as triton_append_compiler
from tests.tools.triton_kernels.compiler import TARGETS, printed


@pytest.mark.slow(reason="compiles every kernel for three architectures, 7 s")
def test_kernels() -> None:
    *reports, of_sizes = printed(triton_append_compiler.__file__)
    made = {(report["arch"], report["name"]) for report in reports}
    assert made == {(arch, name) for arch in TARGETS for name in triton_append_compiler.NAMES}
    assert [report for report in reports if report["spills"]] == []
    assert of_sizes["kernels"] == 1, of_sizes["keys"]
