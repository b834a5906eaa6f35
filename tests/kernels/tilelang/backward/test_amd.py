"""The backward kernels for AMD's MI300X, without one: HIP source, code objects, and gradients on the CPU emulator."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("tilelang")

from tests.kernels.tilelang.backward import test_gpu as gpu
from tests.kernels.tilelang.backward.test_emulated import emulated, gradients, shortened  # noqa: F401
from tests.kernels.tilelang.backward.test_gpu import CASES, Problem
from tests.kernels.tilelang.backward.test_lowering import CALLS, on
from tests.tools import hip
from tileattn.call.facts import BackwardCall
from tileattn.kernels.tilelang.backward import launch as backend
from tileattn.kernels.tilelang.backward import library as launch
from tileattn.kernels.tilelang.backward import space
from tileattn.kernels.tilelang.backward.amd import queries as amd
from tileattn.kernels.tilelang.backward.amd.config import AmdBackwardConfig, is_valid_amd_backward, k_pack_of
from tileattn.kernels.tilelang.backward.config import BackwardConfig, read_together
from tileattn.kernels.tilelang.backward.defaults import default, queries_default
from tileattn.kernels.tilelang.backward.kernels import kernel, kernel_of, main_kernel
from tileattn.kernels.tilelang.build.compile import build_library, device_source
from tileattn.kernels.tilelang.build.library import load
from tileattn.testing.emulator.kernel import COMPILER, Kernel

ARCH, SHARED_BYTES = "gfx942", 65536
QUICK = ("plain-16",)


def calls() -> dict[str, BackwardCall]:
    """The calls of the lowering tests, with dq by the main kernel and by a kernel of its own."""
    by_name = {}
    for name, call in CALLS.items():
        by_name[name] = on(ARCH, call)
        by_name[f"{name}-deterministic"] = dataclasses.replace(by_name[name], deterministic=True)
    return by_name


@pytest.mark.parametrize("name", calls())
def test_every_call_has_a_default_and_candidates(name: str) -> None:
    call = calls()[name]
    assert isinstance(default(call), AmdBackwardConfig)
    assert isinstance(queries_default(call), AmdBackwardConfig)
    candidates = space.candidates(call)
    assert default(call) in candidates
    assert len(candidates) >= 3
    assert all(space.fits(call, config) for config in candidates)


def check(call: BackwardCall, which: str, config: AmdBackwardConfig, folder: Path) -> None:
    source = device_source(kernel_of(call, which, config), ARCH)
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


# Calls of each size of head, of which every candidate is lowered.
WALKED = ("plain-16", "window-40", "causal-64", "prefix-96", "plain", "plain-192/128", "causal-256")
SPACE = [(name, config) for name in WALKED for config in space.candidates(calls()[name])]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "config"), SPACE, ids=str)
def test_every_valid_configuration(name: str, config: AmdBackwardConfig, tmp_path: Path) -> None:
    check(calls()[name], "main", config, tmp_path)


@pytest.mark.parametrize(
    ("name", "sizes", "valid"),
    [
        ("plain", (16, 32, 128), True),
        ("plain", (16, 32, 256), False),
        ("plain", (16, 64, 256), True),
        ("plain-16", (64, 32, 256), False),  # dK and dV are 32 x 16
        ("plain-16", (32, 64, 256), False),  # dQ is 32 x 16
        ("plain-16", (64, 64, 256), True),
        ("window-40", (16, 128, 256), False),
    ],
)
def test_each_wave_has_a_part_of_each_product(name: str, sizes: tuple[int, int, int], valid: bool) -> None:
    call, (block_M, block_N, threads) = calls()[name], sizes
    config = AmdBackwardConfig(block_M, block_N, 0, threads, k_pack=k_pack_of(call.forward))
    assert is_valid_amd_backward(call.forward, config) == valid
    assert valid or config not in space.candidates(call)


# Lowered for NVIDIA's GPUs, without packed products, which these do not have: the kernels' bodies and wide copies.
CONFIGS = (AmdBackwardConfig(32, 64, 1, 128, k_pack=1), BackwardConfig(32, 64, 1, 128))
LoadedBy = Callable[[Any, str], launch.Kernel]


def replaced(monkeypatch: pytest.MonkeyPatch, config: BackwardConfig, loaded: LoadedBy) -> None:
    """Backward passes of sm_80 have this configuration; where it is AMD's, its kernels for both passes over scores."""

    def kernels(call: BackwardCall, tuned: BackwardConfig | None = None) -> launch.Kernels:
        functions = {name: kernel(call, name) for name in launch.kernel_names(call)}
        if isinstance(config, AmdBackwardConfig):
            functions["main"] = amd.main_kernel(call, config)
            if "queries" in functions:
                usual = queries_default(call)
                tiles = AmdBackwardConfig(usual.block_M, usual.block_N, 0, usual.threads, k_pack=1)
                functions["queries"] = amd.queries_kernel(call, tiles)
        else:
            functions["main"] = main_kernel(call, config)
        by_name = {name: loaded(function, name) for name, function in functions.items()}
        return launch.Kernels(by_name["prepare"], by_name["main"], by_name.get("finish"), by_name.get("queries"))

    monkeypatch.setattr(backend, "tuned_config", lambda call, sizes: config)
    monkeypatch.setattr(backend, "backward_kernels", kernels)


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="needs g++")
@pytest.mark.parametrize("name", ["full-16", "causal", "alibi"])
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: type(config).__name__)
@pytest.mark.parametrize("deterministic", [False, True], ids=["atomic", "deterministic"])
def test_gradients_with_a_tuned_configuration(
    name: str,
    config: BackwardConfig,
    deterministic: bool,
    emulated: None,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    replaced(monkeypatch, config, lambda function, _: Kernel(function, tmp_path))
    problem = shortened(name)
    gpu.check(name, problem, gradients(problem, deterministic))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["full-16", "window-40", "causal", "causal-128", "softcap", "alibi", "unaligned"])
@pytest.mark.parametrize("deterministic", [False, True], ids=["atomic", "deterministic"])
def test_gradients_on_a_gpu(name: str, deterministic: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The same kernels, compiled for the GPU that is here."""
    arch = "sm_90a" if torch.cuda.get_device_capability()[0] == 9 else "sm_80"

    def loaded(function: Any, kernel_name: str) -> launch.Kernel:
        path = tmp_path / f"{kernel_name}.so"
        build_library(function, arch, path)
        return load(path)[kernel_name]

    # Without stages, as AMD's defaults are: with them TileLang adds a producer on Hopper.
    replaced(monkeypatch, dataclasses.replace(CONFIGS[0], num_stages=0), loaded)
    problem = Problem(CASES[name])
    gpu.check(name, problem, gradients(problem, deterministic))
