"""tileattn on macOS and Windows: without TileLang and Triton, and without what only Unix has in Python's library."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from packaging.requirements import Requirement

from tests.package.test_packaging import PROJECT
from tests.tools import ROOT

CODE = """
import importlib, json, pkgutil
from tests.tools.other_systems import hide_packages, hide_unix

hide_packages()
hide_unix()
import torch, tileattn

failed = {}
for found in pkgutil.walk_packages(tileattn.__path__, "tileattn.", onerror=lambda name: None):
    if found.name == "tileattn.__main__":
        continue
    try:
        importlib.import_module(found.name)
    except Exception as error:
        failed[found.name] = [type(error).__name__, getattr(error, "name", None) or str(error)]

x = torch.randn(1, 5, 2, 16, requires_grad=True)
o = tileattn.attention(x, x, x, causal=True)
o.sum().backward()
try:
    tileattn.attention(x, x, x, backend="tilelang")
except NotImplementedError as error:
    refused = str(error)
print(json.dumps({"failed": failed, "finite": bool(x.grad.isfinite().all()), "refused": refused}))
"""


@pytest.fixture(scope="module")
def elsewhere() -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", CODE], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_modules_fail_for_want_of_a_compiler_alone(elsewhere: dict[str, Any]) -> None:
    """Those that generate kernels for GPUs. No other module needs what another system lacks."""
    failed = {module: error[1].partition(".")[0] for module, error in elsewhere["failed"].items()}
    compilers = {module for module, missing in failed.items() if missing in ("tilelang", "triton", "tvm", "tvm_ffi")}
    extras = {module for module, missing in failed.items() if missing in ("gradio", "sglang", "transformers", "vllm")}
    assert failed.keys() - compilers - extras == set(), elsewhere["failed"]
    kernels = ("tileattn.kernels.", "tileattn.testing.emulator.", "tileattn.bench.decode.read_kernel")
    assert all(module.startswith(kernels) for module in compilers)
    assert "tileattn.kernels.tilelang.forward.kernel" in compilers, "TileLang was not hidden"


def test_attention_and_its_gradient_run(elsewhere: dict[str, Any]) -> None:
    assert elsewhere["finite"]
    assert "tilelang: device 'cpu' is not one of" in elsewhere["refused"]


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_an_install_asks_for_nothing_that_is_linux_only(system: str) -> None:
    environment = {"sys_platform": system, "python_version": "3.12"}
    requirements = map(Requirement, PROJECT["dependencies"])
    needed = {each.name for each in requirements if each.marker is None or each.marker.evaluate(environment)}
    assert "torch" in needed
    assert not needed & {"tilelang", "triton", "apache-tvm-ffi"}
