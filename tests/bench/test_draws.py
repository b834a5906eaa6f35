"""`tileattn bench --suite random`: the draw, what is measured again, the standing, the command."""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from tests.tools import ROOT
from tests.tools.made_up import made_up
from tileattn.bench import problem, results, runner
from tileattn.bench.baselines import BASELINES, TileAttn
from tileattn.bench.baselines.base import OWN, Prepared
from tileattn.bench.cases import Case, square
from tileattn.bench.draws import ahead, plot, shapes, standing
from tileattn.bench.draws.shapes import CPU, GPU, draw, draws, has_sure_baseline, needs_dense_mask, shape_of
from tileattn.bench.oracle import gradients, output
from tileattn.bench.report import render as render_rows
from tileattn.bench.runner import Run
from tileattn.cli import random_bench
from tileattn.cli.app import app
from tileattn.cli.run_bench import FileOptions
from tileattn.kernels.tilelang.build.batch import Done
from tileattn.measure.timing import Effort

DEVICE = torch.device("cpu")
COMMAND = ["bench", "--suite", "random", "--device", "cpu", "--seed", "3", "--rounds", "1", "--commit", "abc"]


# --- The draw ---


@pytest.mark.parametrize("limits", [GPU, CPU], ids=["gpu", "cpu"])
def test_every_case_keeps_the_limits(limits: shapes.Limits) -> None:
    for seed in range(4):
        cases = draw(seed, 40, limits=limits)
        assert len({shape_of(case) for case in cases}) == len({case.name for case in cases}) == 40
        assert sum(map(has_sure_baseline, cases)) >= 36
        for case in cases:
            low, high = limits.keys
            assert low <= case.seqlen_q <= case.seqlen_k <= high
            assert 1 <= case.batch <= max(limits.batches)
            assert limits.heads[0] <= case.heads <= limits.heads[1]
            assert 1 <= case.heads // case.kv_heads <= 16
            assert (case.head_dim, case.head_dim_v) in shapes.HEAD_DIMS
            assert limits.flops[0] <= case.flops() <= limits.flops[1]
            of_keys = case.seqlen_k * case.kv_heads * (case.head_dim + case.head_dim_v)
            elements = case.batch * (case.seqlen_q * case.heads * case.head_dim + of_keys)
            assert 2 * elements <= limits.most_bytes


def test_the_draws_have_what_models_have() -> None:
    cases = [case for seed in range(10) for case in draw(seed, 40)]
    assert {(case.head_dim, case.head_dim_v) for case in cases} == set(shapes.HEAD_DIMS)
    assert {case.heads // case.kv_heads for case in cases} == set(shapes.GROUPS)
    assert {3, 5, 6, 7} <= {case.kv_heads for case in cases}
    assert max(case.seqlen_k for case in cases) > 50_000
    assert min(case.seqlen_q for case in cases) < 400
    assert max(case.batch for case in cases) == 32
    multiples = sum(case.seqlen_k % 128 == 0 for case in cases)
    assert 0.05 < multiples / 400 < 0.25
    assert sum(case.seqlen_q != case.seqlen_k for case in cases) > 40
    kinds = Counter(ahead.kind(case.variant) for case in cases)
    assert set(kinds) == {"full", "causal", "window", "documents", "causal+documents"}
    assert all(count > 8 for count in kinds.values())


def test_a_seed_gives_the_same_cases_everywhere() -> None:
    # By any version of Python and torch. Files name their seed: a change of the distribution makes them another's.
    names = [
        "D64 full (3,18560,8/1)",
        "D256 causal (4,13653,8)",
        "D64 causal (1,2435x9031,24)",
        "D80 causal (4,1824,35/5)",
        "D64 causal (2,6119x7780,16/1)",
        "D192/128 full (1,8703,64)",
    ]
    assert [case.name for case in draw(1, 6)] == names
    assert draw(1, 40)[:6] == draw(1, 6) != draw(2, 6)


def test_no_shape_is_in_two_draws() -> None:
    first = draw(5, 4)
    assert draw(5, 4, taken={shape_of(first[0])})[:3] == first[1:]
    # A seed twice would give the same cases.
    found = draws([7, 8], 5, "bf16", "cuda")
    assert [len(cases) for cases in found.values()] == [5, 5]
    assert found[7] == draw(7, 5)


def test_limits_without_enough_cases_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "MOST_TRIES", 300)
    with pytest.raises(ValueError, match="of 40 cases only 0 were found in 300 tries"):
        draw(0, 40, limits=replace(GPU, most_bytes=1))


# --- Baselines ---


def test_sdpa_kernels_get_no_mask_of_all_pairs() -> None:
    for name in ("fa2", "cudnn"):
        kernel = standing.WithoutDenseMask(BASELINES[name])
        assert kernel.name == name
        plain, window = (problem.build(square(1, 64, 2, 64, variant), DEVICE) for variant in ("causal", "window8"))
        fewer = problem.build(replace(window.case, seqlen_q=32, variant="causal"), DEVICE)
        assert kernel.refusal(plain) == "runs on CUDA only"
        assert {kernel.refusal(x) for x in (window, fewer)} == {"it would take this mask as a tensor of all pairs"}
    assert not needs_dense_mask(replace(fewer.case, variant="full"))


@pytest.mark.parametrize("variant", ["documents24", "causal+documents24", "documents200"])
def test_fa4_takes_documents_as_packed_sequences(monkeypatch: pytest.MonkeyPatch, variant: str) -> None:
    def flash_attn_varlen_func(
        q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
        max_seqlen_k: int, causal: bool, **other: Any
    ) -> Tensor:  # fmt: skip
        assert torch.equal(cu_seqlens_q, cu_seqlens_k)
        assert max_seqlen_q == max_seqlen_k == int(cu_seqlens_q.diff().max())
        parts = []
        for start, end in zip(cu_seqlens_q.tolist(), cu_seqlens_q.tolist()[1:]):
            heads = (x[start:end].transpose(0, 1) for x in (q, k, v))
            attend = torch.nn.functional.scaled_dot_product_attention
            parts.append(attend(*heads, is_causal=causal, enable_gqa=True).transpose(0, 1))
        return torch.cat(parts)

    cute = SimpleNamespace(flash_attn_func=None, flash_attn_varlen_func=flash_attn_varlen_func)
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(cute=cute))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", cute)
    case = Case(2, 100, 100, 4, 2, 32, 32, variant, "fp32")
    given = problem.build(case, DEVICE, direction="bwd")
    output.build(given).check(BASELINES["fa4"].prepare(given).call().detach())


# --- What is measured again, and what it says ---


def test_a_slow_row_is_measured_again_beside_its_fastest_baselines() -> None:
    again = standing.measured_again
    assert again({OWN: 1.0, "fa2": 0.96}) == []
    assert again({OWN: 1.0, "fa2": 0.94, "cudnn": 2.0, "fa4": 1.0}) == [OWN, "fa2", "fa4"]
    assert again({OWN: 1.0}) == again({"fa2": 1.0}) == []


def test_orders_are_random_and_repeatable() -> None:
    one, same = (standing.random_order(9) for _ in range(2))
    orders = [tuple(one(3, number)) for number in range(200)]
    assert orders == [tuple(same(3, number)) for number in range(200)]
    assert len(Counter(orders)) == 6
    assert min(Counter(orders).values()) > 15


def test_the_runner_replaces_the_times_of_a_slow_row(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def sample_ms(call: Any, device: torch.device, effort: Effort) -> list[float]:
        asked.append(call.name)
        # The second time tileattn is as fast.
        return [{OWN: 3.0 if asked.count(OWN) <= 2 else 1.0, "near": 1.0, "far": 2.9}[call.name]]

    class Named:
        def __init__(self, name: str) -> None:
            self.name = name

        def refusal(self, given: problem.Problem) -> None:
            return None

        def prepare(self, given: problem.Problem) -> Prepared:
            call = TileAttn("torch").prepare(given).call

            class Call:
                name = self.name

                def __call__(self) -> Tensor:
                    return call()

            return Prepared(Call())

    monkeypatch.setattr(runner.timing, "sample_ms", sample_ms)
    measured = results.begin(DEVICE, "abc", "test")
    case = square(1, 32, 2, 16, "full", "fp32")
    implementations = [Named(name) for name in (OWN, "near", "far")]
    effort = Effort(0, 0, 2)
    Run("random", [case], implementations, DEVICE, measured, effort, again=standing.measured_again, rounds_again=4)()
    assert Counter(asked) == {OWN: 2 + 4, "near": 2 + 4, "far": 2}
    assert {row.backend: row.ms for row in measured.rows} == {OWN: 1.0, "near": 1.0, "far": 2.9}
    assert measured.first_ms == {case.name: {OWN: 3.0, "near": 1.0}}


def test_the_standing_of_a_file(tmp_path: Path) -> None:
    measured = made_up("random", "cuda", OWN, "fa4")
    names = measured.draws["1"]
    alone, slow, missing = names[:3]
    measured.rows = [
        replace(row, ms=1.25) if (row.case, row.backend) == (slow, OWN) else row
        for row in measured.rows
        if row.case != missing and (row.case, row.backend) != (alone, "fa4")
    ]
    measured.draws = {"1": names[:20], "2": names[20:]}
    path = tmp_path / "r.json"
    measured.standing = standing.as_json(measured)
    results.save(measured, path)
    every = results.load(path).standing["all"]
    assert (every["alone"], every["missing"], every["rows"], every["under_least"]) == ([alone], [missing], 38, 1)
    assert every["worst"][0] == [slow, pytest.approx(1.1 / 1.25)]
    assert every["geometric_mean"] == pytest.approx(1.1 * 1.25 ** (-1 / 38))
    assert [len(measured.standing[f"seed {seed}"]["ratios"]) for seed in (1, 2)] == [18, 20]
    assert median(every["ratios"].values()) == pytest.approx(1.1)
    assert render_rows(measured) is not None
    pytest.importorskip("matplotlib")
    plot.save(measured, tmp_path / "r.png")
    assert (tmp_path / "r.png").stat().st_size > 10_000


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="needs matplotlib")
def test_the_legend_lies_on_no_line() -> None:
    figure = plot.draw({"forward": {f"seed {seed}": [0.2, 0.9] for seed in range(6)}})
    figure.draw_without_rendering()
    (axes,) = figure.axes
    legend = axes.get_legend()
    assert legend is not None
    assert legend.get_window_extent().y1 < axes.get_window_extent().y0
    assert legend.get_window_extent().y0 >= 0


def test_fewer_heads_are_checked_where_that_is_asked_for() -> None:
    case = square(3, 64, 4, 16, "causal", "fp32")
    all_scores = 3 * 4 * 64 * 64
    whole, last = (gradients.sample(case, DEVICE, most) for most in (gradients.COST * all_scores, 1))
    assert (whole.text, last.batches, last.heads) == ("all rows", (2,), (3,))
    given = problem.build(case, DEVICE, direction="bwd")
    o = TileAttn("torch").prepare(given).call()
    grads = torch.autograd.grad(o, tuple(given.inputs().values()), given.do)
    gradients.build(given, 1).check(grads)
    assert len(output.sample(case, DEVICE, 64 * 64).rows) < 64 * 3


@pytest.mark.skipif(find_spec("tilelang") is None, reason="needs tilelang")
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_all_kernels_of_a_draw_are_compiled_ahead(monkeypatch: pytest.MonkeyPatch, direction: str) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import precompile

    cases = draw(2, 8)
    attempts = (attempt for case in cases for attempt in precompile._case_attempts(case, direction))
    needed = {job.key: str(job) for job in precompile.jobs_of(attempts, "sm_90a")}
    there = {job.key for job in ahead.own_jobs(cases, direction, "sm_90a")}
    assert needed
    assert [job for key, job in needed.items() if key not in there] == []
    assert {str(job) for job in ahead.baseline_jobs(cases, direction)} == {f"fa4 {direction} {x.name}" for x in cases}


def test_what_is_in_the_cache_is_not_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = draw(2, 3)
    first, *others = ahead.own_jobs(cases, "fwd", "sm_90a")
    asked: list[Any] = []
    said: list[str] = []

    def compile_all(jobs: list[Any], processes: int) -> list[Done]:
        asked.extend(jobs)
        return [Done(job, seconds=2.0) for job in jobs]

    monkeypatch.setattr(ahead, "compile_all", compile_all)
    monkeypatch.setattr(ahead, "device_arch", lambda device: "sm_90a")
    there = SimpleNamespace(find=lambda key: "there" if key == first.key else None)
    monkeypatch.setattr(ahead, "kernel_cache", lambda: there)
    for baselines in (["fa2"], ["fa2", "fa4"]):
        asked.clear()
        ahead.compile_ahead(cases, "fwd", baselines, DEVICE, said.append)
        assert [job for job in asked if not isinstance(job, ahead.BaselineJob)] == others
    assert len(asked) == len(others) + 3
    assert said[-1] == f"kernel {len(asked)}/{len(asked)}: {asked[-1]}: 2.0 s"


# --- The command ---


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_bench, "EFFORT", Effort(0, 0))
    monkeypatch.setattr("tileattn.cli.run_bench.find_spec", lambda name: None)  # as without matplotlib


def invoke(*options: str) -> tuple[int, str]:
    ran = CliRunner().invoke(app, [*COMMAND, *options])
    return ran.exit_code, ran.output


@pytest.mark.usefixtures("_quick")
def test_a_run_that_is_stopped_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = str(tmp_path / "r.json")
    options = ["--cases", "1", "--draws", "2", "--direction", "bwd", "--json", file]
    build = problem.build

    def stop_at_the_second(case: Case, *rest: Any) -> problem.Problem:
        if case.name == drawn[1]:
            raise KeyboardInterrupt
        return build(case, *rest)

    drawn = [case.name for cases in draws([3, 4], 1, "fp32", "cpu").values() for case in cases]
    monkeypatch.setattr(runner.problem, "build", stop_at_the_second)
    code, text = invoke(*options)
    assert (code, "--resume goes on" in text) == (130, True), text
    assert json.loads(Path(file).read_text())["standing"]["all"]["missing"] == drawn[1:]
    monkeypatch.setattr(runner.problem, "build", build)
    code, text = invoke(*options, "--resume")
    assert code == 0, text
    measured = results.load(Path(file))
    assert (measured.seed, measured.direction) == (3, "bwd")
    assert measured.draws == {"3": drawn[:1], "4": drawn[1:]}
    assert [(row.suite, row.case, row.backend) for row in measured.rows] == [
        ("random", case, backend) for case in drawn for backend in (OWN, "sdpa")
    ]
    assert measured.standing == json.loads(json.dumps(standing.as_json(measured)))
    assert "Random shapes against the best baseline" in text
    code, text = invoke(*options[:-2], "--json", file, "--resume", "--seed", "5")
    assert code == 2
    assert "r.json is of seed 3, and this run of 5" in " ".join(text.replace("│", " ").split())
    code, text = invoke(*options[2:], "--cases", "2", "--resume")
    assert code == 2
    says = "r.json is of other cases (1 of seed 3, 1 of seed 4) than this run (2 of seed 3, 2 of seed 4)"
    assert says in " ".join(text.replace("│", " ").split())
    code, text = invoke(*options, "--resume", "--rounds", "7")
    assert code == 2
    assert "r.json is of rounds '1', and this run of '7'" in " ".join(text.replace("│", " ").split())


@pytest.mark.usefixtures("_quick")
def test_a_case_that_was_stopped_is_measured_when_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a baseline had already refused it."""
    options = ["--cases", "1", "--json", str(tmp_path / "r.json"), "--baselines", "fa2,sdpa"]

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    refuses = SimpleNamespace(name="fa2", refusal=lambda given: "not here")
    chosen = [refuses, TileAttn(None), BASELINES["sdpa"]]
    monkeypatch.setattr(random_bench, "_implementations", lambda *_: chosen)
    with monkeypatch.context() as stopped:
        stopped.setattr("tileattn.measure.timing.sample_ms", stop)
        assert invoke(*options)[0] == 130
    assert results.load(tmp_path / "r.json").cases() == []
    code, text = invoke(*options, "--resume")
    assert code == 0, text
    measured = results.load(tmp_path / "r.json")
    assert [row.backend for row in measured.rows] == [OWN, "sdpa"]
    assert [(entry.backend, entry.reason) for entry in measured.refused] == [("fa2", "not here")]


@pytest.mark.usefixtures("_quick")
def test_a_run_goes_on_from_a_file_that_is_still_empty(tmp_path: Path) -> None:
    """As of a run that was killed before its first case ended."""
    (tmp_path / "r.json").touch()
    code, text = invoke("--cases", "1", "--json", str(tmp_path / "r.json"), "--resume")
    assert code == 0, text
    assert len(results.load(tmp_path / "r.json").cases()) == 1


def test_a_wrong_file_is_refused_before_kernels_are_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "r.json").write_text("{}")
    compiled: list[Any] = []
    monkeypatch.setattr(random_bench, "compile_ahead", lambda *arguments: compiled.append(arguments))
    monkeypatch.setattr(random_bench, "_implementations", lambda *_: [])
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    begin = results.begin
    monkeypatch.setattr(results, "begin", lambda device, *rest: begin(DEVICE, *rest))
    asked = random_bench.RandomOptions(1, 1, None, None, None, "fwd", None, None, 5, False)
    files = FileOptions(tmp_path / "r.json", None, False, None, True)
    with pytest.raises(Exception, match=r"r\.json exists"):
        random_bench.bench(asked, torch.device("cuda"), files)
    assert not compiled


def test_the_seed_is_that_of_the_commit() -> None:
    assert random_bench._seed(None, "db1491fa00-dirty") == 0xDB1491FA
    assert random_bench._seed(0, "db1491fa00") == 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--seed", "-1"], "-1 is not a seed; accepted: an integer from 0 to 2^63 - 1"),
        (["--cases", "0"], "0 is too few"),
        (["--cases", "500", "--draws", "3"], "more than 1000 cases in all; accepted: at most 1000"),
        (["--dtype", "fp8"], "'fp8' is not measured in this suite; accepted: bf16, fp16, fp32"),
        (["--direction", "up"], "'up' is not known; accepted: fwd, bwd, fwdbwd"),
        (["--compile", "only"], "'only' has nothing to compile on a CPU"),
        (["--compile", "yes"], "'yes' is not known; accepted: ahead, only, no"),
        (["--heads", "4"], "the suite random does not have it: its shapes are drawn"),
        (["--resume"], "it goes on from the file of --json: name that"),
        (["--suite", "fa"], "only the suite random has it"),
    ],
)
def test_bad_options_get_one_error(options: list[str], says: str) -> None:
    code, text = invoke(*options)
    assert code == 2
    assert says in " ".join(text.replace("│", " ").split())


def test_without_a_commit_a_seed_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = CliRunner().invoke(app, ["bench", "--suite", "random", "--device", "cpu", "--commit", "none"])
    assert ran.exit_code == 2
    assert "Invalid value for --seed" in ran.output
