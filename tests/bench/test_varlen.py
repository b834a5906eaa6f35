"""Packed sequences in the benchmark: their lengths and FLOPs, the baselines, the oracle, the command line."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from tests.tools.made_up import made_up
from tileattn.bench import cases, cost, passes, plot, problem
from tileattn.bench.baselines import BASELINES, TileAttn
from tileattn.bench.baselines.base import NO_PACKED, OWN
from tileattn.bench.cases import Case, lengths_of, square
from tileattn.bench.oracle import packed as packed_oracle
from tileattn.bench.results import load
from tileattn.cli import choices
from tileattn.cli.app import app

CPU = torch.device("cpu")
SKEWED = replace(square(5, 24, 4, 16, "causal", "fp32"), kv_heads=2, head_dim_v=8, packing="skewed")
UNIFORM = replace(SKEWED, packing="uniform")


# --- Lengths and FLOPs ---


@pytest.mark.parametrize(("sequences", "mean"), [(64, 1024), (5, 24), (1, 7), (3, 1)])
def test_skewed_lengths_have_the_given_sum_and_are_the_same_each_time(sequences: int, mean: int) -> None:
    lengths = lengths_of("skewed", sequences, mean)
    assert (len(lengths), sum(lengths)) == (sequences, sequences * mean)
    assert min(lengths) >= 1
    assert lengths == lengths_of("skewed", sequences, mean)


def test_skewed_lengths_have_a_long_tail() -> None:
    lengths = sorted(lengths_of("skewed", 64, 1024))
    assert lengths[32] < 0.8 * 1024
    assert lengths[-1] > 4 * 1024
    assert lengths[0] < 1024 / 5


def test_uniform_lengths_are_the_mean() -> None:
    assert lengths_of("uniform", 3, 7) == (7, 7, 7)


@pytest.mark.parametrize("variant", ["full", "causal", "window7", "window3-5", "prefix4"])
@pytest.mark.parametrize("direction", cases.DIRECTIONS)
def test_flops_are_those_of_each_sequence(variant: str, direction: str) -> None:
    case = replace(SKEWED, variant=variant)
    alone = [replace(case, batch=1, seqlen_q=n, seqlen_k=n, packing="").flops(direction) for n in case.lengths]
    assert case.flops(direction) == pytest.approx(sum(alone))
    assert replace(UNIFORM, variant=variant).flops(direction) == replace(UNIFORM, variant=variant, packing="").flops(
        direction
    )


def test_causal_counts_half_of_each_sequence() -> None:
    full, causal = (replace(SKEWED, variant=variant).flops() for variant in ("full", "causal"))
    assert causal == full / 2
    assert full == 2 * 4 * (16 + 8) * sum(n * n for n in SKEWED.lengths)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"packing": "random"}, "packing must be one of uniform, skewed or '', got 'random'"),
        ({"seqlen_k": 25}, "packed cases have as many keys as queries, got 24 and 25"),
        ({"variant": "bias"}, "packed cases have no fp8, no bias and no documents, got fp32 bias"),
        ({"variant": "documents8"}, "no documents"),
        ({"dtype": "fp8"}, "no fp8"),
    ],
)
def test_a_bad_case_is_one_error(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        replace(SKEWED, **change)


def test_the_suite_has_what_the_issue_asks_for() -> None:
    """Uniform lengths; and a skewed batch of 64 sequences, 64k tokens, D64 and D128, full and causal, 32/8 heads."""
    suite = cases.suite("varlen", "bf16", "cuda")
    skewed = [case for case in suite if case.packing == "skewed"]
    assert {(case.batch, sum(case.lengths)) for case in skewed} == {(64, 65536)}
    grouped = {(case.head_dim, case.variant) for case in skewed if (case.heads, case.kv_heads) == (32, 8)}
    assert grouped == {(dim, variant) for dim in (64, 128) for variant in ("full", "causal")}
    uniform = [case for case in suite if case.packing == "uniform"]
    assert {(case.head_dim, case.variant) for case in uniform} == grouped
    assert len(skewed) + len(uniform) == len(suite)
    assert all(case.name.endswith((" skewed", " uniform")) for case in suite)


# --- Problems and baselines ---


def test_a_uniform_problem_is_the_dense_one_laid_out_otherwise() -> None:
    packed = problem.build(UNIFORM, CPU, direction="bwd")
    dense = problem.build(replace(UNIFORM, packing=""), CPU, direction="bwd")
    assert packed.cu_seqlens is not None
    assert packed.cu_seqlens.tolist() == [0, 24, 48, 72, 96, 120]
    assert packed.cu_seqlens.dtype == torch.int32
    assert packed.q.shape == (120, 4, 16)
    for name in ("q", "k", "v", "do"):
        assert torch.equal(getattr(packed, name), getattr(dense, name).flatten(0, 1))
        assert torch.equal(getattr(packed.dense(), name), getattr(dense, name))
    assert packed.q.is_leaf
    assert packed.q.requires_grad


def test_a_sequence_is_a_dense_problem_of_its_tokens() -> None:
    given = problem.build(SKEWED, CPU)
    spans = given.spans()
    assert [span.stop - span.start for span in spans] == list(SKEWED.lengths)
    assert torch.equal(torch.cat([given.of_sequence(span).q[0] for span in spans]), given.q)
    one = given.of_sequence(spans[2])
    assert (one.case.batch, one.case.seqlen_q, one.case.packing) == (1, SKEWED.lengths[2], "")


@pytest.mark.parametrize("variant", ["full", "causal+softcap3", "window7+alibi", "sink", "userscore"])
@pytest.mark.parametrize("direction", cases.DIRECTIONS)
def test_ours_passes_the_oracle(variant: str, direction: str) -> None:
    given = problem.build(replace(SKEWED, variant=variant), CPU, direction=direction)
    with torch.set_grad_enabled(direction != "fwd"):
        prepared = TileAttn().prepare(given)
        assert prepared.chosen == "torch"
        expected = packed_oracle.build(given)
        result = passes.start(direction, prepared, given)()
        expected.check(result)
        assert 0 < expected.error(result) < 1e-4


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_the_oracle_sees_one_wrong_row_and_nan(direction: str) -> None:
    given = problem.build(SKEWED, CPU, direction=direction)
    with torch.set_grad_enabled(direction != "fwd"):
        right = passes.start(direction, TileAttn().prepare(given), given)()
    for wrong in (100.0, torch.nan):
        result = [x.detach().clone() for x in ([right] if direction == "fwd" else right)]
        result[-1][given.spans()[3].start] += wrong
        of_direction = result[0] if direction == "fwd" else result
        expected = packed_oracle.build(given)
        assert not expected.error(of_direction) < 1
        with pytest.raises(AssertionError):
            expected.check(of_direction)


def test_of_many_sequences_some_of_all_lengths_are_checked() -> None:
    given = problem.build(replace(SKEWED, batch=20), CPU)
    lengths = sorted(given.case.lengths)
    chosen = sorted(span.stop - span.start for span in packed_oracle.chosen(given))
    assert len(chosen) == packed_oracle.CHECKED
    assert (chosen[0], chosen[-1]) == (lengths[0], lengths[-1])
    text = packed_oracle.build(given).sample.text
    assert text == f"all rows of 8 of 20 sequences, of {lengths[0]} to {lengths[-1]} tokens"
    assert packed_oracle.build(problem.build(SKEWED, CPU)).sample.text == "all rows"


def test_dense_baselines_refuse_packed_sequences() -> None:
    given = problem.build(SKEWED, CPU)
    assert {BASELINES[name].refusal(given) for name in ("eager", "sdpa", "flex")} == {NO_PACKED}
    assert BASELINES["triton-tutorial"].refusal(given) is not None
    assert BASELINES["triton"].refusal(given) is not None


def test_baselines_for_packed_sequences_say_why_they_are_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    given = problem.build(SKEWED, CPU)
    assert {BASELINES[name].refusal(given) for name in ("fa2-varlen", "fa4")} == {"runs on CUDA only"}
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    for change, says in (
        ({"packing": ""}, "it is there for packed sequences"),
        ({"dtype": "fp32"}, "float16 and bfloat16 only"),
        ({}, "one head dim for q, k and v"),
        ({"head_dim_v": 16, "variant": "softcap3"}, "causal masks and windows only"),
        ({"head_dim_v": 16, "variant": "prefix3"}, "causal masks and windows only"),
        ({"head_dim_v": 16, "variant": "sink"}, "causal masks and windows only"),
    ):
        refusal = BASELINES["fa2-varlen"].refusal(on_gpu(replace(SKEWED, **({"dtype": "bf16"} | change))))
        assert says in str(refusal)
    for variant in ("full", "causal", "window7", "window3-5"):
        case = replace(SKEWED, dtype="bf16", head_dim_v=16, variant=variant)
        assert BASELINES["fa2-varlen"].refusal(on_gpu(case)) is None


def on_gpu(case: Case) -> problem.Problem:
    """A problem that says that it is on a GPU, for refusals."""
    given = problem.build(case, "meta")
    return replace(given, q=SimpleNamespace(device=torch.device("cuda"), dtype=given.q.dtype))  # type: ignore[arg-type]


@pytest.mark.parametrize("variant", ["full", "causal", "window7", "causal+window9-4"])
def test_fa2_is_called_as_its_operator_wants_it(variant: str) -> None:
    """Tensors are on "meta": the operator checks its arguments' kinds, has a gradient, and computes only shapes."""
    case = replace(SKEWED, dtype="bf16", head_dim_v=16, variant=variant)
    given = problem.build(case, "meta", direction="bwd")
    o = BASELINES["fa2-varlen"].prepare(given).call()
    assert o.shape == given.q.shape
    gradients = torch.autograd.grad(o, (given.q, given.k, given.v), given.do)
    assert [x.shape for x in gradients] == [given.q.shape, given.k.shape, given.v.shape]


@pytest.fixture
def _stand_in_for_fa4(monkeypatch: pytest.MonkeyPatch) -> None:
    """`flash_attn.cute` with the signature of flash-attn-4's functions (4.0.0b36), in plain PyTorch."""

    def flash_attn_func(q, k, v, *, causal, window_size, learnable_sink, softcap):  # type: ignore[no-untyped-def]
        raise AssertionError("the dense form")

    def flash_attn_varlen_func(
        q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, *,
        causal=False, window_size=(None, None), learnable_sink=None, softcap=0.0,
    ):  # type: ignore[no-untyped-def]  # fmt: skip
        assert (window_size, learnable_sink, softcap, qv) == ((None, 0), None, 0.0, None)
        assert causal
        assert max_seqlen_q == max_seqlen_k == int(cu_seqlens_q.diff().max())
        parts = []
        for start, end in zip(cu_seqlens_q.tolist(), cu_seqlens_k.tolist()[1:]):
            of_heads = (x[start:end].transpose(0, 1) for x in (q, k, v))
            attend = torch.nn.functional.scaled_dot_product_attention
            parts.append(attend(*of_heads, is_causal=True, enable_gqa=True).transpose(0, 1))
        return torch.cat(parts), None

    cute = SimpleNamespace(flash_attn_func=flash_attn_func, flash_attn_varlen_func=flash_attn_varlen_func)
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(cute=cute))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", cute)


@pytest.mark.usefixtures("_stand_in_for_fa4")
def test_fa4_is_told_where_the_sequences_lie() -> None:
    given = problem.build(SKEWED, CPU)
    packed_oracle.build(given).check(BASELINES["fa4"].prepare(given).call())


@pytest.mark.parametrize("direction", cases.DIRECTIONS)
def test_our_dense_kernel_is_a_baseline_where_lengths_are_equal(direction: str) -> None:
    dense = BASELINES["tileattn-dense"]
    assert "of one length" in str(dense.refusal(problem.build(SKEWED, CPU)))
    assert "of one length" in str(dense.refusal(problem.build(replace(UNIFORM, packing=""), CPU)))
    given = problem.build(UNIFORM, CPU, direction=direction)
    assert dense.refusal(given) is None
    with torch.set_grad_enabled(direction != "fwd"):
        call = passes.start(direction, dense.prepare(given), given)
        packed_oracle.build(given).check(call())
        packed_oracle.build(given).check(call())


# --- Tables, pictures and the command line ---


def test_packed_rows_are_in_no_panel_of_dense_ones() -> None:
    measured = made_up("varlen", "cuda", OWN, "fa4")
    assert not plot.layout(measured).grid
    shown = [case for panel in plot.layout(measured).wide for _, case in panel.groups]
    assert sorted(shown) == sorted(measured.cases())
    assert cost.costs(measured) == []


def test_the_default_baselines_are_those_that_take_packed_sequences() -> None:
    for device, wanted in ((CPU, ["tileattn-dense"]), (torch.device("cuda"), ["fa2-varlen", "fa4", "tileattn-dense"])):
        chosen = choices.Chosen("varlen", cases.suite("varlen", "bf16", device.type))
        implementations = choices.choose_implementations(None, None, device, chosen)
        assert [each.name for each in implementations] == [OWN, *wanted]


def invoke(arguments: str, tmp_path: Path) -> Any:
    return CliRunner().invoke(app, [*arguments.split(), "--device", "cpu", "--json", str(tmp_path / "r.json")])


def test_a_case_of_ones_own(tmp_path: Path) -> None:
    shape = "--batch 5 --seqlen 24 --heads 4 --kv-heads 2 --head-dim 16 --causal --packing"
    result = invoke(f"bench {shape} skewed --direction fwdbwd --rounds 1", tmp_path)
    assert result.exit_code == 0, result.output
    (row,) = load(tmp_path / "r.json").rows
    assert row.as_case() == replace(SKEWED, head_dim_v=16)
    assert json.loads((tmp_path / "r.json").read_text())["rows"][0]["packing"] == "skewed"
    assert row.tflops == pytest.approx(row.as_case().flops("fwdbwd") / row.ms / 1e9)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--packing ragged", "'ragged' is not known; accepted: uniform, skewed"),
        ("--packing skewed --seqlen-k 7", "leave --seqlen-k out"),
        ("--packing skewed --bias", "not measured in fp8, with a bias or documents"),
        ("--packing skewed --dtype fp8", "not measured in fp8"),
    ],
)
def test_bad_options_are_one_error(options: str, says: str, tmp_path: Path) -> None:
    result = invoke(f"bench {options}", tmp_path)
    assert result.exit_code == 2
    assert says in " ".join(result.output.replace("│", " ").split())


def test_a_file_without_packing_is_of_dense_cases(tmp_path: Path) -> None:
    result = invoke("bench --seqlen 16 --head-dim 16 --heads 2 --baselines none --rounds 1", tmp_path)
    assert result.exit_code == 0, result.output
    content = json.loads((tmp_path / "r.json").read_text())
    for row in content["rows"]:
        del row["packing"]
    (tmp_path / "old.json").write_text(json.dumps(content))
    (row,) = load(tmp_path / "old.json").rows
    assert row.as_case().packing == ""


def test_meta_problems_allocate_nothing() -> None:
    given: Tensor = problem.build(cases.suite("varlen", "bf16", "cuda")[-1], "meta", direction="bwd").q
    assert given.device.type == "meta"
