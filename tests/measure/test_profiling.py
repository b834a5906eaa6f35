"""`tileattn.profile`: its time, memory, rates and table."""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tileattn
from tests import fresh_process
from tileattn.measure import profiling, timing
from tileattn.measure.ceilings import Ceiling
from tileattn.measure.profiling import Profile
from tileattn.measure.timing import Effort

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

    profile = tileattn.profile(slow, torch.zeros(1000), effort=BRIEF)
    assert (profile.name, profile.device) == ("slow", "cpu")
    assert 3.0 <= profile.spread_ms[0] <= profile.ms <= profile.spread_ms[1]
    assert profile.calls >= BRIEF.rounds
    assert 4 * 4000 <= profile.peak_bytes < 5 * 4000
    assert profile.tflops is None
    assert profile.flops_fraction is None
    assert str(profile).startswith("slow on cpu: ")


def test_fractions_are_of_the_machines_ceiling(ceiling: Ceiling) -> None:
    x = torch.ones(64, 64)
    profile = tileattn.profile(torch.matmul, x, x, flops=2 * 64**3, bytes=3 * 4 * 64**2, effort=BRIEF)
    assert profile.tflops == pytest.approx(2 * 64**3 / profile.ms / 1e9)
    assert profile.flops_fraction == pytest.approx(profile.tflops / 2.0)
    assert profile.bytes_fraction == pytest.approx(12 * 64**2 / profile.ms / 1e9 / 0.5)
    assert "of the matrix product's" in str(profile)


def test_a_table_compares(ceiling: Ceiling) -> None:
    calls: list[str] = []

    def once(x: torch.Tensor) -> None:
        calls.append("once")
        time.sleep(0.002)

    def twice(x: torch.Tensor) -> None:
        calls.append("twice")
        time.sleep(0.004)

    profiles = tileattn.profile_all({"once": once, "twice": twice}, torch.zeros(1), flops=1e6, effort=BRIEF)
    assert [each.name for each in profiles] == ["once", "twice"]
    assert profiles["twice"].ms > profiles["once"].ms
    # They take turns: neither has all its calls before the other's.
    assert calls.index("twice") < len(calls) - 1 - calls[::-1].index("once")
    lines = str(profiles).splitlines()
    assert lines[0].strip() == "on cpu: matrix product 2 TFLOPS, copy 500 GB/s"
    assert any(line.split()[:1] == ["once"] and "1.00×" in line for line in lines)
    with pytest.raises(KeyError, match=r"'thrice' is not one of 'once', 'twice'"):
        profiles["thrice"]


def test_ceilings_are_measured_once_and_in_a_dtype_that_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "CPU_MATMUL_SIZE", 64)
    monkeypatch.setattr(profiling, "CPU_COPIED_BYTES", 2**16)
    monkeypatch.setattr(profiling, "CEILING_EFFORT", BRIEF)
    profiling._machine_ceiling.cache_clear()
    try:
        of_machine = profiling.machine_ceiling(CPU, torch.float8_e4m3fn)
        assert of_machine.matmul_tflops > 0
        assert of_machine.copy_tbps > 0
        assert profiling.machine_ceiling(CPU, torch.bfloat16) is of_machine
        assert profiling.machine_ceiling(CPU, torch.float32) is not of_machine
    finally:
        profiling._machine_ceiling.cache_clear()


def test_bad_arguments_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match="twelve must be callable, got int"):
        tileattn.profile_all({"twelve": 12})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="flops must be positive and finite, or None, got 0"):
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
    for device in ("cuda", "cuda:1", "cpu:3", "meta", "tpu", 3.5):
        with pytest.raises(ValueError, match=f"device must be one of this machine, got '{device}'; accepted: cpu"):
            tileattn.profile(torch.zeros, 1, device=device)  # type: ignore[arg-type]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ValueError, match="device must be given where no argument is a tensor"):
        tileattn.profile(lambda: None)


@pytest.mark.parametrize("count", [math.inf, -math.inf, math.nan, 10**400, -1])
def test_counts_are_positive_and_finite(count: float) -> None:
    with pytest.raises(ValueError, match="bytes must be positive and finite, or None, got "):
        tileattn.profile(torch.zeros, 1, bytes=count)


def never(*args: object) -> None:
    raise AssertionError("arguments are refused before anything runs")


def test_what_cannot_be_measured_is_refused_before_anything_runs() -> None:
    with pytest.raises(TypeError, match=r"effort must be a tileattn.measure.timing.Effort, got None"):
        tileattn.profile(never, effort=None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="fns must have names of type str, got 3"):
        tileattn.profile_all({"three": never, 3: never})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="the first tensor's device must be one of this machine, got 'meta'"):
        tileattn.profile(never, torch.zeros(1, device="meta"))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"warmup_ms": -1}, "Effort: warmup_ms must be a finite number of 0 or more, got -1"),
        ({"measure_ms": math.inf}, "Effort: measure_ms must be a finite number of 0 or more, got inf"),
        ({"measure_ms": "x"}, "Effort: measure_ms must be a finite number of 0 or more, got 'x'"),
        ({"rounds": 0}, "Effort: rounds must be an integer of at least 1, got 0"),
        ({"rounds": 1.5}, "Effort: rounds must be an integer of at least 1, got 1.5"),
        ({"min_calls": 0}, "Effort: min_calls must be an integer of at least 1, got 0"),
    ],
)
def test_an_effort_measures_something(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=f"^{says}$"):
        Effort(**wrong)


def test_calls_of_nanoseconds_come_to_an_end() -> None:
    start = time.perf_counter()
    profile = tileattn.profile(lambda: 1, device="cpu", effort=Effort(measure_ms=10_000, rounds=2))
    assert time.perf_counter() - start < 5
    assert profile.calls == 2 * timing.MOST_CALLS
    assert " 0.000 ms" not in str(profile)


def test_what_the_loop_takes_counts_as_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow_clock(call: Callable[[], object]) -> float:
        time.sleep(0.002)
        return 0.0

    monkeypatch.setattr(timing, "_timed_cpu", slow_clock)
    assert 1 <= len(timing.sample_ms(lambda: None, CPU, Effort(measure_ms=20))) <= 10


def named(*names: str) -> profiling.Profiles:
    return profiling.Profiles(tuple(Profile(name, "cpu", 123.4, (100.0, 200.0), 9, 2**20) for name in names))


def test_names_are_no_markup() -> None:
    text = str(named("tileattn[triton]", "tileattn[mma]", "[/b]", ":smile:"))
    assert [line.split()[0] for line in text.splitlines()[-4:]] == [
        "tileattn[triton]", "tileattn[mma]", "[/b]", ":smile:",
    ]  # fmt: skip


@pytest.mark.parametrize("length", [46, 200])
def test_long_names_are_folded_and_numbers_are_not(length: int) -> None:
    text = str(named("x" * length))
    assert "100.0 to 200.0" in text
    assert "…" not in text
    assert text.count("x") == length
    assert max(map(len, text.splitlines())) <= 140


def test_one_call_has_no_spread() -> None:
    assert profiling._quartiles([2.0]) == (2.0, 2.0)


def test_the_standard_librarys_profile_is_untouched() -> None:
    """Neither module is hidden by the other, in whatever order they come."""
    assert importlib.import_module("profile").run is not None
    code = (
        "import tileattn.profiling, tileattn, profile, cProfile; assert callable(tileattn.profile); profile.Profile()"
    )
    fresh_process.run(code)
    assert not hasattr(importlib.import_module("profile"), "machine_ceiling")


@pytest.mark.gpu
def test_on_a_gpu_time_and_memory_are_the_devices() -> None:
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    profile: Profile = tileattn.profile(torch.matmul, x, x, flops=2 * 4096**3, effort=BRIEF)
    assert profile.device == "cuda:0"
    assert profile.peak_bytes >= 2 * 4096**2
    assert profile.flops_fraction is not None
    # The same product as the ceiling's, only smaller.
    assert 0.3 < profile.flops_fraction < 1.3
