"""The benchmark: its FLOPs, suites, error, runner, result file, tables and pictures."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from io import StringIO
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from tests.tools.made_up import made_up
from tileattn.bench import cases, compare, cost, plot, problem, report, results, runner, steadiness, variants
from tileattn.bench.baselines import BASELINES, TileAttn
from tileattn.bench.baselines.base import NO_FP8, OWN, Prepared
from tileattn.bench.cases import Case, square
from tileattn.bench.oracle import output as oracle
from tileattn.measure import ceilings, memory, timing, units

CPU = torch.device("cpu")
QUICK = timing.Effort(warmup_ms=0, measure_ms=0, rounds=2, min_calls=1)
SMALL = Case(2, 33, 47, 4, 2, 16, 8, dtype="fp32")
NAMES = [
    "full",
    "causal",
    "window7",
    "window5-3",
    "causal+window9-4",
    "prefix11",
    "documents16",
    "causal+documents10",
    "softcap2.5",
    "alibi",
    "causal+bias",
    "causal+bias+dbias",
    "causal+bias-11",
    "bias-bh",
    "bias-b1",
    "userscore",
    "sink",
    "prefix5+documents20+softcap3+alibi+bias+sink",
    "causal+softcap3+alibi+bias-b1+userscore+sink",
]


def sees(terms: variants.Variant, q_pos: int, k: int) -> bool:
    """A variant's mask for one pair of positions, written from the definitions of the masks."""
    hidden = (
        (terms.causal and k > q_pos)
        or (terms.window is not None and not q_pos - terms.window[0] <= k <= q_pos + terms.window[1])
        or (terms.prefix is not None and k > q_pos and k >= terms.prefix)
        or (terms.documents is not None and q_pos // terms.documents != k // terms.documents)
    )
    return not hidden


# Variants and cases


@pytest.mark.parametrize("name", NAMES)
def test_a_variant_has_one_name(name: str) -> None:
    assert variants.parse(name).name == name


def test_terms_are_put_in_order() -> None:
    assert square(1, 8, 1, 16, "softcap50+causal").variant == "causal+softcap50"
    assert variants.parse("window8-0").name == "window8"
    assert variants.parse("bias-1h").name == "bias"
    assert variants.parse("sink+causal+bias-11+window3").mask.name == "causal+window3"


@pytest.mark.parametrize("cap", [50.0, 50.123456, 0.001, 1234567.0, 1e9, 0.1 + 0.2, 3e-5])
def test_a_cap_keeps_its_digits(cap: float) -> None:
    terms = variants.parse(f"softcap{variants.written_out(cap)}")
    assert terms.softcap == cap
    assert variants.parse(terms.name) == terms


def test_tensors_that_no_memory_holds_are_refused_before_they_are_drawn() -> None:
    for wide in (replace(SMALL, seqlen_q=10**11), replace(SMALL, head_dim=10**20), replace(SMALL, seqlen_k=10**13)):
        with pytest.raises(torch.OutOfMemoryError, match=r"the tensors of .* take .* GiB, and cpu has"):
            problem.build(wide, CPU)
    biased = replace(SMALL, variant="bias", seqlen_q=10**7, seqlen_k=10**7)
    with pytest.raises(torch.OutOfMemoryError, match="GiB"):
        problem.build(biased, CPU)
    assert problem.build(biased, "meta").bias is not None


@pytest.mark.parametrize(
    "name",
    ["", "casual", "window", "softcap", "causal+", "full+causal", "documents0", "bias+bias", "bias-hb", "bias+bias-11"],
)
def test_a_bad_variant_is_one_error_that_names_it(name: str) -> None:
    with pytest.raises(ValueError, match=r"variant .* (accepted: full|given twice)"):
        variants.parse(name)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(24, 24), (9, 30), (30, 9)])
def test_flops_against_brute_force(name: str, seqlen_q: int, seqlen_k: int) -> None:
    case = replace(SMALL, seqlen_q=seqlen_q, seqlen_k=seqlen_k, variant=name)
    offset = seqlen_k - seqlen_q
    pairs = sum(sees(case.terms, q + offset, k) for q, k in product(range(seqlen_q), range(seqlen_k)))
    if case.terms.mask.name == "causal" and seqlen_q == seqlen_k:
        pairs = seqlen_q * seqlen_k / 2  # The field's convention, not the diagonal's.
    assert case.visible_pairs() == pairs
    assert case.flops() == 2 * case.batch * case.heads * pairs * (case.head_dim + case.head_dim_v)


def test_flops_of_the_directions() -> None:
    case = square(2, 8192, 16, 128, "full")
    assert case.flops("fwd") == 2 * 2 * 16 * 8192 * 8192 * 256
    assert case.flops("bwd") == 2.5 * case.flops("fwd")
    assert case.flops("fwdbwd") == case.flops("fwd") + case.flops("bwd")
    # QK^T twice, dS K and dS^T Q over 192; PV, dO V^T and P^T dO over 128.
    wide = replace(case, head_dim=192)
    assert wide.flops("bwd") == 2 * 2 * 16 * 8192 * 8192 * (3 * 192 + 2 * 128)
    assert wide.flops("fwdbwd") == wide.flops("fwd") + wide.flops("bwd")


def test_causal_is_said_of_what_looks_at_no_later_key() -> None:
    said = {
        name: square(1, 8, 1, 16, name).causal for name in ("full", "causal", "window4", "window4-1", "causal+sink")
    }
    assert said == {"full": False, "causal": True, "window4": True, "window4-1": False, "causal+sink": True}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch": 0}, "batch must be at least 1, got 0"),
        ({"head_dim_v": -1}, "head_dim_v must be at least 1, got -1"),
        ({"kv_heads": 3}, "heads must be a multiple of kv_heads, got 4 and 3"),
        ({"dtype": "int8"}, "dtype must be one of bf16, fp16, fp32, fp8, got 'int8'"),
    ],
)
def test_a_bad_case_is_one_error(change: dict[str, int | str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **change)  # type: ignore[arg-type]


def test_suite_fa_is_the_papers_grid_and_hoppers_rows() -> None:
    suite = cases.suite("fa", "bf16", "cuda")
    grid = [
        (16384 // seqlen, seqlen, seqlen, 2048 // dim, 2048 // dim, dim, dim, causal)
        for dim in (64, 128, 256)
        for causal in (False, True)
        for seqlen in (512, 1024, 2048, 4096, 8192, 16384)
    ]
    rest = [
        (4, 4096, 4096, 32, 8, 128, 128, True),
        (1, 4096, 4096, 16, 16, 128, 128, True),
        (4, 4096, 4096, 16, 16, 192, 128, True),
        (2, 8192, 8192, 16, 16, 192, 128, False),
    ]
    shapes = [(c.batch, c.seqlen_q, c.seqlen_k, c.heads, c.kv_heads, c.head_dim, c.head_dim_v, c.causal) for c in suite]
    assert shapes == grid + rest
    assert {c.variant for c in suite} == {"full", "causal"}
    assert {c.dtype for c in suite} == {"bf16"}
    assert [c.name for c in suite[-4:]] == [
        "D128 causal (4,4096,32/8)",
        "D128 causal (1,4096,16)",
        "D192/128 causal (4,4096,16)",
        "D192/128 full (2,8192,16)",
    ]


@pytest.mark.parametrize("name", cases.SUITES)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_suites_name_each_case_once(name: str, device: str) -> None:
    suite = cases.suite(name, "fp16", device)
    assert len({case.name for case in suite}) == len(suite) > 0
    assert {case.dtype for case in suite} == {"fp16"}


def test_the_variants_suite_has_what_a_modification_is_measured_against() -> None:
    suite = cases.suite("variants", "bf16", "cuda")
    names = {case.name for case in suite}
    assert {"D128 window1024 (1,16384,16)", "D128 documents1024 (1,16384,16)"} <= names
    assert {"D64 causal+bias-b1 (4,4096,32)", "D128 causal+bias-11 (1,16384,16)"} <= names
    assert {name.split()[1] for name in names} >= {
        "causal+softcap50",
        "causal+alibi",
        "causal+sink",
        "causal+userscore",
    }
    for case in suite:
        plain = {replace(case, variant=name).name for name in ("full", "causal")}
        assert plain <= names
    # With one batch element a bias per batch element is the bias that all share.
    assert not any("bias-b" in name for name in names if name.endswith("(1,16384,16)"))


def test_the_fp8_suite_is_long_and_of_16384_tokens() -> None:
    suite = cases.suite("fp8", "fp8", "cuda")
    assert len(suite) == 18
    assert {case.head_dim for case in suite} == {64, 128, 256}
    assert {case.seqlen_q for case in suite} == {4096, 8192, 16384}
    assert {case.batch * case.seqlen_q for case in suite} == {16384}
    assert {case.name for case in suite} <= {case.name for case in cases.suite("fa", "bf16", "cuda")}


def test_flex_is_given_no_bias_that_it_would_read_beyond() -> None:
    given = problem.build(replace(SMALL, variant="bias-11"), CPU)
    assert given.bias is not None
    on_gpu = replace(given, q=given.q.to("meta"), bias=given.bias[..., :1, :1].expand(1, 16, 16384, 16384))
    assert "in 32 bits" in str(BASELINES["flex"].refusal(on_gpu))
    assert BASELINES["flex"].refusal(replace(on_gpu, bias=given.bias)) is None


def test_the_quick_suite_fits_a_laptop() -> None:
    suite = cases.suite("quick", "fp32", "cpu")
    assert {c.batch for c in suite} == {1, 2}
    assert {c.heads for c in suite} == {8}
    assert {c.head_dim for c in suite} == {64}
    assert max(c.seqlen_q for c in suite) == 2048
    assert {"full", "causal", "window256", "causal+softcap50"} == {c.variant for c in suite}


def test_an_unknown_suite_is_one_error() -> None:
    with pytest.raises(ValueError, match="suite 'fb' is not known; accepted: quick, fa, heads, variants"):
        cases.suite("fb", "bf16", "cuda")


# Oracle and baselines


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("baseline", ["eager", "sdpa"])
def test_baselines_compute_the_variants_that_they_accept(baseline: str, name: str) -> None:
    given = problem.build(replace(SMALL, variant=name), CPU)
    expected = oracle.build(given)
    implementation = BASELINES[baseline]
    if implementation.refusal(given) is not None:
        terms = given.case.terms
        assert terms.softcap is not None or terms.userscore or terms.sink
        return
    o = implementation.prepare(given).call()
    assert o.shape == (2, 33, 4, 8)
    expected.check(o)


def test_square_causal_is_sdpas_own_and_others_its_mask() -> None:
    wide, tall = (problem.build(replace(SMALL, variant="causal", seqlen_q=q), CPU) for q in (47, 50))
    assert BASELINES["sdpa"].prepare(wide).held_bytes == 0
    assert BASELINES["sdpa"].prepare(tall).held_bytes == 50 * 47
    assert "without keys" in str(BASELINES["eager"].refusal(tall))


def test_cuda_baselines_say_why_they_are_absent_on_a_cpu() -> None:
    given = problem.build(SMALL, CPU)
    assert {BASELINES[name].refusal(given) for name in ("fa2", "cudnn", "efficient", "fa4")} == {"runs on CUDA only"}


def test_problems_are_the_same_for_the_same_seed() -> None:
    case = replace(SMALL, variant="bias+sink+alibi")
    shapes = {"bias": (1, 4), "bias-bh": (2, 4), "bias-b1": (2, 1), "bias-11": (1, 1)}
    for name, shape in shapes.items():
        bias = problem.build(replace(SMALL, variant=name), CPU).bias
        assert bias is not None
        assert bias.shape == (*shape, 33, 47)
    first, again, other = (problem.build(case, CPU, seed) for seed in (0, 0, 1))
    assert torch.equal(first.q, again.q)
    assert not torch.equal(first.q, other.q)
    assert first.bias is not None
    assert first.bias.shape == (1, 4, 33, 47)


def test_the_error_sees_one_wrong_row_and_nan() -> None:
    given = problem.build(replace(SMALL, variant="causal", dtype="bf16"), CPU)
    expected = oracle.build(given)
    o = BASELINES["sdpa"].prepare(given).call().clone()
    expected.check(o)
    before = expected.error(o)
    o[1, 30, 3] *= 1.2
    assert before < 0.02 < expected.error(o)
    with pytest.raises(AssertionError, match="worst at"):
        expected.check(o)
    o[1, 30, 3, 5] = math.nan
    assert math.isnan(expected.error(o))


def test_rows_without_keys_must_be_zero() -> None:
    given = problem.build(replace(SMALL, variant="causal", seqlen_q=50), CPU)
    expected = oracle.build(given)
    o = BASELINES["sdpa"].prepare(given).call().clone()
    expected.check(o)
    o[0, 0] = 1.0
    with pytest.raises(AssertionError, match="o: error"):
        expected.check(o)


@pytest.mark.parametrize("scores", [1e9, 2 * 4 * 33 * 47, 4 * 33 * 47, 2 * 33 * 47, 2000])
def test_large_cases_are_sampled_from_end_to_end(scores: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(oracle.SCORES_CHECKED, "cpu", int(scores))
    monkeypatch.setattr(oracle, "SCORES_PER_CHUNK", 500)
    given = problem.build(replace(SMALL, variant="causal+bias+alibi"), CPU)
    expected = oracle.build(given)
    chosen = expected.sample
    assert (chosen.batches[-1], chosen.heads[-1], int(chosen.rows[0]), int(chosen.rows[-1])) == (1, 3, 0, 32)
    assert (chosen.text == "all rows") == (scores >= 2 * 4 * 33 * 47)
    expected.check(BASELINES["eager"].prepare(given).call())


def test_sampled_rows_are_blocks_spread_over_the_length() -> None:
    rows = oracle._blocks(10_000, 640, CPU)
    assert len(rows) == 640
    assert (int(rows[0]), int(rows[-1])) == (0, 9_999)


@pytest.mark.parametrize("name", ["full", "causal+bias+sink"])
def test_fp8_is_measured_against_the_values_before_quantisation(name: str) -> None:
    bf16, fp8 = (problem.build(replace(SMALL, dtype=dtype, variant=name), CPU) for dtype in ("bf16", "fp8"))
    assert torch.equal(fp8.q, bf16.q)
    assert fp8.fp8 is not None
    assert fp8.fp8.q.dtype == torch.float8_e4m3fn
    assert fp8.fp8.k_descale.shape == (2, 2)
    assert torch.equal(oracle.build(fp8).expected, oracle.build(bf16).expected)
    assert fp8.unquantised().case == bf16.case
    left = fp8.dequantised()
    assert 0 < (left.k.float() - fp8.k.float()).norm() / fp8.k.float().norm() < 0.04
    # What is left of the values, computed in bfloat16, is what fp8 is held to.
    expected = oracle.build(fp8)
    o = BASELINES["eager"].prepare(left).call()
    assert 0.01 < expected.error(o) < 0.2
    expected.check(o)
    with pytest.raises(AssertionError, match="o: error"):
        expected.check(o * 1.5)


def test_fp8_is_ours_in_fp8_beside_ours_in_bf16() -> None:
    fp8 = problem.build(replace(SMALL, dtype="fp8"), CPU)
    beside = BASELINES["tileattn-bf16"]
    assert {baseline.refusal(fp8) for name, baseline in BASELINES.items() if name in ("eager", "sdpa", "flex")} == {
        NO_FP8
    }
    assert beside.refusal(fp8) is None
    assert beside.refusal(fp8.unquantised()) is not None
    expected = oracle.build(fp8)
    ours, bf16 = (each.prepare(fp8).call() for each in (TileAttn(), beside))
    assert ours.dtype == bf16.dtype == torch.bfloat16
    expected.check(ours)
    assert expected.error(bf16) < 0.02 < expected.error(ours)


# Time and memory


def test_peak_bytes_counts_what_is_alive_together() -> None:
    def call() -> Tensor:
        first = torch.ones(1000, 1000)
        second = first + 1
        del first
        return second.sum() + torch.ones(250, 1000).sum()

    assert 8_000_000 <= memory.peak_bytes(call, CPU) < 8_100_000


def test_ceilings_are_rates_of_a_product_and_a_copy() -> None:
    ceiling = ceilings.measure("before", CPU, QUICK, size=64, copied=2**20)
    assert ceiling.when == "before"
    assert 0 < ceiling.matmul_tflops < 100
    assert 0 < ceiling.copy_tbps < 10
    assert ceilings.overall([]) is None
    both = [
        replace(ceiling, matmul_tflops=700, copy_tbps=4),
        replace(ceiling, when="after", matmul_tflops=710, copy_tbps=5),
    ]
    assert ceilings.overall(both) == ceilings.Ceiling("before and after", 705, 4.5)


def test_samples_are_milliseconds_and_at_least_as_many_as_asked() -> None:
    samples = timing.sample_ms(lambda: torch.ones(10), CPU, timing.Effort(measure_ms=0, min_calls=4))
    assert len(samples) == 4
    assert all(0 < ms < 1000 for ms in samples)


# Runner


@dataclass(frozen=True)
class Scripted:
    """An implementation that does as it is told: refuse, raise in one of its steps, or return a changed result."""

    name: str = "scripted"
    refuses: str | None = None
    raises_in: str = ""
    factor: float = 1.0

    def refusal(self, given: problem.Problem) -> str | None:
        if self.raises_in == "refusal":
            raise RuntimeError("refusal broke\nwith detail")
        return self.refuses

    def prepare(self, given: problem.Problem) -> Prepared:
        inner, calls = BASELINES["sdpa"].prepare(given), []

        def call() -> Tensor:
            calls.append(1)
            # One call for the error, one for the memory, then timing.
            if self.raises_in == "call" or (self.raises_in == "timing" and len(calls) > 2):
                raise RuntimeError(f"{self.raises_in} broke")
            return inner.call() * self.factor

        return Prepared(call, held_bytes=123, chosen="inner" if self.name == OWN else None)


def run(*implementations: Scripted) -> tuple[results.Results, list[str]]:
    failures: list[str] = []
    measured = results.begin(CPU, "abc", "test")
    two = [replace(SMALL, variant=name) for name in ("full", "causal")]
    runner.Run("test", two, implementations, CPU, measured, effort=QUICK, on_failure=failures.append)()
    return measured, failures


def test_the_runner_measures_all_side_by_side() -> None:
    measured, failures = run(Scripted(OWN), Scripted("baseline"))
    assert not failures
    assert not measured.failed
    assert [(row.case, row.backend) for row in measured.rows] == [
        (case, backend) for case in measured.cases() for backend in (OWN, "baseline")
    ]
    assert set(measured.implementation.values()) == {"inner"}
    for row in measured.rows:
        assert row.ms > 0
        assert row.tflops == pytest.approx(replace(SMALL, variant=row.variant).flops() / row.ms / 1e9)
        assert row.error < 1e-5
        assert row.peak_bytes > 123


def test_ceilings_are_taken_before_and_after_the_cases_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(when: str, device: torch.device, effort: timing.Effort) -> ceilings.Ceiling:
        if when == "after":
            raise RuntimeError("CUDA is broken")
        return ceilings.Ceiling(when, 767.0, 4.3)

    monkeypatch.setattr(ceilings, "measure", measure)
    monkeypatch.setattr(steadiness, "busy_share", lambda device: None)  # there need be no GPU
    failures: list[str] = []
    measured = results.begin(CPU, None, "test")
    runner.Run("test", [], [], torch.device("cuda"), measured, effort=QUICK, on_failure=failures.append)()
    assert [each.when for each in measured.ceilings] == ["before"]
    assert "CUDA is broken" in failures[0]
    assert run(Scripted(OWN))[0].ceilings == []


def test_a_baseline_that_refuses_is_listed_with_its_reason() -> None:
    measured, failures = run(Scripted(OWN), Scripted("baseline", refuses="not today"))
    assert not failures
    assert {entry.reason for entry in measured.refused} == {"not today"}
    assert {row.backend for row in measured.rows} == {OWN}


@pytest.mark.parametrize("step", ["refusal", "call", "timing"])
def test_a_baseline_that_raises_does_not_end_the_run(step: str) -> None:
    measured, failures = run(Scripted("baseline", raises_in=step), Scripted(OWN))
    assert [entry.reason for entry in measured.failed] == [f"RuntimeError: {step} broke"] * 2
    assert len(failures) == 2
    assert "Traceback" in failures[0]
    assert [row.backend for row in measured.rows] == [OWN, OWN]


def test_a_wrong_result_of_ours_is_a_failure_and_a_baselines_is_shown() -> None:
    measured, _ = run(Scripted(OWN, factor=1.01), Scripted("baseline", factor=1.01), Scripted("other", factor=math.nan))
    failed = {entry.backend: entry.reason for entry in measured.failed}
    assert failed.keys() == {OWN, "other"}
    assert "AssertionError: o: error 0.01" in failed[OWN]
    assert "values are NaN" in failed["other"]
    assert {row.backend for row in measured.rows} == {"baseline"}
    assert measured.rows[0].error == pytest.approx(0.01, rel=1e-2)


# Result file, tables, picture


def test_a_row_has_exactly_the_keys_of_the_format(tmp_path: Path) -> None:
    measured, _ = run(Scripted(OWN), Scripted("baseline", refuses="no"))
    results.save(measured, tmp_path / "r.json")
    content = json.loads((tmp_path / "r.json").read_text())
    keys = (
        "suite case direction backend batch seqlen_q seqlen_k heads kv_heads head_dim head_dim_v causal variant dtype "
        "ms tflops error peak_bytes gpu versions commit date packing"
    )
    assert {" ".join(row) for row in content["rows"]} == {keys}
    assert content["rows"][0]["versions"]["torch"] == torch.__version__
    assert results.load(tmp_path / "r.json") == measured
    assert [file.name for file in tmp_path.iterdir()] == ["r.json"]


def test_older_files_lack_ceilings_direction_and_packing(tmp_path: Path) -> None:
    measured = replace(made_up("fa", "cuda", OWN), ceilings=[ceilings.Ceiling("before", 767.0, 4.29)])
    results.save(measured, tmp_path / "r.json")
    assert results.load(tmp_path / "r.json") == measured
    content = json.loads((tmp_path / "r.json").read_text())
    assert content["ceilings"] == [{"when": "before", "matmul_tflops": 767.0, "copy_tbps": 4.29}]
    # The first files had neither a direction nor packed sequences.
    for missing in ("ceilings", "direction"):
        del content[missing]
    for row in content["rows"]:
        del row["packing"]
    (tmp_path / "r.json").write_text(json.dumps(content))
    assert results.load(tmp_path / "r.json") == replace(measured, ceilings=[])


def test_a_row_gives_its_case_back() -> None:
    assert [row.as_case() for row in made_up("variants", "cuda", OWN).rows] == cases.suite("variants", "bf16", "cuda")


@pytest.mark.parametrize(
    ("content", "message"), [("{", "is not JSON"), ("[]", "not a tileattn"), ("{}", "not a tileattn")]
)
def test_a_foreign_result_file_is_one_error(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        results.load(tmp_path / "r.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda file: file.clear() or file.update(format=1, rows=[]), "it lacks 'device', 'gpu', 'versions', 'commit'"),
        (lambda file: file.pop("refused"), "it lacks 'refused'"),
        (lambda file: file.update(rows={}), "it has 'rows' = {}, which is no list"),
        (lambda file: file.update(colour=3), "it has 'colour', which no reader knows"),
        (lambda file: file["rows"].append(3), r"rows\[1\] is 3, not an object"),
        (lambda file: file["rows"][0].update(colour=3), r"rows\[0\] has 'colour', which no reader knows"),
        (lambda file: file["rows"][0].pop("ms"), r"rows\[0\] lacks 'ms'"),
        (lambda file: file["rows"][0].update(ms="1"), r"rows\[0\] has 'ms' = '1', which is no float"),
        (lambda file: file["rows"][0].update(ms=0), r"rows\[0\] has 'ms' = 0, which is no time"),
        (lambda file: file["rows"][0].update(heads=True), r"rows\[0\] has 'heads' = True, which is no int"),
        (lambda file: file["rows"][0].update(dtype="int8"), r"rows\[0\] has 'dtype' = 'int8'; known are bf16"),
        (lambda file: file["rows"][0].update(commit=3), r"rows\[0\] has 'commit' = 3, which is no str \| None"),
        (lambda file: file.update(direction="up"), "it has 'direction' = 'up'; known are fwd, bwd, fwdbwd"),
        (lambda file: file.update(failed=[{"case": "c"}]), r"failed\[0\] lacks 'backend', 'reason'"),
        (lambda file: file.update(ceilings=[{}]), r"ceilings\[0\] lacks 'when'"),
    ],
)
def test_a_malformed_result_file_is_one_error(
    change: Callable[[dict[str, Any]], object], message: str, tmp_path: Path
) -> None:
    measured = made_up("fa", "cuda", OWN)
    results.save(replace(measured, rows=measured.rows[:1]), tmp_path / "r.json")
    content = json.loads((tmp_path / "r.json").read_text())
    change(content)
    (tmp_path / "r.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=f"r.json is not a tileattn result file: {message}"):
        results.load(tmp_path / "r.json")


def rendered(measured: results.Results, width: int = 80) -> str:
    console = Console(width=width, file=StringIO())
    console.print(report.render(measured))
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_the_table_shows_every_backend_and_reason() -> None:
    text = rendered(made_up("fa", "cuda", OWN, "fa2", "cudnn"))
    assert text.count("  tileattn ") == 40
    assert text.count("1.10×") > 38  # tileattn, where fa2 is the fastest baseline
    assert "0.91×" in text  # cudnn there
    assert "needs [one] head dim [D192/128 causal (4,4096,16), D192/128 full (2,8192,16)]" in " ".join(text.split())
    assert "…" not in text


def test_failures_are_shown_in_the_table() -> None:
    measured, _ = run(Scripted(OWN), Scripted("baseline", raises_in="call"))
    text = rendered(measured)
    assert "failed" in text
    assert "RuntimeError: call broke" in text


def test_comparisons_are_geometric_means() -> None:
    fa2, cudnn = compare.compare(made_up("fa", "cuda", OWN, "fa2", "cudnn"))
    assert (fa2.baseline, fa2.cases) == ("fa2", 38)
    assert fa2.geometric_mean == pytest.approx(1.1)
    assert (cudnn.baseline, cudnn.cases) == ("cudnn", 40)
    assert cudnn.lowest == pytest.approx(1.21)


def test_standings_are_against_the_best_baseline_by_length() -> None:
    measured = made_up("fa", "cuda", OWN, "fa2", "cudnn")
    long, short, every = compare.standings(measured).values()
    assert list(compare.standings(measured)) == ["2048 tokens and more", "under 2048 tokens", "all"]
    assert (long.rows, short.rows, every.rows) == (28, 12, 40)
    assert (long.at_or_ahead, long.behind) == (28, ())
    # fa2 refuses two of the long rows; there the best is cudnn.
    assert long.geometric_mean == pytest.approx(1.1 * 1.1 ** (2 / 28))
    assert short.geometric_mean == pytest.approx(1.1)
    text = rendered(measured)
    assert "against the best baseline of each row" in text
    assert "behind" not in text


def test_own_ways_to_run_are_no_baselines_beside_others() -> None:
    """Such as tileattn-deterministic: it is a baseline only where there is no other."""
    case = made_up("fa", "cuda", OWN).rows[0].case
    with_baseline = made_up("fa", "cuda", OWN, "fa2", "tileattn-deterministic")
    with_baseline.rows = [
        replace(row, ms=row.ms / 10) if row.backend == "tileattn-deterministic" else row for row in with_baseline.rows
    ]
    baseline = with_baseline.row(case, "fa2")
    assert baseline is not None
    assert compare.best_baseline_ms(with_baseline, case) == baseline.ms
    alone = made_up("fa", "cuda", OWN, "tileattn-deterministic")
    other = alone.row(case, "tileattn-deterministic")
    assert other is not None
    assert compare.best_baseline_ms(alone, case) == other.ms


def test_rows_behind_are_named_the_worst_first() -> None:
    measured = made_up("fa", "cuda", OWN, "fa2")
    slower = {"D64 full (32,512,32)": 1.12, "D128 causal (8,2048,16)": 1.2, "D128 full (8,2048,16)": 1.375}
    measured.rows = [
        replace(row, ms=slower[row.case]) if row.backend == OWN and row.case in slower else row for row in measured.rows
    ]
    standing = compare.standings(measured)["2048 tokens and more"]
    assert (standing.rows, standing.at_or_ahead, standing.ties) == (26, 24, 0)
    assert [name for name, _ in standing.behind] == ["D128 full (8,2048,16)", "D128 causal (8,2048,16)"]
    assert standing.behind[0][1] == pytest.approx(0.8)
    assert compare.standings(measured)["under 2048 tokens"].ties == 1
    assert "under 2048 tokens, 1 behind, 1 by less than 2%: D64 full (32,512,32) 0.982×" in rendered(measured, 120)


def test_without_baselines_there_is_no_standing() -> None:
    assert compare.standings(made_up("fa", "cuda", OWN)) == {}


# Cost of a modification


def brute_force_tiles(case: Case) -> int:
    size, offset = cost.TILE, case.seqlen_k - case.seqlen_q
    seen = {
        (q // size, k // size)
        for q, k in product(range(case.seqlen_q), range(case.seqlen_k))
        if sees(case.terms, q + offset, k)
    }
    return len(seen)


@pytest.mark.parametrize("name", ["full", "causal", "window7", "window150-3", "prefix140", "documents100", "bias+sink"])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(300, 300), (130, 400), (300, 129)])
def test_visited_tiles_against_brute_force(
    name: str, seqlen_q: int, seqlen_k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cost, "TILE", 32)
    case = replace(SMALL, variant=name, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    assert cost.visited_tiles(case) == brute_force_tiles(case)


def test_the_bytes_of_a_bias_are_those_of_its_visible_tiles() -> None:
    case = square(4, 4096, 16, 128, "causal+bias")
    tile = 128 * 128 * 2
    forms = {"bias": 16, "bias-bh": 64, "bias-b1": 4, "bias-11": 1}
    for form, copies in forms.items():
        assert cost.bias_bytes(replace(case, variant=f"causal+{form}")) == copies * 32 * 33 / 2 * tile
    assert cost.bias_bytes(replace(case, variant="bias-11")) == 32 * 32 * tile
    assert cost.bias_bytes(replace(case, variant="causal+alibi")) == 0


def test_costs_are_beside_the_plain_kernel_of_the_run() -> None:
    measured = made_up("variants", "cuda", OWN, "flex")
    ms = {"full": 3.0, "causal": 0.8, "window1024": 0.5, "causal+softcap50": 0.88}
    measured.rows = [replace(row, ms=ms.get(row.variant, 2.4)) if row.backend == OWN else row for row in measured.rows]
    measured.ceilings = [ceilings.Ceiling("before", 700, 4.0), ceilings.Ceiling("after", 740, 4.4)]
    cost_of = {each.case: each for each in cost.costs(measured)}
    shape = "(1,16384,16)"
    assert cost_of[f"D128 causal+softcap50 {shape}"].ratio == pytest.approx(1.1)
    assert cost_of[f"D128 causal+sink {shape}"].compared_with == "causal"
    # 128 rows of tiles see 9 tiles each, but for the first 8, which see 1 to 8.
    window = cost_of[f"D128 window1024 {shape}"]
    assert window.plain_ms == pytest.approx(3.0 * (120 * 9 + 36) / 128**2)
    assert window.compared_with == "6.8% of full"
    assert cost_of[f"D128 documents1024 {shape}"].plain_ms == pytest.approx(3.0 * 8 / 128)
    # 16 heads' causal tiles of 16384 x 16384 in bf16, at 4.2 TB/s; one head's are no more than what the kernel needs.
    bias = cost_of[f"D128 causal+bias {shape}"]
    assert bias.plain_ms == pytest.approx(16 * 128 * 129 / 2 * 128 * 128 * 2 / 4.2e9)
    assert bias.compared_with == "bias from memory"
    assert cost_of[f"D128 causal+bias-11 {shape}"].compared_with == "causal"
    assert not {"D128 full (1,16384,16)", "D128 causal (1,16384,16)"} & cost_of.keys()
    text = rendered(measured, 100)
    assert "what a modification costs" in text
    assert "ceilings: cuBLAS bf16 720 TFLOPS, copy 4.20 TB/s, before and after the cases" in text


def test_without_the_plain_kernel_there_is_no_cost() -> None:
    measured = made_up("variants", "cuda", OWN)
    measured.rows = [row for row in measured.rows if row.variant != "causal"]
    costs = cost.costs(measured)
    assert {each.case.split()[1] for each in costs} == {"window1024", "documents1024", "prefix1024"}
    assert all(each.compared_with.endswith("of full") for each in costs)
    measured.rows = [row for row in measured.rows if row.variant != "full"]
    assert cost.costs(measured) == []


def test_bytes_are_readable() -> None:
    texts = [units.human_bytes(count) for count in (0, 1023, 1536, 3 * 2**20, 5 * 2**40)]
    assert texts == ["0 B", "1023 B", "1.5 KiB", "3.0 MiB", "5120.0 GiB"]


def test_the_picture_of_the_papers_grid_has_a_panel_per_head_dim() -> None:
    plan = plot.layout(made_up("fa", "cuda", OWN, "cudnn"))
    assert [[panel.title for panel in line] for line in plan.grid] == [
        [f"head dim {dim}, {variant}" for dim in (64, 128, 256)] for variant in ("full", "causal")
    ]
    assert [label for label, _ in plan.grid[0][0].groups] == ["512", "1k", "2k", "4k", "8k", "16k"]
    assert [len(panel.groups) for panel in plan.wide] == [4]


def test_the_picture_of_variants_has_a_panel_per_shape() -> None:
    plan = plot.layout(made_up("variants", "cuda", OWN, "flex"))
    assert not plan.grid
    assert [len(panel.groups) for panel in plan.wide] == [13, 11, 13]
    assert plan.wide[0].title == "head dim 128, batch 4, 4096 tokens, 16 heads"


@pytest.mark.slow_except("varlen-cuda", "quick-cpu", reason="2 s each")
@pytest.mark.parametrize(
    ("suite", "device"), [("fa", "cuda"), ("variants", "cuda"), ("varlen", "cuda"), ("quick", "cpu")]
)
def test_pictures_show_every_measurement(suite: str, device: str, tmp_path: Path) -> None:
    measured = made_up(suite, device, OWN, "fa2", "cudnn")
    figure = plot.draw(measured)
    assert sum(len(bars) for axes in figure.axes for bars in axes.containers) == len(measured.rows)
    plot.save(measured, tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert (tmp_path / "p.png").stat().st_size > 20_000


def test_every_backend_has_its_own_colour() -> None:
    assert set(plot.COLOURS) == {OWN, *BASELINES}
    assert len(set(plot.COLOURS.values())) == len(plot.COLOURS)


def test_unknown_backends_have_colours_of_their_own() -> None:
    names = ["tileattn", *(f"mma:rung{number}" for number in range(40)), "tilelang"]
    colours = plot.colours_of(names)
    assert set(colours) == set(names)
    assert colours["tileattn"] == plot.COLOURS["tileattn"]
    assert len(set(colours.values())) == len(names)
    assert all(re.fullmatch("#[0-9A-F]{6}", colour) for colour in colours.values())


def test_a_legend_has_as_many_columns_as_fit() -> None:
    assert plot.legend_columns(["tileattn", "fa2", "cudnn"], 9) == 3
    assert plot.legend_columns(["mma:shared_kv,stages=1,acc=fp16,smem=padded"] * 34, 15) == 3
    assert plot.legend_columns(["x" * 500], 5) == 1


def test_nothing_measured_is_nothing_to_draw(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing was measured"):
        plot.save(results.begin(CPU, None, "test"), tmp_path / "p.png")


# --- Triton's tutorial ---


def test_the_tutorial_runs_from_a_copy_of_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the file: what is measured is found, called as the tutorial calls it, and differentiable."""
    from tileattn.bench.baselines.triton_tutorial import FILE, TritonTutorial

    file = tmp_path / "tutorial.py"
    file.write_text(
        "import torch\n"
        "class _attention:\n"
        "    def forward(ctx, q, k, v, causal, sm_scale, warp_specialize=True): ...\n"
        "def attention(q, k, v, causal, sm_scale, warp_specialize):\n"
        "    assert q.is_contiguous() and not warp_specialize\n"
        "    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=sm_scale)\n"
    )
    monkeypatch.setenv(FILE, str(file))
    given = problem.build(square(1, 128, 2, 16, "causal", "fp16"), CPU, direction="bwd")
    assert TritonTutorial().refusal(given) == "runs on GPUs only"
    expected = TileAttn().prepare(given).call()
    got = TritonTutorial().prepare(given).call()
    torch.testing.assert_close(got, expected, rtol=2e-3, atol=2e-3)
    gradients, wanted = (torch.autograd.grad(o, tuple(given.inputs().values()), given.do) for o in (got, expected))
    for x, y in zip(gradients, wanted):
        torch.testing.assert_close(x, y, rtol=5e-3, atol=5e-3)
