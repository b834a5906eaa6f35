"""The benchmark of the backward pass: its timed calls, its check of gradients, its records and pictures."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import Tensor

from tests.bench.test_bench import CPU, NAMES, QUICK, SMALL
from tests.tools.made_up import made_up
from tileattn.bench import (
    cases,
    cost,
    passes,
    plot,
    plot_memory,
    problem,
    report,
    results,
    runner,
    variants,
)
from tileattn.bench.baselines import BASELINES, TileAttn, flex, own, sdpa
from tileattn.bench.baselines.base import OWN, Implementation, Prepared
from tileattn.bench.cases import square
from tileattn.bench.oracle import gradients as gradient_oracle
from tileattn.bench.oracle import output as oracle
from tileattn.cli import workspaces
from tileattn.measure import ceilings
from tileattn.testing import oracle_attention, oracle_gradients
from tileattn.variant.key import normalize

TRAINED = ("bias-bh+dbias", "bias-b1+dbias", "bias-11+alibi+dbias+sink")
IMPLEMENTATIONS: dict[str, Implementation] = {OWN: TileAttn(), "eager": BASELINES["eager"], "sdpa": BASELINES["sdpa"]}


def built(**changes: object) -> problem.Problem:
    """A small problem with gradients."""
    return problem.build(replace(SMALL, **changes), CPU, direction="bwd")  # type: ignore[arg-type]


def gradients(implementation: Implementation, given: problem.Problem) -> tuple[Tensor, ...]:
    grads = passes.start("bwd", implementation.prepare(given), given)()
    assert isinstance(grads, tuple)
    return grads


# Cases and problems


def test_a_bias_is_trained_where_the_variant_says_so() -> None:
    assert variants.parse("dbias+sink+bias-11+causal").name == "causal+bias-11+dbias+sink"
    assert variants.parse("causal+bias+dbias").mask.name == "causal"
    with pytest.raises(
        ValueError, match=r"variant 'causal\+dbias': 'dbias' is the gradient of a bias, and there is none"
    ):
        variants.parse("causal+dbias")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_suites_are_the_same_in_both_directions_but_for_trained_biases(device: str) -> None:
    for name in cases.SUITES:
        forward, backward = (cases.suite(name, "bf16", device, direction) for direction in ("fwd", "bwd"))
        trained = [case for case in backward if case.terms.dbias]
        assert [case for case in backward if case not in trained] == forward
        assert bool(trained) == (name == "variants")


def test_a_problem_with_gradients_has_the_forwards_values() -> None:
    case = replace(SMALL, variant="bias+sink")
    forward, backward = (problem.build(case, CPU, direction=direction) for direction in ("fwd", "fwdbwd"))
    assert forward.do is None
    assert not forward.q.requires_grad
    assert backward.do is not None
    assert backward.do.shape == (2, 33, 4, 8)
    assert forward.bias is not None
    for name, tensor in backward.inputs().items():
        assert tensor.requires_grad
        assert torch.equal(tensor, getattr(forward, name[1:]))
    assert list(backward.inputs()) == ["dq", "dk", "dv"]
    assert list(built(variant="bias+dbias").inputs()) == ["dq", "dk", "dv", "dbias"]


# Gradients against float64


@pytest.mark.parametrize("seqlen_q", [33, 50])
@pytest.mark.parametrize("name", [*NAMES, *TRAINED])
def test_expected_gradients_are_autograds(name: str, seqlen_q: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests' oracle shares no code with the benchmark's. Some of the 50 rows see no key."""
    monkeypatch.setattr(oracle, "SCORES_PER_CHUNK", 2000)
    given = built(variant=name, seqlen_q=seqlen_q)
    expected = gradient_oracle.build(given).expected
    mask, score_mods = normalize(own.mask_of(given), own.score_mods_of(given), causal=False)
    o, _ = oracle_attention(given.q, given.k, given.v, mask, score_mods, given.sink)
    assert given.do is not None
    inputs = given.inputs()
    by_autograd = dict(zip(inputs, torch.autograd.grad(o, tuple(inputs.values()), given.do.double()), strict=True))
    assert expected.keys() == by_autograd.keys()
    for gradient, value in by_autograd.items():
        value = value if gradient == "dbias" else value.transpose(1, 2)
        # Autograd returns float32: the inputs' dtype.
        torch.testing.assert_close(value, expected[gradient].float(), rtol=1e-5, atol=1e-6, msg=gradient)


@pytest.mark.parametrize("name", ["causal", "causal+softcap30", "alibi+sink"])
def test_an_error_of_dq_is_measured_by_its_terms(name: str) -> None:
    """By the size of the tests' oracle: few keys leave a small dq, of which a rounded o leaves a large error."""
    given = built(variant=name)
    expected = gradient_oracle.build(given)
    mask, score_mods = normalize(own.mask_of(given), own.score_mods_of(given), causal=False)
    q, k, v = (x.detach().double().requires_grad_() for x in (given.q, given.k, given.v))
    sink = None if given.sink is None else given.sink.double()
    assert given.do is not None
    exact, sizes = oracle_gradients({"q": q}, given.do, None, q, k, v, mask, score_mods, sink)
    size = sizes["q"].transpose(1, 2)
    torch.testing.assert_close(expected.sizes["dq"].abs(), size)
    wrong = [x.clone() for x in gradients(BASELINES["eager"], given)]
    wrong[0][1, 1, 2] += 0.5 * size[1, 2, 1].float()
    norm = max(float(size[1, 2, 1].norm()), float(exact["q"][1, 1, 2].norm()))
    assert expected.error(wrong) == pytest.approx(0.5 * float(size[1, 2, 1].norm()) / norm, rel=1e-3)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", [*NAMES, *TRAINED])
def test_implementations_have_the_gradients_of_the_variants_that_they_accept(name: str, dtype: str) -> None:
    given = built(variant=name, dtype=dtype)
    expected = gradient_oracle.build(given)
    checked = []
    for label, implementation in IMPLEMENTATIONS.items():
        if implementation.refusal(given) is None:
            grads = gradients(implementation, given)
            assert [x.shape for x in grads] == [x.shape for x in given.inputs().values()]
            assert 0 < expected.error(grads) < (1e-5 if dtype == "fp32" else 0.05)
            if dtype == "bf16":  # in float32 a rounding is so little that it is luck in what order a CPU adds up
                expected.check(grads)
            checked.append(label)
    assert set(checked) >= {OWN, "eager"}


def test_the_error_sees_one_wrong_row_of_any_gradient_and_nan() -> None:
    given = built(variant="causal+bias+dbias", dtype="bf16")
    expected = gradient_oracle.build(given)
    right = gradients(BASELINES["eager"], given)
    before = expected.error(right)
    assert before < 0.03
    places = {"dq": (1, 30, 3), "dk": (0, 5, 1), "dv": (1, 5, 0), "dbias": (0, 2, 32)}
    for index, (name, place) in enumerate(places.items()):
        wrong = [x.clone() for x in right]
        wrong[index][place] *= 1.5
        assert expected.error(wrong) > 3 * before
        with pytest.raises(AssertionError, match=rf"{name}: error .*(.|\n)*worst at"):
            expected.check(wrong)
        wrong[index][place] = math.nan
        assert math.isnan(expected.error(wrong))


@pytest.mark.parametrize("swapped", [(0, 1), (1, 2)])
def test_gradients_in_another_order_are_wrong(swapped: tuple[int, int]) -> None:
    given = problem.build(square(1, 32, 2, 16, "causal", "fp32"), CPU, direction="bwd")
    grads = list(gradients(BASELINES["eager"], given))
    i, j = swapped
    grads[i], grads[j] = grads[j], grads[i]
    with pytest.raises(AssertionError, match="error"):
        gradient_oracle.build(given).check(grads)


@pytest.mark.parametrize(
    ("name", "batches", "heads"),
    [
        ("causal", (0, 3), (0, 1, 6, 7)),
        ("bias", (0, 3), (0, 1, 6, 7)),
        ("bias-bh+dbias", (0, 3), (0, 1, 6, 7)),
        ("bias+dbias", (0, 1, 2, 3), (0, 1, 6, 7)),
        ("bias-b1+dbias", (0, 3), tuple(range(8))),
        ("bias-11+dbias", (0, 1, 2, 3), tuple(range(8))),
    ],
)
def test_large_cases_are_sampled_by_groups_of_heads(
    name: str, batches: tuple[int, ...], heads: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sum over all heads, or over the batch, still takes all of them."""
    monkeypatch.setitem(oracle.SCORES_CHECKED, "cpu", 0)
    given = built(variant=name, batch=4, heads=8, kv_heads=4)
    expected = gradient_oracle.build(given)
    assert (expected.sample.batches, expected.sample.heads) == (batches, heads)
    assert ("all rows of" in expected.sample.text) == (len(batches) * len(heads) < 32)
    grads = [x.clone() for x in gradients(BASELINES["eager"], given)]
    expected.check(grads)
    if heads != tuple(range(8)):
        grads[1][0, 0, 1] = math.nan  # of a kv head that is not looked at
        expected.check(grads)
    grads[1][batches[-1], 0, -1] = math.nan
    with pytest.raises(AssertionError, match=r"dk: .* NaN"):
        expected.check(grads)


# What is called


@dataclass
class Counted:
    """A square of q, and how often it was computed."""

    given: problem.Problem
    calls: int = 0

    def __call__(self) -> Tensor:
        self.calls += 1
        return self.given.q.pow(2)[..., :8] + self.given.k.sum() + self.given.v.sum()


@pytest.mark.parametrize(("direction", "forwards"), [("fwd", [0, 1, 2]), ("bwd", [1, 1, 1]), ("fwdbwd", [0, 1, 2])])
def test_a_direction_calls_what_it_says(direction: str, forwards: list[int]) -> None:
    given = built()
    forward = Counted(given)
    call = passes.start(direction, Prepared(forward), given)
    seen = [forward.calls]
    outputs = []
    for _ in range(2):
        outputs.append(call())
        seen.append(forward.calls)
    assert seen == forwards
    assert given.do is not None
    if direction == "fwd":
        assert torch.equal(outputs[0], forward())
    else:
        for dq, dk, dv in outputs:
            torch.testing.assert_close(dq[..., :8], 2 * given.q.detach()[..., :8] * given.do)
            assert dk.unique().numel() == dv.unique().numel() == 1
    # Gradients are returned, and added to nothing.
    assert given.q.grad is given.k.grad is given.v.grad is None


@pytest.mark.parametrize("label", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["causal", "causal+bias+dbias", "bias-b1+alibi+dbias"])
def test_calls_can_be_repeated_in_every_direction(label: str, name: str) -> None:
    given = built(variant=name)
    prepared = IMPLEMENTATIONS[label].prepare(given)
    alone, both = (passes.start(direction, prepared, given) for direction in ("bwd", "fwdbwd"))
    first = alone()
    for again in (alone(), both(), both()):
        for x, y in zip(first, again, strict=True):
            torch.testing.assert_close(x, y)


def test_a_trained_bias_joins_sdpas_mask_in_every_call() -> None:
    ahead, trained = (built(variant=name) for name in ("causal+bias", "causal+bias+dbias"))
    held = [BASELINES["sdpa"].prepare(given).held_bytes for given in (ahead, trained)]
    assert held == [4 * 33 * 47 * 4, 33 * 47]
    assert BASELINES["sdpa"].prepare(built(variant="bias+dbias")).held_bytes == 0


def test_baselines_say_what_has_no_gradient() -> None:
    trained = built(variant="bias+dbias")
    assert BASELINES["flex"].refusal(trained) == "FlexAttention has no backward pass on a CPU"
    cudnn = BASELINES["cudnn"]
    assert isinstance(cudnn, sdpa.RestrictedSdpa)
    assert cudnn._kernel_refusal(trained) == "PyTorch has no gradient of a bias through cuDNN"


def test_flex_may_run_one_graph_again_and_again() -> None:
    from torch._functorch import config

    assert config.donated_buffer
    assert BASELINES["flex"].prepare(built()).context is flex._kept_graphs
    assert BASELINES["flex"].prepare(problem.build(SMALL, CPU)).context is not flex._kept_graphs
    with flex._kept_graphs():
        assert not config.donated_buffer
    assert config.donated_buffer


# Runner and result file


@dataclass(frozen=True)
class Scaled:
    """SDPA, whose gradients are multiplied by a factor."""

    name: str
    factor: float = 1.0

    def refusal(self, given: problem.Problem) -> str | None:
        return None

    def prepare(self, given: problem.Problem) -> Prepared:
        inner = BASELINES["sdpa"].prepare(given)

        def call() -> Tensor:
            o = inner.call()
            if o.requires_grad:
                o.register_hook(lambda gradient: gradient * self.factor)
            return o

        return Prepared(call, held_bytes=100)


def run(direction: str, *implementations: Implementation) -> results.Results:
    measured = results.begin(CPU, "abc", "test", direction)
    two = [replace(SMALL, variant=name, seqlen_q=47, dtype="bf16") for name in ("full", "causal")]
    runner.Run("test", two, implementations, CPU, measured, effort=QUICK)()
    return measured


@pytest.mark.parametrize("direction", cases.DIRECTIONS)
def test_the_runner_measures_a_direction(direction: str) -> None:
    measured = run(direction, Scaled(OWN), BASELINES["eager"])
    assert not measured.failed
    assert [(row.case, row.backend, row.direction) for row in measured.rows] == [
        (case, backend, direction) for case in measured.cases() for backend in (OWN, "eager")
    ]
    for row in measured.rows:
        assert row.tflops == pytest.approx(row.as_case().flops(direction) / row.ms / 1e9)
        assert row.error < 0.05


def test_memory_of_a_backward_pass_is_that_of_forward_and_backward() -> None:
    forward, alone, both = (run(direction, TileAttn(), BASELINES["eager"]) for direction in ("fwd", "bwd", "fwdbwd"))
    for case in both.cases():
        for backend in (OWN, "eager"):
            peaks = [measured.row(case, backend) for measured in (forward, alone, both)]
            bytes_ = [row.peak_bytes for row in peaks if row is not None]
            assert bytes_[0] < bytes_[1] == bytes_[2]


def test_memory_names_the_parts_of_dk_and_dv(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 3072 keys of 4 heads: 3 shares of dk and of dv, with 64 columns of 4 bytes."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # 132 multiprocessors
    few = cases.Case(1, 3072, 3072, 28, 4, 64, 64, "full", "bf16")
    whole = replace(few, kv_heads=28)
    assert workspaces.parts_of_gradients(few, "sm_90a") == (3, 3072, 3 * 3072 * 4 * 2 * 64 * 4)
    assert workspaces.parts_of_gradients(whole, "sm_90a") == (1, 3072, 0)
    cut = cases.Case(1, 17608, 17608, 12, 3, 64, 64, "full", "bf16")  # 16896 keys fill three waves
    assert workspaces.lines([few, whole, cut], "sm_90a") == [
        f"{few.name}: 18.0 MiB of tileattn's memory are parts of dk and dv, of 3 shares of heads",
        f"{cut.name}: 4.2 MiB of tileattn's memory are parts of dk and dv, of 4 shares of heads for the last 712 keys",
    ]


def test_a_wrong_gradient_of_ours_is_a_failure_and_a_baselines_is_shown() -> None:
    measured = run("bwd", Scaled(OWN, 1.25), Scaled("baseline", 1.25), Scaled("other", math.nan))
    failed = {entry.backend: entry.reason for entry in measured.failed}
    assert failed.keys() == {OWN, "other"}
    assert "AssertionError: dq: error 0.25" in failed[OWN]
    assert "values are NaN" in failed["other"]
    assert measured.rows[0].backend == "baseline"
    assert measured.rows[0].error == pytest.approx(0.25, rel=0.05)


def test_a_file_without_a_direction_is_of_the_forward_pass(tmp_path: Path) -> None:
    backward, forward = (made_up("quick", "cuda", OWN, direction=direction) for direction in ("bwd", "fwd"))
    results.save(backward, tmp_path / "b.json")
    assert results.load(tmp_path / "b.json") == backward
    results.save(forward, tmp_path / "f.json")
    content = json.loads((tmp_path / "f.json").read_text())
    assert content.pop("direction") == "fwd"
    (tmp_path / "f.json").write_text(json.dumps(content))
    assert results.load(tmp_path / "f.json") == forward


# Cost, tables, pictures


def test_a_bias_that_is_trained_is_read_and_its_gradient_written() -> None:
    plain_ms = {}
    for direction in ("bwd", "fwdbwd"):
        measured = replace(
            made_up("variants", "cuda", OWN, direction=direction), ceilings=[ceilings.Ceiling("before", 700, 0.1)]
        )
        plain_ms[direction] = {each.case: each.plain_ms for each in cost.costs(measured)}
    once = 16 * 32 * 33 / 2 * 128 * 128 * 2 / 0.1e9
    for direction, times in {"bwd": (1, 2), "fwdbwd": (2, 3)}.items():
        for name, expected in zip(("causal+bias", "causal+bias+dbias"), times, strict=True):
            assert plain_ms[direction][f"D128 {name} (4,4096,16)"] == pytest.approx(expected * once)
        assert plain_ms[direction]["D128 causal+alibi (4,4096,16)"] == 1.0


def test_tables_and_pictures_say_the_direction() -> None:
    words = {"fwd": "forward", "bwd": "backward", "fwdbwd": "forward and backward"}
    for direction, said in words.items():
        measured = made_up("quick", "cuda", OWN, "fa2", direction=direction)
        console = Console(width=200, file=StringIO())
        console.print(report.render(measured))
        assert isinstance(console.file, StringIO)
        text = console.file.getvalue()
        assert f"bf16 · {said}\n" in text
        assert ("a row of dq, dk and dv against float64" in " ".join(text.split())) == (direction != "fwd")
        title = plot.draw(measured).legends[0].get_title().get_text()
        assert title == f"Attention {said}, bf16, Imaginary GPU"


def of_memory(peak: Callable[[str, int], int]) -> results.Results:
    """D128 by length, as `tileattn memory` measures it."""
    measured = made_up("fa", "cuda", OWN, "eager", direction="fwdbwd")
    measured.rows = [
        replace(row, suite="memory", batch=1, peak_bytes=peak(row.backend, row.seqlen_q))
        for row in measured.rows
        if (row.head_dim, row.variant, row.heads) == (128, "full", 16)
    ]
    return measured


def test_the_picture_of_memory_has_a_line_for_each_implementation_and_the_outputs() -> None:
    measured = of_memory(lambda backend, seqlen: seqlen * (2048 if backend == OWN else seqlen))
    measured.rows = [row for row in measured.rows if row.backend == OWN or row.seqlen_q < 8192]
    measured.failed = [results.Missing("D128 full (1,8192,16)", "eager", "OutOfMemoryError: CUDA out of memory")]
    (axes,) = plot_memory.draw(measured).axes
    lines = {line.get_label(): list(line.get_ydata()) for line in axes.lines}
    lengths = [512, 1024, 2048, 4096, 8192, 16384]
    assert lines == {
        "o, dq, dk and dv alone": [4 * seqlen * 16 * 128 * 2 for seqlen in lengths],
        OWN: [seqlen * 2048 for seqlen in lengths],
        "PyTorch eager": [seqlen * seqlen for seqlen in lengths[:4]],
    }
    assert sorted(text.get_text() for text in axes.texts) == ["16.0 MiB, then out of memory", "32.0 MiB"]


def test_numbers_at_the_end_of_lines_that_are_close_stand_apart() -> None:
    """Distances are in points on the page. Every line has its whole name."""
    measured = of_memory(lambda backend, seqlen: seqlen * (2048 if backend == OWN else 2060))
    measured.rows += [
        replace(row, backend=baseline) for row in measured.rows if row.backend == OWN for baseline in ("fa2", "cudnn")
    ]
    measured.rows += [
        replace(row, backend="fa4", peak_bytes=row.seqlen_q * 2056) for row in measured.rows if row.backend == OWN
    ]
    figure = plot_memory.draw(measured)
    figure.draw_without_rendering()
    (axes,) = figure.axes
    said = ["32.0 MiB\ntileattn\nFlashAttention-2 (SDPA)\ncuDNN (SDPA)", "32.1 MiB", "32.2 MiB"]
    assert [text.get_text() for text in axes.texts] == said, "lines that lie on each other share a number"
    boxes = [text.get_window_extent() for text in axes.texts]
    assert not any(boxes[i].overlaps(boxes[j]) for i in range(len(boxes)) for j in range(i))
    (legend,) = figure.legends
    inside = figure.bbox
    for box in (*boxes, legend.get_window_extent()):
        assert inside.x0 <= box.x0
        assert box.x1 <= inside.x1


def test_deterministic_gradients_are_a_baseline_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    baseline, asked = BASELINES["tileattn-deterministic"], []
    assert "for gradients" in str(baseline.refusal(problem.build(built().case, torch.device("cpu"))))
    attention = own.attention
    monkeypatch.setattr(own, "attention", lambda **given: asked.append(given["deterministic"]) or attention(**given))
    assert baseline.refusal(built()) is None
    assert all(x.isfinite().all() for x in gradients(baseline, built()))
    assert asked == [True]
