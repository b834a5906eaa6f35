"""`tileattn.profile`: what it measures is what was done."""

from __future__ import annotations

import importlib
import subprocess
import sys
import time

import pytest
import torch

import tileattn
from tileattn import profiling
from tileattn.bench.ceilings import Ceiling
from tileattn.bench.timing import Effort
from tileattn.profiling import Profile

BRIEF = Effort(warmup_ms=1, measure_ms=4, rounds=2)
CPU = torch.device("cpu")


@pytest.fixture
def ceiling(monkeypatch: pytest.MonkeyPatch) -> Ceiling:
    """A machine of 2 TFLOPS and 0.5 TB/s, which needs no measuring."""
    made = Ceiling("", 2.0, 0.5)
    monkeypatch.setattr(profiling, "machine_ceiling", lambda device, dtype: made)
    return made


def test_time_memory_and_calls_are_those_of_the_callable() -> None:
    def slow(x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.003)
        return x.repeat(4)

    found = tileattn.profile(slow, torch.zeros(1000), effort=BRIEF)
    assert (found.name, found.device) == ("slow", "cpu")
    assert 3.0 <= found.spread_ms[0] <= found.ms <= found.spread_ms[1]
    assert found.calls >= BRIEF.rounds
    assert 4 * 4000 <= found.peak_bytes < 5 * 4000
    assert found.tflops is None
    assert found.flops_fraction is None
    assert str(found).startswith("slow on cpu: ")


def test_fractions_are_of_the_machines_ceiling(ceiling: Ceiling) -> None:
    x = torch.ones(64, 64)
    found = tileattn.profile(torch.matmul, x, x, flops=2 * 64**3, bytes=3 * 4 * 64**2, effort=BRIEF)
    assert found.tflops == pytest.approx(2 * 64**3 / found.ms / 1e9)
    assert found.flops_fraction == pytest.approx(found.tflops / 2.0)
    assert found.bytes_fraction == pytest.approx(12 * 64**2 / found.ms / 1e9 / 0.5)
    assert "of the matrix product's" in str(found)


def test_a_table_compares(ceiling: Ceiling) -> None:
    calls: list[str] = []

    def once(x: torch.Tensor) -> None:
        calls.append("once")
        time.sleep(0.002)

    def twice(x: torch.Tensor) -> None:
        calls.append("twice")
        time.sleep(0.004)

    found = tileattn.profile_all({"once": once, "twice": twice}, torch.zeros(1), flops=1e6, effort=BRIEF)
    assert [each.name for each in found] == ["once", "twice"]
    assert found["twice"].ms > found["once"].ms
    # They take turns: neither has all its calls before the other's.
    assert calls.index("twice") < len(calls) - 1 - calls[::-1].index("once")
    lines = str(found).splitlines()
    assert lines[0].strip() == "on cpu: matrix product 2 TFLOPS, copy 500 GB/s"
    assert any(line.split()[:1] == ["once"] and "1.00×" in line for line in lines)
    with pytest.raises(KeyError, match=r"'thrice' is not one of 'once', 'twice'"):
        found["thrice"]


def test_ceilings_are_measured_once_and_in_a_dtype_that_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "CPU_MATMUL_SIZE", 64)
    monkeypatch.setattr(profiling, "CPU_COPIED_BYTES", 2**16)
    monkeypatch.setattr(profiling, "CEILING_EFFORT", BRIEF)
    profiling._machine_ceiling.cache_clear()
    try:
        found = profiling.machine_ceiling(CPU, torch.float8_e4m3fn)
        assert found.matmul_tflops > 0
        assert found.copy_tbps > 0
        assert profiling.machine_ceiling(CPU, torch.bfloat16) is found
        assert profiling.machine_ceiling(CPU, torch.float32) is not found
    finally:
        profiling._machine_ceiling.cache_clear()


def test_bad_arguments_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match="twelve must be callable, got int"):
        tileattn.profile_all({"twelve": 12})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="flops must be positive or None, got 0"):
        tileattn.profile(torch.zeros, 1, flops=0)
    with pytest.raises(TypeError, match="fn must be callable, got 3"):
        tileattn.profile(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="flops must be a number or None, got 'x'"):
        tileattn.profile(torch.zeros, 1, flops="x")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="fns must be a mapping from names to callables, got list"):
        tileattn.profile_all([torch.zeros])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="fns must name at least one callable"):
        tileattn.profile_all({})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device in ("cuda", "cuda:1", "tpu", 3.5):
        with pytest.raises(ValueError, match=f"device must be one of this machine, got {device!r}; accepted: cpu"):
            tileattn.profile(torch.zeros, 1, device=device)  # type: ignore[arg-type]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ValueError, match="device must be given where no argument is a tensor"):
        tileattn.profile(lambda: None)


def test_one_call_has_no_spread() -> None:
    assert profiling._quartiles([2.0]) == (2.0, 2.0)


def test_the_standard_librarys_profile_is_untouched() -> None:
    """Neither module is hidden by the other, in whatever order they come."""
    assert importlib.import_module("profile").run is not None
    code = (
        "import tileattn.profiling, tileattn, profile, cProfile; assert callable(tileattn.profile); profile.Profile()"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)
    assert not hasattr(importlib.import_module("profile"), "machine_ceiling")


@pytest.mark.gpu
def test_on_a_gpu_time_and_memory_are_the_devices() -> None:
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    found: Profile = tileattn.profile(torch.matmul, x, x, flops=2 * 4096**3, effort=BRIEF)
    assert found.device == "cuda:0"
    assert found.peak_bytes >= 2 * 4096**2
    assert found.flops_fraction is not None
    # The same product as the ceiling's, only smaller.
    assert 0.3 < found.flops_fraction < 1.3
