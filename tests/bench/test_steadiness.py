"""Warnings of times that are doubtful: other work on the device, and rounds that lie far apart."""

from __future__ import annotations

import subprocess
import types
from pathlib import Path

import pytest
import torch
from rich.console import Console

from tileattn.bench import duration, report, results, steadiness
from tileattn.bench.baselines import BASELINES, TileAttn
from tileattn.bench.cases import square
from tileattn.bench.runner import Run
from tileattn.measure import busy, timing

CPU = torch.device("cpu")
# user nice system idle iowait irq softirq steal guest: of core 0 half of 100 ticks are busy, of core 1 none.
STAT = "cpu  1 1 1 1 1 1 1 1 1\ncpu0 {} 0 0 {} 0 0 0 0 7\ncpu1 5 0 0 {} 9 0 0 0 0\nintr 1 2\n"


@pytest.mark.parametrize(("cores", "share"), [({0}, 0.5), ({1}, 0.0), ({0, 1}, 0.25), ({7}, None)])
def test_the_cores_of_this_process_are_watched(
    cores: set[int], share: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "stat"
    file.write_text(STAT.format(10, 10, 10))
    monkeypatch.setattr(busy, "STAT", file)
    monkeypatch.setattr(busy.time, "sleep", lambda seconds: file.write_text(STAT.format(60, 60, 110)))
    monkeypatch.setattr(busy.os, "sched_getaffinity", lambda process: cores)
    assert busy.busy_share(CPU) == share
    file.write_text(STAT.format(10, 10, 10))
    assert steadiness.busy_line(CPU) == (
        f"the CPU was {share:.0%} busy with other work before the run: times may be too long" if share else None
    )


def test_a_system_that_does_not_tell_gives_no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(busy, "STAT", Path("/absent"))
    assert busy.busy_share(CPU) is None
    assert steadiness.busy_line(CPU) is None


@pytest.mark.parametrize(
    ("answers", "share"),
    [
        (["37\n", "45\n"], 0.37),
        (["100\n", "0\n"], 0.0),  # the first second had work of this process, such as the ladder's first values
        (["37\n", "[N/A]\n"], 0.37),
        (["0\n"], 0.0),
        (["[N/A]\n"], None),
    ],
)
def test_a_gpu_is_asked_by_its_uuid(answers: list[str], share: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        return subprocess.CompletedProcess(command, 0, stdout=answers[len(asked) - 1])

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(uuid="1a-2b"))
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(busy.time, "sleep", lambda seconds: None)
    assert busy.busy_share(torch.device("cuda", 3)) == share
    assert len(asked) == len(answers)
    assert asked[0][:2] == ["nvidia-smi", "--id=GPU-1a-2b"]


def test_without_nvidia_smi_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*args: object, **options: object) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace())
    monkeypatch.setattr(subprocess, "run", run)
    assert busy.busy_share(torch.device("cuda")) is None


def test_rounds_that_lie_apart_are_one_line_of_table_and_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = iter([[1.0, 1.0], [1.05, 1.05], [1.02, 1.02], [2.0, 2.0], [2.0, 2.0], [3.0, 3.0]])
    monkeypatch.setattr(timing, "sample_ms", lambda call, device, effort: next(rounds))
    monkeypatch.setattr(steadiness, "busy_share", lambda device: 0.5)
    measured = results.begin(CPU, "abc", "test")
    cases = [square(1, length, 1, 16, "full", "fp32") for length in (8, 9)]
    run = Run("custom", cases, [BASELINES["sdpa"]], CPU, measured, effort=timing.Effort(rounds=3))
    run()
    wide = "the rounds of 1 of 2 rows differ by more than 10%, most by 50%: sdpa, D16 full (1,9,1)"
    assert measured.doubts == [
        "the CPU was 50% busy with other work before the run: times may be too long",
        wide,
    ]
    assert run.spreads == pytest.approx({("D16 full (1,8,1)", "sdpa"): 0.05 / 1.02, ("D16 full (1,9,1)", "sdpa"): 0.5})
    console = Console(width=200)
    with console.capture() as shown:
        console.print(report.render(measured))
    assert f"! warning: {wide}" in shown.get()
    results.save(measured, tmp_path / "r.json")
    assert results.load(tmp_path / "r.json").doubts == measured.doubts


def test_one_round_has_no_spread() -> None:
    assert steadiness.spread([3.0], 3.0) == 0
    assert steadiness.spread_line({("case", "sdpa"): 0.1}) is None


def test_a_long_run_on_a_cpu_is_announced_with_its_least_time(monkeypatch: pytest.MonkeyPatch) -> None:
    case = square(1, 1024, 8, 64, "causal", "fp32")  # 2 * 8 * (64 + 64) * 1024**2 / 2 FLOPs
    assert duration.least_seconds([case, case], 3, "fwd", 5, 1e9) == pytest.approx(36 * 2 * 1.073741824)
    monkeypatch.setattr(duration, "cpu_flops_per_second", lambda: 1e9)
    implementations = [TileAttn(None), BASELINES["sdpa"]]
    line = duration.announced([case] * 3000, implementations, "fwd", CPU, 5)
    assert line.startswith("measuring 3000 cases on cpu: tileattn, sdpa. At least 21 hours on this CPU; Ctrl-C")
    assert duration.announced([case], implementations, "fwd", CPU, 5) == "measuring 1 case on cpu: tileattn, sdpa"
