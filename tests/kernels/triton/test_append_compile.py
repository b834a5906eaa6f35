"""append_kv's Triton kernel, compiled for GPUs that this machine does not have; new sizes compile nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

from tests.tools.triton_kernels import append_compiler as triton_append_compiler
from tests.tools.triton_kernels.compiler import TARGETS


def test_kernels() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, triton_append_compiler.__file__], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr[-4000:]
    *reports, of_sizes = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    made = {(report["arch"], report["name"]) for report in reports}
    assert made == {(arch, name) for arch in TARGETS for name in triton_append_compiler.NAMES}
    assert [report for report in reports if report["spills"]] == []
    assert of_sizes["kernels"] == 1, of_sizes["keys"]
