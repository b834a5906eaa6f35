"""The backward kernels for AMD's MI300X, without one: HIP source, code objects, and gradients on the CPU emulator."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

pytest.importorskip("tilelang")

import hip
import test_gpu_backward as gpu
from emulator import COMPILER, Kernel
from test_backward_lowering import CALLS, on
from test_emulated_backward import LONGEST, emulated, gradients  # noqa: F401
from test_gpu_backward import CASES, Problem
from tileattn.call import BackwardCall
from tileattn.kernels.tilelang.backward import amd, backend, launch, space
from tileattn.kernels.tilelang.backward.amd_config import AmdBackwardConfig
from tileattn.kernels.tilelang.backward.config import BackwardConfig, read_together
from tileattn.kernels.tilelang.backward.defaults import default, queries_default
from tileattn.kernels.tilelang.backward.kernels import kernel, main_kernel
from tileattn.kernels.tilelang.compile import device_source

ARCH, SHARED_BYTES = "gfx942", 65536
QUICK = ("plain-16",)


def calls() -> dict[str, BackwardCall]:
    """Of the lowering tests, with dq by the main kernel, and by one of its own."""
    found = {}
    for name, call in CALLS.items():
        found[name] = on(ARCH, call)
        found[f"{name}-deterministic"] = dataclasses.replace(found[name], deterministic=True)
    return found


@pytest.mark.parametrize("name", calls())
def test_every_call_has_a_default_and_candidates(name: str) -> None:
    call = calls()[name]
    assert isinstance(default(call), AmdBackwardConfig)
    assert isinstance(queries_default(call), AmdBackwardConfig)
    found = space.candidates(call)
    assert default(call) in found
    assert len(found) >= 3
    assert all(space.fits(call, config) for config in found)


def check(call: BackwardCall, which: str, config: AmdBackwardConfig, folder: Path) -> None:
    source = device_source(space.kernel_of(call, which, config), ARCH)
    assert "__builtin_amdgcn_mfma_f32_16x16x16" in source
    if read_together(call).aligned:
        loads = re.findall(r"= \*\((uint[24])\*\)\((?:q|k|v|do|do_1) \+", source)
        assert set(loads) == {{4: "uint2", 8: "uint4"}[config.coalesced_width]}
    places = re.findall(r"\(char\*\)buf_dyn_shmem \+ (\d+)", source)
    assert max(map(int, places)) < SHARED_BYTES
    if not hip.MISSING:
        hip.compile_hip(source, folder)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow, id=name) for name in calls()]
)
def test_kernels_become_hip_source(name: str, tmp_path: Path) -> None:
    call = calls()[name]
    which, config = ("queries", queries_default(call)) if call.deterministic else ("main", default(call))
    check(call, which, config, tmp_path)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("config", space.candidates(calls()["causal-64"]), ids=str)
def test_every_valid_configuration(config: AmdBackwardConfig, tmp_path: Path) -> None:
    check(calls()["causal-64"], "main", config, tmp_path)


# Lowered for sm_80, without packed products, which NVIDIA's GPUs do not have: the kernels' bodies and wide copies.
CONFIGS = (AmdBackwardConfig(32, 64, 1, 128, k_pack=1), BackwardConfig(32, 64, 1, 128))


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="needs g++")
@pytest.mark.parametrize("name", ["full-16", "causal", "alibi"])
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: type(config).__name__)
def test_gradients_with_a_tuned_configuration(
    name: str,
    config: BackwardConfig,
    emulated: None,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    def kernels(call: BackwardCall, tuned: BackwardConfig) -> launch.Kernels:
        assert tuned == config
        main = amd.main_kernel if isinstance(config, AmdBackwardConfig) else main_kernel
        found = {each: Kernel(kernel(call, each), tmp_path) for each in launch.kernel_names(call) if each != "main"}
        return launch.Kernels(
            found["prepare"], Kernel(main(call, config), tmp_path), found.get("finish"), found.get("queries")
        )

    monkeypatch.setattr(backend, "found_by_tuner", lambda call, sizes: config)
    monkeypatch.setattr(backend, "backward_kernels", kernels)
    case = CASES[name]
    problem = Problem(case._replace(lengths=tuple(min(length, LONGEST) for length in case.lengths)))  # type: ignore[arg-type]
    gpu.check(name, problem, gradients(problem, deterministic=False))
