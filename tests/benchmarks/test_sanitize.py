"""benchmarks/sanitize.py with a stand-in for compute-sanitizer: its launches, and how it reads the tool's output."""

from __future__ import annotations

import json
import stat
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import tileattn
from tests.tools import ROOT
from tileattn.call.fp8 import FP8
from tileattn.kernels.tile_lists import is_listed
from tileattn.kernels.tilelang.append.job import AppendJob
from tileattn.kernels.tilelang.backward import launch as backward_backend
from tileattn.kernels.tilelang.backward.config import BackwardConfig
from tileattn.kernels.tilelang.backward.defaults import default as backward_default
from tileattn.kernels.tilelang.backward.defaults import queries_default
from tileattn.kernels.tilelang.backward.hopper.config import HopperBackwardConfig, HopperQueriesConfig, HopperWideConfig
from tileattn.kernels.tilelang.backward.library import BackwardJob
from tileattn.kernels.tilelang.decode.library import DecodeJob, PlanJob
from tileattn.kernels.tilelang.decode.lines.library import LinesJob
from tileattn.kernels.tilelang.forward import launch as forward_launch
from tileattn.kernels.tilelang.forward.config import HopperConfig
from tileattn.kernels.tilelang.forward.defaults import LONG, default, with_lists
from tileattn.kernels.tilelang.forward.library import Job
from tileattn.runtime import operators as ops

sys.path.insert(0, str(ROOT / "benchmarks"))

import sanitize
import sanitize_cases
from sanitize_decode import AppendLaunches

CLEAN = "========= COMPUTE-SANITIZER\nbegin a\nend a\nbegin b\nend b\n========= ERROR SUMMARY: 0 errors\n"
NO_RACE = "begin a\nend a\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"
WRONG = (
    "========= COMPUTE-SANITIZER\nbegin a\n========= Invalid __global__ read of size 4 bytes\n"
    "=========     at forward_kernel+0x140\n=========\nend a\n========= ERROR SUMMARY: 1 error\n"
)
RACE = "begin a\nend a\n========= RACECHECK SUMMARY: 3 hazards displayed (1 error, 2 warnings)\n"


@pytest.mark.parametrize(
    ("tool", "code", "output", "outcome", "errors", "warnings"),
    [
        ("memcheck", 0, CLEAN, "clean", 0, 0),
        ("racecheck", 0, NO_RACE, "clean", 0, 0),
        ("memcheck", sanitize.FOUND, WRONG, "found", 1, 0),
        ("memcheck", 0, WRONG, "found", 1, 0),  # whatever the exit code
        ("memcheck", 0, CLEAN + WRONG, "found", 1, 0),  # two processes
        ("racecheck", 0, RACE, "found", 1, 2),
        ("racecheck", 0, NO_RACE.replace("0 warnings", "1 warning"), "found", 0, 1),
        ("memcheck", None, "begin a\n", "timed out", 0, 0),
        ("memcheck", 1, CLEAN, "failed", 0, 0),
        ("memcheck", 0, "begin a\nend a\n", "failed", 0, 0),  # the tool did not watch
        ("memcheck", 0, "========= ERROR SUMMARY: 0 errors\n", "failed", 0, 0),  # nothing was launched
        ("memcheck", 0, "begin a\nend a\nbegin b\n========= ERROR SUMMARY: 0 errors\n", "failed", 0, 0),
    ],
)
def test_what_is_made_of_the_output(
    tool: str, code: int | None, output: str, outcome: str, errors: int, warnings: int
) -> None:
    report = sanitize.report_of(tool, "long", code, output, 1.0)
    assert (report.outcome, report.errors, report.warnings) == (outcome, errors, warnings)
    assert bool(report.lines) == (outcome != "clean")


def test_the_report_names_cases_and_shows_the_first_lines() -> None:
    report = sanitize.report_of("memcheck", "long", sanitize.FOUND, WRONG + 100 * "========= more\n", 1.0)
    assert report.cases == ["a"]
    assert report.lines[1] == "========= Invalid __global__ read of size 4 bytes"
    assert len(report.lines) == sanitize.SHOWN_LINES
    hung = sanitize.report_of("synccheck", "long", None, "begin a\nend a\nbegin b\nrefused b: why\nbegin c\n", 1.0)
    assert (hung.cases, hung.refused, hung.last) == (["a"], ["b"], "c")


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!{sys.executable}\nimport os, subprocess, sys, time\n{text}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_a_tool_is_run(tmp_path: Path) -> None:
    text = (
        'options = ["--tool", "memcheck", "--error-exitcode", "86", "--report-api-errors", "no"]\n'
        'assert sys.argv[1:] == [*options, "x", "y"]\n'
        'assert os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1"\n'
        f"sys.stderr.write({CLEAN!r})\n"
    )
    report = sanitize.run_tool(script(tmp_path / "tool", text), "memcheck", "long", ["x", "y"], 60)
    assert (report.outcome, report.cases) == ("clean", ["a", "b"]), report.lines


def test_a_tool_that_hangs_is_ended_with_its_child(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    text = (
        "child = subprocess.Popen(['sleep', '60'])\n"
        f"open({str(pid)!r}, 'w').write(str(child.pid))\n"
        "print('begin a', flush=True)\ntime.sleep(60)\n"
    )
    report = sanitize.run_tool(script(tmp_path / "tool", text), "synccheck", "short", [], 2)
    assert (report.outcome, report.last) == ("timed out", "a")
    ended = Path(f"/proc/{pid.read_text()}/status")
    for _ in range(50):
        if not ended.exists() or "State:\tZ" in ended.read_text():
            return
        time.sleep(0.1)
    pytest.fail("the child of the tool is still there")


# --- The cases ---


def test_what_is_covered() -> None:
    names = [case.name for case in sanitize.CASES["fwd"]]
    assert len(set(names)) == len(names)
    kinds = {"full", "causal", "window", "sink", "causal+softcap", "causal+alibi"}
    for dim in (64, 128, 256):
        assert {f"bf16-d{dim}-{kind}" for kind in kinds} <= set(names)
        assert {f"fp8-d{dim}-full", f"fp8-d{dim}-causal"} <= set(names)
        assert {f"bf16-packed-d{dim}-full", f"bf16-packed-d{dim}-causal"} <= set(names)
    assert any(heads != kv_heads for _, (heads, kv_heads) in sanitize.SIZES)
    names = [case.name for case in sanitize.CASES["bwd"]]
    assert len(set(names)) == len(names)
    for dim in (64, 128):
        kinds = {"full", "causal", "window", "documents", "causal+softcap", "causal+alibi+dalibi", "bias+dbias"}
        assert {f"bf16-d{dim}-{kind}" for kind in kinds | {"causal+deterministic", "causal+unaligned"}} <= set(names)
        assert {f"bf16-packed-d{dim}-full", f"bf16-packed-d{dim}-causal"} <= set(names)


APPEND = [case for case in sanitize.CASES["decode"] if isinstance(case, AppendLaunches)]


def test_what_is_covered_of_decode() -> None:
    cases = sanitize.CASES["decode"]
    assert len({case.name for case in cases}) == len(cases)
    assert all(len(case.sizes) == len(list(case.launches("meta"))) for case in cases)
    assert {case.page for case in APPEND} >= {0, 1, 3, 16}
    cases = [case for case in cases if case not in APPEND]
    assert {case.page for case in cases} >= {0, 1, 3, 16, 48, 64}
    assert {case.structure.head_dim for case in cases} >= {64, 128, 192, 256}
    for flag in ("packed", "fixed", "sink", "tree"):
        assert any(getattr(case.structure, flag) for case in cases), flag


def test_calls_of_decode_are_sound_where_nothing_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the torch backend; what is wrong raises there, and names what it is."""
    for name in ("decode", "append_kv"):
        real = getattr(tileattn, name)
        monkeypatch.setattr(tileattn, name, lambda *a, real=real, **named: real(*a, **{**named, "backend": "torch"}))
    for case in sanitize.CASES["decode"][::5]:
        for size, run in zip(case.sizes, case.launches("cpu")):
            if "beyond" in size and not ("pages" in size and case.page == 0):
                with pytest.raises(ValueError, match=r"seqlens_k|cu_seqlens_q|page_table"):
                    run()
            else:
                assert case.is_sound(*run()), (case.name, size)


needs_tilelang = pytest.mark.skipif(find_spec("tilelang") is None, reason="needs tilelang")


@needs_tilelang
def test_the_kernels_of_all_cases() -> None:
    """No case is refused, and each bucket has its kernel."""
    every = sanitize.jobs(sanitize.CASES["fwd"], ["short", "long"], "sm_90a")
    jobs = [job for job in every if isinstance(job, Job)]
    forward = {(job.call, job.config) for job in jobs if job.config}
    calls = {call for call, _ in forward}
    assert len(calls) >= len(sanitize.CASES["fwd"])
    for call in calls:
        configs = [default(call, seqlen) for seqlen in (1, LONG)]
        if is_listed(call.variant):  # of small sizes too, here
            configs = [with_lists(config, call) for config in configs if isinstance(config, HopperConfig)]
        assert all((call, config) in forward for config in configs), call
    assert {call.dtype for call in calls} == {torch.bfloat16, torch.float16, FP8}
    assert len([job for job in jobs if job.config is None]) == 3


@needs_tilelang
def test_the_decode_kernels_of_all_cases() -> None:
    """No case is refused; each has an attention kernel and a plan, those of a function one for lines of tiles, too."""
    for case in sanitize.CASES["decode"]:
        jobs = sanitize.jobs([case], ["short"], "sm_90a")
        if case in APPEND:
            assert [type(job) for job in jobs] == [AppendJob], case.name
            continue
        of_lines = {LinesJob} if "function" in case.name else set()
        assert {type(job) for job in jobs} == {DecodeJob, PlanJob, *of_lines}, case.name


@pytest.mark.slow(reason="3 s")
@needs_tilelang
def test_the_backward_kernels_of_all_cases() -> None:
    """No case is refused, only packed ones ask for forward kernels, and every schedule is there."""
    by_case = {case: sanitize.jobs([case], ["short"], "sm_90a") for case in sanitize.CASES["bwd"]}
    assert all(by_case.values())
    for case, kernels in by_case.items():
        assert isinstance(case, sanitize_cases.PackedCase) == any(isinstance(job, Job) for job in kernels)
    jobs = [job for kernels in by_case.values() for job in kernels if isinstance(job, BackwardJob)]
    assert {job.kernel for job in jobs} == {"prepare", "main", "finish", "queries"}
    schedules = (BackwardConfig, HopperBackwardConfig, HopperWideConfig)
    assert {type(backward_default(job.call)) for job in jobs if job.kernel == "main"} == set(schedules)
    schedules = (BackwardConfig, HopperQueriesConfig)
    assert {type(queries_default(job.call)) for job in jobs if job.kernel == "queries"} == set(schedules)
    assert {job.call.deterministic for job in jobs} == {job.call.dlse for job in jobs} == {False, True}


@needs_tilelang
def test_backward_kernels_for_short_and_long_sequences() -> None:
    short, long = (
        {job.key for job in sanitize.jobs(sanitize.chosen("^bf16-d128-causal$", "bwd"), [bucket], "sm_90a")}
        for bucket in ("short", "long")
    )
    assert len(short) == len(long) == 3
    assert len(short & long) == 1  # what prepares


DENSE = [case for case in sanitize.CASES["bwd"] if isinstance(case, sanitize_cases.BackwardCase)]
PACKED = [case for case in sanitize.CASES["bwd"] if isinstance(case, sanitize_cases.PackedBackwardCase)]


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=[pytest.mark.slow] if case.head_dim > 64 else []) for case in PACKED],
)
def test_packed_launches_are_calls(case: sanitize_cases.PackedBackwardCase, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right lengths give finite gradients on the torch backend; it refuses wrong lengths at once."""
    varlen = tileattn.varlen_attention
    monkeypatch.setattr(
        tileattn, "varlen_attention", lambda *given, **named: varlen(*given, **named | {"backend": "torch"})
    )
    launches = list(case.launches("cpu"))
    assert len(launches) == len(case.sizes)
    for number, launch in enumerate(launches):
        if number % len(sanitize_cases.BEYOND):
            with pytest.raises(ValueError, match="cu_seqlens"):
                launch()
        else:
            outputs = launch()
            assert len(outputs) == 3 + ("dalibi" in case.terms)
            assert case.is_sound(*outputs)


@pytest.mark.slow_except("bf16-d64-*", reason="0.1 s each")
@pytest.mark.parametrize("case", DENSE, ids=lambda case: case.name)
def test_backward_launches_are_calls(case: sanitize_cases.BackwardCase, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the torch backend the launches give a finite gradient for each tensor that has one."""
    run_backward = ops.run_backward
    monkeypatch.setattr(
        ops, "run_backward", lambda options, *given: run_backward(options._replace(backend="torch"), *given)
    )
    tensors = sum(term in ("dalibi", "dbias", "sink") for term in case.terms)
    launches = list(case.launches("cpu"))
    assert len(launches) == len(case.sizes)
    for launch in launches:
        outputs = launch()
        assert len(outputs) == 3 + tensors
        assert case.is_sound(*outputs)
        assert not case.is_sound(*outputs[1:], outputs[0] * torch.nan)


def test_launches_say_where_they_are(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    made = []

    def attention(q: Any, k: Any, v: Any, **named: Any) -> Any:
        if q.dtype == FP8:
            raise NotImplementedError("no fp8 here")
        made.append(q.shape)
        return q, q.new_zeros(3)

    # They are set, and must be as before after this test.
    for module, name in (
        (forward_launch, "default"),
        (forward_launch, "multiprocessors"),
        (backward_backend, "of_lengths"),
    ):
        monkeypatch.setattr(module, name, getattr(module, name))
    monkeypatch.setattr(sanitize_cases.tileattn, "attention", attention)
    monkeypatch.setattr(sanitize.Case, "calls", lambda self, device, calls=sanitize.Case.calls: calls(self, "cpu"))
    sanitize.launch_all(sanitize.chosen("(bf16|fp8)-d64-full"), "long", 3)
    assert forward_launch.multiprocessors(torch.device("cpu")) == 3
    assert len(made) == len(sanitize.SIZES)
    said = capsys.readouterr().out.splitlines()
    assert said == [
        "begin bf16-d64-full",
        "end bf16-d64-full",
        "begin fp8-d64-full",
        "refused fp8-d64-full: no fp8 here",
    ]


# --- The command ---


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine with a GPU, kernels and a sanitizer."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: False)  # a build for GPUs asks them for more
    monkeypatch.setattr(sanitize, "device_arch", lambda device: "sm_90a")
    monkeypatch.setattr(sanitize, "jobs", lambda cases, buckets, arch: [])
    monkeypatch.setattr(sanitize.environment, "device_name", lambda device: "NVIDIA H200")
    text = (
        "if '--version' in sys.argv:\n    print('NVIDIA (R) Compute Sanitizer\\nVersion 2025.3.1.0 (build 1)')\n"
        f"elif 'racecheck' in sys.argv:\n    print({RACE!r})\n"
        f"else:\n    print({CLEAN!r})\n"
    )
    return script(tmp_path / "compute-sanitizer", text)


def check(arguments: str) -> Any:
    return CliRunner().invoke(sanitize.app, ["check", *arguments.split()])


def test_a_clean_check(pretend: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    result = check(f"--tool memcheck --tool synccheck --sanitizer {pretend} --out {out}")
    assert result.exit_code == 0, result.output
    summary = json.loads(out.read_text())
    assert summary["gpu"] == "NVIDIA H200"
    assert summary["versions"]["compute-sanitizer"] == "2025.3.1.0"
    assert [(run["tool"], run["kernels"], run["errors"]) for run in summary["runs"]] == [
        (tool, kernels, 0) for tool in ("memcheck", "synccheck") for kernels in ("long", "short")
    ]


def test_a_hazard_sets_the_exit_code(pretend: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(pretend.parent), prepend=":")  # found there
    result = check("--kernels long")
    assert result.exit_code == 1
    assert "memcheck, kernels for long sequences: clean" in result.output
    assert "racecheck, kernels for long sequences: found; 1 errors, 2 warnings" in result.output
    assert "RACECHECK SUMMARY: 3 hazards" in result.output


@pytest.mark.parametrize(
    "arguments",
    [
        "--tool leakcheck",
        "--kernels narrow",
        "--cases nothing",
        "--cases (",
        "--sanitizer /nowhere",
        "--direction both",
        "--direction bwd --kernels narrow",
        "--direction bwd --cases fp8",
    ],
)
def test_what_is_refused(pretend: Path, arguments: str) -> None:
    assert check(arguments).exit_code == 2


def test_without_a_gpu_nothing_runs(pretend: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert check(f"--sanitizer {pretend}").exit_code == 2


def test_the_backward_pass(pretend: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    options = "--direction bwd --kernels short --cases d64-full --tool memcheck"
    result = check(f"{options} --sanitizer {pretend} --out {out}")
    assert result.exit_code == 0, result.output
    summary = json.loads(out.read_text())
    assert summary["direction"] == "bwd"
    assert [run["kernels"] for run in summary["runs"]] == ["short"]
