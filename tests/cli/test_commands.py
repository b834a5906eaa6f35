"""The command line, run on the CPU as a user runs it."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib import figure
from typer.testing import CliRunner

from tests.tools import ROOT
from tileattn.bench import problem, warmup
from tileattn.bench.baselines import own
from tileattn.bench.baselines.base import Prepared
from tileattn.bench.cases import Case
from tileattn.bench.ladder import plot as plot_ladder
from tileattn.call.appending import AppendCall
from tileattn.call.decoding import DecodeCall
from tileattn.call.facts import device_arch
from tileattn.call.inputs import Inputs
from tileattn.cli import info
from tileattn.cli import run_bench as command
from tileattn.cli.app import app
from tileattn.kernels.bundles import installed
from tileattn.kernels.bundles.installed import Bundle
from tileattn.kernels.bundles.manifest import Manifest
from tileattn.kernels.mma import backend as mma_backend
from tileattn.kernels.tilelang.backward.library import BackwardJob
from tileattn.kernels.tilelang.build import batch
from tileattn.runtime import operators as ops
from tileattn.runtime.append_dispatch import select_append
from tileattn.runtime.dispatch import BACKENDS, named, select, select_decode

RESULTS = ROOT / "benchmarks/results"
TINY = "bench --device cpu --seqlen 16,32 --heads 2 --head-dim 16 --rounds 1"


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # Errors and help are drawn in boxes as wide as the terminal: wide enough here that no message is broken.
    monkeypatch.setenv("COLUMNS", "220")
    monkeypatch.setenv("TERMINAL_WIDTH", "220")


@dataclass(frozen=True)
class Outcome:
    exit_code: int
    output: str


def invoke(line: str) -> Outcome:
    """`tileattn` with the arguments of a command line."""
    result = CliRunner().invoke(app, shlex.split(line))
    return Outcome(result.exit_code, result.output)


def words(text: str) -> str:
    """Text without colours, boxes and line breaks."""
    return " ".join(re.sub(r"\x1b\[[0-9;]*m|[│╭╮╰╯─]", " ", text).split())


def rows(path: Path) -> list[dict[str, object]]:
    content = json.loads(path.read_text())
    assert isinstance(content["rows"], list)
    return content["rows"]


def test_bench_prints_a_table_and_saves_a_result_and_a_picture() -> None:
    result = invoke(f"{TINY} --causal --dtype fp32")
    assert result.exit_code == 0, result.output
    (saved,) = Path("bench-results").glob("custom-cpu-*.json")
    assert [(row["case"], row["backend"]) for row in rows(saved)] == [
        (f"D16 causal (1,{seqlen},2)", backend) for seqlen in (16, 32) for backend in ("tileattn", "sdpa", "eager")
    ]
    assert saved.with_suffix(".png").stat().st_size > 10_000
    assert f"results: {saved}" in result.output
    assert f"picture: {saved.with_suffix('.png')}" in result.output
    for shown in ("D16 causal (1,16,2)", "tileattn (torch)", "TFLOPS", "geometric mean"):
        assert shown in result.output


def test_bench_takes_a_case_apart() -> None:
    shape = "--batch 2 --heads 4 --kv-heads 2 --seqlen 12 --seqlen-k 20 --head-dim 24 --head-dim-v 16"
    variant = "--causal --mask window6 --softcap 20 --alibi --bias --sink"
    result = invoke(f"bench {shape} {variant} --device cpu --baselines eager --rounds 1 --json r.json")
    assert result.exit_code == 0, result.output
    ours, baseline = rows(Path("r.json"))
    assert (ours["backend"], baseline["backend"]) == ("tileattn", "eager")
    assert ours["case"] == "D24/16 causal+window6+softcap20+alibi+bias+sink (2,12x20,4/2)"
    assert (ours["suite"], ours["direction"], ours["dtype"], ours["causal"]) == ("custom", "fwd", "fp32", True)
    assert Path("r.png").exists()


def test_bench_takes_a_variant_by_name() -> None:
    result = invoke(f"{TINY} --variant userscore+causal+bias-b1 --batch 2 --baselines eager,sdpa --json r.json")
    assert result.exit_code == 0, result.output
    assert {row["variant"] for row in rows(Path("r.json"))} == {"causal+bias-b1+userscore"}
    assert "refused: sdpa: SDPA has no score modification" in result.output


def test_bench_without_baselines_and_quiet() -> None:
    result = invoke(f"{TINY} --baselines none --quiet --json r.json --plot p.svg")
    assert result.exit_code == 0, result.output
    assert result.output.splitlines() == ["results: r.json", "picture: p.svg"]
    assert {row["backend"] for row in rows(Path("r.json"))} == {"tileattn"}


def test_the_fp8_suite_is_beside_bf16() -> None:
    result = invoke("bench --device cpu --suite fp8 --rounds 1 --json r.json")
    assert result.exit_code == 0, result.output
    assert [(row["backend"], row["dtype"]) for row in rows(Path("r.json"))] == [
        ("tileattn", "fp8"),
        ("tileattn-bf16", "bf16"),
    ] * 2
    errors = [row["error"] for row in rows(Path("r.json"))]
    assert errors[0] > errors[1]


def test_a_named_backend_is_the_one_that_runs() -> None:
    result = invoke(f"{TINY} --baselines none --backend torch --json r.json")
    assert result.exit_code == 0, result.output
    assert set(json.loads(Path("r.json").read_text())["implementation"].values()) == {"torch"}


@pytest.mark.parametrize("direction", ["bwd", "fwdbwd"])
def test_bench_measures_the_backward_pass(direction: str) -> None:
    result = invoke(f"{TINY} --kv-heads 1 --causal --dtype bf16 --direction {direction} --baselines sdpa,eager,flex")
    assert result.exit_code == 0, result.output
    (saved,) = Path("bench-results").glob(f"custom-{direction}-cpu-*.json")
    assert {(row["backend"], row["direction"]) for row in rows(saved)} == {
        (backend, direction) for backend in ("tileattn", "sdpa", "eager")
    }
    assert json.loads(saved.read_text())["direction"] == direction
    assert saved.with_suffix(".png").stat().st_size > 10_000
    assert f"bf16 · {'backward' if direction == 'bwd' else 'forward and backward'}" in words(result.output)
    assert "refused: flex: FlexAttention has no backward pass on a CPU" in result.output


def test_bench_trains_a_bias() -> None:
    result = invoke(
        f"{TINY} --variant causal+bias-b1+dbias --dtype bf16 --direction bwd --baselines eager --json r.json"
    )
    assert result.exit_code == 0, result.output
    assert [(row["variant"], row["backend"]) for row in rows(Path("r.json"))] == [
        ("causal+bias-b1+dbias", backend) for _ in range(2) for backend in ("tileattn", "eager")
    ]


def test_memory_is_drawn_against_the_length() -> None:
    result = invoke(
        "memory --device cpu --seqlen 16,32,64 --heads 2 --head-dim 16 --dtype bf16 --json m.json --plot m.svg"
    )
    assert result.exit_code == 0, result.output
    measured = rows(Path("m.json"))
    assert [(row["suite"], row["direction"], row["backend"], row["seqlen_q"]) for row in measured] == [
        ("memory", "fwdbwd", backend, seqlen) for seqlen in (16, 32, 64) for backend in ("tileattn", "eager")
    ]
    assert all(isinstance(row["peak_bytes"], int) and row["peak_bytes"] > 0 for row in measured)
    assert "<svg" in Path("m.svg").read_text()
    assert invoke("plot m.json -o again.png").exit_code == 0
    assert Path("again.png").stat().st_size > 10_000


def test_a_baseline_that_cannot_is_a_dash_with_its_reason() -> None:
    result = invoke(f"{TINY} --softcap 30 --baselines sdpa,fa2,eager")
    assert result.exit_code == 0, result.output
    assert "refused: sdpa: SDPA has no softcap" in result.output
    assert "refused: fa2: runs on CUDA only" in result.output


def test_results_are_never_overwritten_unless_asked() -> None:
    Path("r.json").write_text("mine")
    result = invoke(f"{TINY} --json r.json")
    assert result.exit_code == 2
    assert "Invalid value for --json: r.json exists; give another name, or --force" in words(result.output)
    assert Path("r.json").read_text() == "mine"
    result = invoke(f"{TINY} --json r.json --baselines none --force")
    assert result.exit_code == 0, result.output
    assert len(rows(Path("r.json"))) == 2


def test_without_matplotlib_there_is_no_picture_and_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    # A clone may lie at a path that is too long for a line.
    monkeypatch.setattr(command, "pip_install", "pip install tileattn[{}]".format)
    result = invoke(f"{TINY} --baselines none --json r.json")
    assert result.exit_code == 0, result.output
    assert "no picture: plots need matplotlib (pip install tileattn[plot])" in result.output
    result = invoke(f"{TINY} --baselines none --json s.json --plot s.png")
    assert result.exit_code == 2
    assert "Invalid value for --plot: plots need matplotlib: pip install tileattn[plot]" in words(result.output)
    assert not Path("s.json").exists()


def test_a_run_that_is_stopped_keeps_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts: list[problem.Problem] = []
    real = own.TileAttn.prepare

    def prepare(self: own.TileAttn, given: problem.Problem) -> Prepared:
        attempts.append(given)
        if len(attempts) == 2:
            raise KeyboardInterrupt
        return real(self, given)

    monkeypatch.setattr(own.TileAttn, "prepare", prepare)
    result = invoke(f"{TINY} --baselines none --json r.json")
    assert result.exit_code == 130
    assert "stopped: what was measured so far is shown and kept" in result.output
    assert [row["seqlen_q"] for row in rows(Path("r.json"))] == [16]


def test_a_failure_of_ours_is_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(self: own.TileAttn, given: problem.Problem) -> Prepared:
        raise RuntimeError("broken today")

    monkeypatch.setattr(own.TileAttn, "prepare", prepare)
    result = invoke(f"{TINY} --baselines sdpa --json r.json")
    assert result.exit_code == 1
    assert "failed: tileattn: RuntimeError: broken today" in words(result.output)
    assert {row["backend"] for row in rows(Path("r.json"))} == {"sdpa"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "--suite fb",
            "Invalid value for --suite: 'fb' is not known; accepted: quick, fa, heads, variants, varlen, fp8, d",
        ),
        ("--suite fa --heads 4", "Invalid value for --suite: a suite brings its own shapes"),
        ("--dtype int8", "Invalid value for --dtype: 'int8' is not known; accepted: bf16, fp16, fp32"),
        ("--suite fp8 --dtype bf16", "Invalid value for --dtype: the suite fp8 is in fp8, beside bf16"),
        ("--direction back", "Invalid value for --direction: 'back' is not known; accepted: fwd, bwd, fwdbwd"),
        ("--direction bwd --dtype fp8", "Invalid value for --direction: 'bwd' is not measured in fp8"),
        ("--suite fp8 --direction fwdbwd", "Invalid value for --direction: 'fwdbwd' is not measured in fp8"),
        (
            "--variant bias+dbias",
            "Invalid value for --variant: 'bias+dbias' asks for the gradient of the bias: give --d",
        ),
        (
            "--variant dbias",
            "Invalid value for --variant: variant 'dbias': 'dbias' is the gradient of a bias, and there",
        ),
        ("--device tpu", "Invalid value for --device: 'tpu' is not a device here; accepted: auto, cpu"),
        ("--device cpu:x", "Invalid value for --device: 'cpu:x' is not a device here; accepted: auto, cpu"),
        (
            "--baselines sdpa,fa3",
            "Invalid value for --baselines: 'fa3': not known; accepted: none, eager, sdpa, fa2, cudnn",
        ),
        ("--backend cutlass", "Invalid value for --backend: 'cutlass' is not known; accepted: "),
        ("--seqlen 128,x", "Invalid value for --seqlen / --N: '128,x' is not understood; accepted: positive integers"),
        ("--seqlen 0", "Invalid value for --seqlen / --N: '0' is not understood"),
        ("--heads 8 --kv-heads 3", "Invalid value for --kv-heads / --KV: 3 does not divide the 8 heads of q"),
        ("--batch 0", "Invalid value for --batch / --B: 0 is too few; accepted: an integer of at least 1"),
        ("--head-dim-v 0", "Invalid value for --head-dim-v / --Dv: 0 is too few; accepted: an integer of at least 1"),
        ("--mask windw8", "Invalid value for --mask: 'windw8' is no mask; accepted: full, or masks joined with '+'"),
        ("--mask window8+alibi", "Invalid value for --mask: 'alibi' is no mask; accepted: full, or masks joined"),
        ("--causal --mask causal", "Invalid value for --mask: variant 'causal+causal': 'causal' is given twice"),
        ("--variant foo", "Invalid value for --variant: variant 'foo': 'foo' is not understood; accepted: full, or"),
        ("--variant full --causal", "Invalid value for --variant: it names the whole variant; give either it or"),
        ("--softcap -1", "Invalid value for --softcap: -1 is not a cap; accepted: a number from 0.001 to 1000000000"),
        ("--plot p.gif", "Invalid value for --plot: p.gif has the suffix '.gif'; accepted: .png, .svg, .pdf"),
        ("--rounds 0", "Invalid value for --rounds: 0 is too few; accepted: an integer of at least 1"),
    ],
)
def test_a_bad_value_is_one_error_that_names_option_value_and_choice(arguments: str, message: str) -> None:
    result = invoke(f"bench {arguments}")
    assert result.exit_code == 2
    assert message in words(result.output)
    assert "Traceback" not in result.output
    assert not list(Path().iterdir())


def test_plot_draws_a_result_file_again() -> None:
    assert invoke(f"{TINY} --baselines none --json r.json").exit_code == 0
    result = invoke("plot r.json -o again.svg")
    assert result.exit_code == 0, result.output
    assert "<svg" in Path("again.svg").read_text()
    result = invoke("plot r.json -o again.svg")
    assert result.exit_code == 2
    assert "Invalid value for --output: again.svg exists" in words(result.output)
    # `bench` has drawn r.png; without a name of its own the second picture takes a new one.
    drawn = Path("r.png").read_bytes()
    assert invoke("plot r.json").exit_code == 0
    (new,) = Path().glob("r-*.png")
    Path("r.png").unlink()
    assert invoke("plot r.json").exit_code == 0
    assert Path("r.png").read_bytes() == new.read_bytes() == drawn


@pytest.mark.parametrize("options", ["--json file/r.json", "--plot file/p.png", "--plot file/p.png --json r.json"])
def test_what_cannot_be_written_is_said_before_anything_is_measured(options: str) -> None:
    Path("file").write_text("mine")
    result = invoke(f"{TINY} {options}")
    assert result.exit_code == 2
    assert f"Invalid value for {options.split()[0]}: {options.split()[1]} can't be written: file is no folder" in words(
        result.output
    )
    assert [path.name for path in Path().iterdir()] == ["file"]
    assert Path("file").read_text() == "mine"


def test_a_result_file_is_not_its_own_picture() -> None:
    result = invoke(f"{TINY} --json r.png")
    assert result.exit_code == 2
    assert "Invalid value for --json: r.png would be its own picture" in words(result.output)


def test_a_picture_that_cannot_be_written_is_one_error() -> None:
    Path("file").write_text("mine")
    Path("folder.png").mkdir()
    ladder = RESULTS / "ladder/d512-h200.json"
    for output, why in (
        ("file/p.png", "file is no folder"),
        ("/proc/folder/p.png", "No such file or directory"),
        ("folder.png", "Is a directory"),
    ):
        for line in (f"plot {ladder}", "viz weights --seqlen 4 --heads 1", "viz tiles --seqlen 64"):
            result = invoke(f"{line} -o {output} --force")
            assert result.exit_code == 2
            assert f"Invalid value for --output: {output} can't be written: {why}" in words(result.output)


def test_plot_says_what_is_wrong_with_a_file() -> None:
    Path("r.json").write_text('{"format": 0}')
    result = invoke("plot r.json")
    assert result.exit_code == 2
    assert "r.json is not a tileattn result file of format 1" in words(result.output)
    assert invoke("plot absent.json").exit_code == 2
    Path("r.json").write_text('{"format": 1, "rows": []}')
    for line in ("plot r.json", "viz dashboard r.json", "viz lengths r.json"):
        result = invoke(line)
        assert result.exit_code == 2
        assert "Invalid value for RESULT: r.json is not a tileattn result file: it lacks 'device'" in words(
            result.output
        )


def test_plot_draws_a_ladder_as_a_climb(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    monkeypatch.setattr(plot_ladder, "save", lambda measured, path: drawn.append(len(measured.rows)))
    result = invoke(f"plot {RESULTS / 'ladder/d512-h200.json'} -o climb.png")
    assert (result.exit_code, result.output) == (0, "picture: climb.png\n")
    assert drawn == [len(rows(RESULTS / "ladder/d512-h200.json"))]


def test_info_tells_versions_and_what_runs_where() -> None:
    result = invoke("info")
    assert result.exit_code == 0, result.output
    text = words(result.output)
    versions = (f"torch {torch.__version__}", "nvcc", "kernels")
    for shown in ("device", *versions, "What runs on", "SoftCap", "decode, pages of 16", "append_kv", "PyTorch"):
        assert shown in text


def test_info_names_the_extra_that_brings_a_missing_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)

    def none(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(info, "version", none)
    assert "[cuda]" in "".join(words(invoke("info").output).split())


HERE = device_arch(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


@pytest.mark.parametrize(
    ("bundled", "missing", "shown"),
    [([HERE], True, True), ([HERE], False, False), ([], True, False), (["gfx942"], True, False)],
)
def test_info_says_where_only_the_kernels_of_bundles_run(
    bundled: list[str], missing: bool, shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = tuple(Bundle(Path(), Manifest("tileattn-kernels-x", arch, "two", {}, {}, {})) for arch in bundled)
    monkeypatch.setattr(installed, "bundles", lambda: found)
    monkeypatch.setattr(info, "absence", lambda *_, **__: "missing" if missing else None)
    assert (info.ONLY_BUNDLES in words(invoke("info").output)) is shown


def test_info_asks_for_another_architecture() -> None:
    text = words(invoke("info --arch gfx942").output)
    assert "What runs on gfx942" in text
    assert "device 'gfx942' is no NVIDIA GPU from sm_80 on" in text


@pytest.mark.parametrize(("arch", "shown"), [("sm_75", "sm_75"), ("gfx1100", "gfx1100"), ("sm_90", "sm_90a")])
def test_info_answers_for_other_gpus(arch: str, shown: str) -> None:
    assert f"What runs on {shown}" in words(invoke(f"info --arch {arch}").output)


@pytest.mark.parametrize("arch", ["h100", "sm_9", ""])
def test_info_refuses_what_is_no_architecture(arch: str) -> None:
    result = invoke(f"info --arch '{arch}'")
    assert result.exit_code == 2
    assert f"Invalid value for --arch: {arch!r} is no architecture; accepted: cpu, sm_NN and" in words(result.output)


def test_info_about_another_architecture_does_not_depend_on_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(mma_backend, "has_compiler", lambda: False)
    text = words(invoke("info --arch sm_80").output)
    assert "is not installed" not in text
    assert "bf16, head dim 128, full yes yes by name 1 yes" in text


def chooser(call: info.AnyCall) -> Callable[[Any], Any]:
    if isinstance(call, DecodeCall):
        return select_decode
    return select_append if isinstance(call, AppendCall) else select


@pytest.mark.parametrize("arch", ["cpu", "sm_80", "sm_90a", "gfx942"])
def test_info_says_yes_first_where_a_call_runs(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mma_backend, "has_compiler", lambda: True)
    for example in (*info.examples(), *info.caching_examples()):
        call = example.call(arch)
        cells = {backend.name: str(info._cell(backend, call, {})) for backend in BACKENDS}
        chosen = chooser(call)(call).name
        assert next(name for name, cell in cells.items() if cell == "yes") == chosen == info.chosen(call), example.name
    assert str(info._cell(named("mma"), info.examples()[0].call("sm_90a"), {})) == "by name 1"


def test_warmup_compiles_what_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_all(jobs: list[batch.AnyJob], processes: int) -> Iterator[batch.Done]:
        assert 1 <= processes <= 16
        first, second, *rest = jobs
        yield batch.Done(first, was_there=True)
        yield batch.Done(second, seconds=3.21)
        for job in rest:
            yield batch.Done(job, error="no compiler")

    monkeypatch.setattr(batch, "compile_all", compile_all)
    result = invoke("warmup --arch sm_90a --head-dim 64,192/128 --variant full,causal+softcap50+sink --dtype fp16")
    assert result.exit_code == 1
    lines = result.output.splitlines()
    # Each call twice, without lse and with it; at head dim 64 also for short sequences and for long ones.
    assert re.fullmatch(r"\[1/12\] float16 d64 full sm_90a HopperConfig\(.*\): was in the cache", lines[0])
    assert re.fullmatch(r"\[2/12\] float16 d64 full sm_90a HopperConfig\(.*\): 3\.2 s", lines[1])
    assert "d64 full lse sm_90a" in lines[2]
    assert "SoftCap(f) sink sm_90a" in lines[4]
    assert lines[11].startswith("[12/12] float16 d192/128")
    assert lines[11].endswith(": no compiler")


def test_without_a_home_info_and_warmup_say_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("TILEATTN_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda text: text)
    monkeypatch.setattr(command.batch, "compile_all", None)
    for line, code in (("info", 0), ("warmup --arch sm_90a --head-dim 64", 1)):
        result = invoke(line)
        assert result.exit_code == code, result.output
        assert "Set TILEATTN_CACHE_DIR (or HOME)" in " ".join(result.output.split())


def test_warmup_of_fp8_includes_the_transpositions() -> None:
    wanted = warmup.calls([(64, 64), (64, 128)], ["full"], ["fp8"], "sm_90a")
    assert [job.call.head_dim_v for job in warmup.jobs(wanted) if job.config is None] == [64, 128]


def test_warmup_for_training_includes_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "compile_all", lambda jobs, processes: (batch.Done(job, seconds=1.0) for job in jobs))
    result = invoke("warmup --arch sm_90a --head-dim 64,256 --variant full,causal+sink --direction fwdbwd")
    assert result.exit_code == 0
    kernels = re.findall(r"(prepare|main|finish|queries) of backward \((.*)\): (.*): 1.0 s", result.output)
    assert [name for name, _, _ in kernels] == [
        *("prepare", "main", "finish", "main"), *("prepare", "main", "queries", "main"), *("main", "main"),
        *("main", "queries", "main"),
    ]  # fmt: skip
    assert kernels[1] == ("main", "bfloat16 d64 full lse needs_grad sm_90a", "dq dk dv")
    assert kernels[8][2] == "dq dk dv dsink"
    assert result.output.count("sums of dk and dv (torch.bfloat16 sm_90a)") == 1


def test_warmup_for_serving_has_decode_and_append(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "compile_all", lambda jobs, processes: (batch.Done(job, seconds=1.0) for job in jobs))
    result = invoke(
        "warmup --arch sm_90a --head-dim 128 --direction decode --page-size 48,256,0 --rotary none,interleaved"
    )
    assert result.exit_code == 0
    lines = [re.sub(r"\[\d+/\d+\] | HopperDecodeConfig\(.*\)|: 1.0 s", "", line) for line in result.output.splitlines()]
    caches = ("pages of 16s", "pages of 64s", "contiguous")
    flags = ("", " lse", " packed", " lse packed")
    assert lines[:12] == [f"decode bfloat16 d128 {cache} Causal(){flag} sm_90a" for cache in caches for flag in flags]
    assert [line.startswith("plan of decode") for line in lines[12:15]] == [True, True, False]  # packed and not
    rotated = [f" rotary128 interleaved {table} q" for table in ("float32", "bfloat16")]
    assert set(lines[14:-1]) == {
        f"append bfloat16 d128{rotary}{packed}{paged} sm_90a"
        for rotary in ("", *rotated) for packed in ("", " packed") for paged in ("", " paged")
    }  # fmt: skip


@pytest.mark.parametrize(
    ("entries", "options", "message"),
    [
        ({"head_dim": 100}, "", "the TileLang kernels do not run bfloat16 d100 Causal() sm_90a: head_dim must be"),
        ({"dtype": "float32"}, "", "--dtype: 'fp32' is the dtype in"),
        ({}, "--dtype fp8", "--dtype: 'fp8' has no kernels for models; accepted: bf16, fp16"),
        ({}, "--direction decode --page-size 1x", "--page-size: '1x' is not understood; accepted: 16, or 0"),
        ({}, "--direction bwd", "--direction: 'bwd' is not known; accepted: fwd, fwdbwd, decode"),
    ],
)
def test_a_model_without_kernels_is_one_error(
    entries: dict[str, object], options: str, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"num_attention_heads": 8, "head_dim": 64, **entries}))
    result = invoke(f"warmup --arch sm_90a --model {file} {options}")
    assert result.exit_code == 2
    assert message in words(result.output)


def test_warmup_of_a_model_lists_its_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "compile_all", None)
    layers = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "sliding_window": 9}
    (tmp_path / "config.json").write_text(json.dumps({"dtype": "float16", "text_config": layers, "model_type": "own"}))
    result = invoke(f"warmup --arch sm_90a --list --model {tmp_path} --inputs plain")
    assert result.exit_code == 0
    first, *kernels, last = result.output.splitlines()
    assert first == "own: head_dim 64, 4 query heads to a key/value head, window, fp16"
    assert last == f"{len(kernels)} kernels"
    assert {line.partition(" Hopper")[0] for line in kernels} == {
        f"float16 d64 {mask} sm_90a" for mask in ("Causal()", "SlidingWindow(i,i)")
    }


@pytest.mark.parametrize(
    ("variant", "split"), [("causal", (64, True)), ("full", (80, True)), ("window3", (64, True)), ("prefix2", None)]
)
def test_warmup_has_the_backward_kernels_for_all_sizes(variant: str, split: tuple[int, bool] | None) -> None:
    (call,) = warmup.backward_calls([(128, 128)], [variant], ["bf16"], "sm_90a")
    jobs = [job for job in warmup.jobs([], [call]) if isinstance(job, BackwardJob) and job.kernel == "main"]
    expected = [None, *[(64, False)] * (variant == "causal"), *[split] * (split is not None)]
    own = [job for job in jobs if job.call == call]
    assert [job.config and (job.config.block_M, job.config.split) for job in own] == expected
    # Of keys that all queries see, there is no mask.
    others = [(job.call.forward.variant, job.config.block_M, job.config.split) for job in jobs if job not in own]
    assert others == [("", 64, False)] * (variant == "causal")


@pytest.mark.parametrize("variant", ["full", "causal+alibi", "window3+bias+dbias+sink", "causal+documents4+bias"])
def test_a_warmed_backward_pass_is_the_one_that_a_call_wants(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = []
    run = ops.prepare_backward
    monkeypatch.setattr(ops, "_asks_for_alignment", lambda tensor: True)  # as on a GPU
    monkeypatch.setattr(ops, "prepare_backward", lambda call, *given: wanted.append(call) or run(call, *given))
    given = problem.build(Case(3, 40, 40, 6, 2, 32, 32, variant, "bf16"), "cpu", direction="bwd")
    if given.sink is not None:
        given.sink.requires_grad_()
    torch.autograd.grad(own.TileAttn("torch").prepare(given).call(), list(given.inputs().values()), given.do)
    assert warmup.backward_calls([(32, 32)], [variant], ["bf16"], "cpu") == wanted


@pytest.mark.parametrize(
    "variant", ["full", "causal", "causal+documents4+bias", "window3+alibi+sink", "prefix2", "bias-b1+userscore"]
)
def test_a_warmed_kernel_is_the_one_that_a_call_wants(variant: str) -> None:
    given = problem.build(Case(3, 40, 40, 6, 2, 32, 32, variant, "bf16"), "cpu")
    key = own.variant_key(given)
    real = [ops.make_call(Inputs(given.q, given.k, given.v, given.sink), key, return_lse=lse) for lse in (False, True)]
    assert warmup.calls([(32, 32)], [variant], ["bf16"], "cpu") == real


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--head-dim 64,x", "Invalid value for --head-dim / --D: 'x' is not understood; accepted: 128, or 192/128"),
        ("--variant foo", "Invalid value for --variant: variant 'foo': 'foo' is not understood; accepted: full"),
        ("--direction bwd", "Invalid value for --direction: 'bwd' is not known; accepted: fwd, fwdbwd, decode"),
        ("--page-size 16", "Invalid value for --page-size: it is for --direction decode"),
        (
            "--direction decode --page-size 16,x",
            "--page-size: 'x' is not understood; accepted: 16, or 0 for contiguous",
        ),
        ("--direction decode --rotary all", "--rotary: 'all' is not known; accepted: none, halves, interleaved"),
        ("--direction decode --dtype fp32", "the TileLang kernels do not run decode float32 d64"),
        ("--direction fwdbwd --dtype fp8", "fp8 has no backward pass"),
        ("--dtype int8", "Invalid value for --dtype: 'int8' is not known; accepted: bf16, fp16, fp32"),
        ("--head-dim 100", "the TileLang kernels do not run bfloat16 d100 full sm_90a: head_dim must be"),
        ("--model nowhere/config.json", "Invalid value for --model: nowhere/config.json does not exist; needed is"),
        ("--model . --head-dim 64", "--head-dim / --D: the model's config.json decides it: leave it or --model out"),
        ("--model . --variant causal", "--variant: the model's config.json decides it: leave it or --model out"),
        (
            "--model . --direction decode --rotary none",
            "--rotary: models of transformers rotate by themselves: leave it",
        ),
        ("--model . --inputs ragged", "--inputs: 'ragged' is not known; accepted: plain, padded, packed, documents"),
        ("--inputs packed", "Invalid value for --inputs: it is for --model"),
    ],
)
def test_a_bad_warmup_is_one_error(arguments: str, message: str) -> None:
    result = invoke(f"warmup --arch sm_90a {arguments}")
    assert result.exit_code == 2
    assert message in words(result.output)


def test_help_reads_well() -> None:
    for name in ("", "bench", "ladder", "memory", "plot", "info", "warmup"):
        result = invoke(f"{name} --help")
        assert result.exit_code == 0
        assert "Usage:" in result.output
    text = words(invoke("bench --help").output)
    for shown in ("--suite", "--baselines", "tileattn bench --suite fa --baselines fa2,cudnn --plot speed.png"):
        assert shown in text
    assert "--baselines" in invoke("memory --help").output


@pytest.mark.parametrize("command", ["bench", "memory"])
def test_peers_is_a_spelling_of_baselines_that_help_leaves_out(command: str) -> None:
    assert "--peers" not in invoke(f"{command} --help").output
    refused = [
        invoke(f"{command} --device cpu {option}") for option in ("--baselines fa3", "--peers fa3", "--peers=fa3")
    ]
    assert {result.exit_code for result in refused} == {2}
    assert all("Invalid value for --baselines: 'fa3'" in words(result.output) for result in refused)
    result = invoke(f"{command} --seqlen 16 --head-dim 16 --heads 2 --device cpu --peers sdpa --json {command}.json")
    assert result.exit_code == 0
    assert [row["backend"] for row in rows(Path(f"{command}.json"))] == ["tileattn", "sdpa"]


def test_viz_invents_names_of_pictures_that_are_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder of its own, as `tileattn bench` does; the picture of a result file is beside it."""
    said = [invoke("viz tiles --N 64").output.strip() for _ in range(2)]
    drawn = [line.removeprefix("picture: ") for line in said]
    assert all(re.fullmatch(r"viz-results/tiles-\d{8}-\d{6}(-2)?\.png", name) for name in drawn)
    assert drawn[0] != drawn[1]
    assert sorted(map(str, Path("viz-results").iterdir())) == sorted(drawn)
    monkeypatch.setattr("tileattn.cli.run_viz.draw_dashboard", lambda measured: figure.Figure())
    Path("mine.json").write_text((RESULTS / "forward/heads-h200.json").read_text())
    assert re.fullmatch(r"picture: mine-dashboard-\d{8}-\d{6}\.png", invoke("viz dashboard mine.json").output.strip())


def test_an_error_is_two_lines_whatever_it_is_about() -> None:
    for line, error in (
        ("bench --suite fb", "tileattn bench: Invalid value for --suite: 'fb' is not known"),
        ("bench --sute fa", "tileattn bench: No such option: --sute"),
        ("benhc", "tileattn: No such command 'benhc'"),
        ("viz tiles --N 0", "tileattn viz tiles: Invalid value for --seqlen / --N: 0 is too few"),
        ("ladder --B x", "tileattn ladder: Invalid value for '--batch' / '--B': "),
        ("plot absent.json", "tileattn plot: Invalid value for "),
    ):
        result = CliRunner().invoke(app, shlex.split(line), prog_name="tileattn")
        first, second = result.output.splitlines()
        assert result.exit_code == 2
        assert first.startswith(error), line
        assert second == f"Try '{first.partition(':')[0]} --help'."
    assert "Commands" in invoke("viz").output
    for given in ("-1", "one"):  # also where the message is typer's own
        assert given in CliRunner().invoke(app, ["ladder", "--seed", given]).output.splitlines()[0]


@pytest.mark.parametrize("command", ["tiles --seqlen 1000000000000", "weights --seqlen 64 --head-dim 2000000000"])
def test_viz_refuses_what_no_memory_holds(command: str) -> None:
    result = invoke(f"viz {command}")
    assert result.exit_code == 2, result.output
    assert re.search(r"Invalid value for --seqlen.*(GiB|accepted)", words(result.output))
