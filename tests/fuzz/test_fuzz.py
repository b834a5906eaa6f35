"""The fuzzer itself: its oracle is right and shares no code; wrong results are seen, shrunk and reported."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import tileattn
from tests.fuzz import adapters, ahead, compare, run, trial, values, worker
from tests.fuzz.draw import Draw
from tests.fuzz.oracle import _places, truths
from tests.fuzz.packing import Padding
from tests.fuzz.report import Failure, sketch
from tests.fuzz.shrink import shrink
from tests.fuzz.spec import Call
from tests.fuzz.variants import allowed
from tests.fuzz.worker import Plan, draw_call

FUZZ = Path(adapters.__file__).parent
OWN = ("spec", "draw", "values", "packing", "variants", "oracle", "compare", "shrink", "report")
WRONG = Call(dtype="bf16", batch=2, seqlen_q=7, seqlen_k=12, kv_heads=2, group=2, grads=("q", "k", "v"), lse=True)


@pytest.mark.parametrize("name", OWN)
def test_the_oracle_shares_no_code_with_the_package(name: str) -> None:
    tree = ast.parse((FUZZ / f"{name}.py").read_text())
    imported = [each.module or "" for each in ast.walk(tree) if isinstance(each, ast.ImportFrom) and not each.level]
    imported += [alias.name for each in ast.walk(tree) if isinstance(each, ast.Import) for alias in each.names]
    relative = [each.module for each in ast.walk(tree) if isinstance(each, ast.ImportFrom) and each.level]
    assert not any(module.startswith("tileattn") for module in imported)
    assert set(relative) <= set(OWN)


def test_a_call_survives_json() -> None:
    for number in range(50):
        draw = Draw(number, "cpu", None)
        call = draw.sizes(draw.structure(), 1000)
        assert Call.from_json(call.to_json()).to_json() == call.to_json()
        assert Call.from_json(json.dumps(json.loads(call.to_json()))) == Call.from_json(call.to_json())


def test_the_same_seed_draws_the_same_calls() -> None:
    plan = Plan("7 0 1", "cpu", (None, "triton"), 0.0)
    assert [draw_call(plan, n, None) for n in range(20)] == [draw_call(plan, n, None) for n in range(20)]
    assert draw_call(plan, 0, None) != draw_call(plan._replace(seed="8 0 1"), 0, None)


@pytest.mark.parametrize(
    "mods",
    [
        (["softcap", 2.0], ["alibi", "bh", "fp64"]),
        (["fn", "gate", "fp64"], ["bias", "1hqk", "fp64"], ["fn", "squash", "fp64"]),
        (["fn", "slopes", "fp64"], ["fn", "temperature", "fp64"], ["fn", "hidden", "fp64"], ["fn", "keybias", "fp64"]),
        (["fn", "decay", "fp64"], ["fn", "odd_heads", "fp64"], ["fn", "relative", "fp64"], ["bias", "b11k", "fp64"]),
    ],
    ids=lambda mods: "-".join(mod[1] if mod[0] == "fn" else mod[0] for mod in mods),
)
def test_the_oracles_gradients_are_the_derivatives_of_its_outputs(mods: tuple[list[object], ...]) -> None:
    """Central differences along a random direction of each tensor; nothing of autograd or of the package."""
    tensors = [name for number, mod in enumerate(mods) if (name := values.mod_tensor(number, mod))]
    call = Call(
        seed=3, dtype="fp64", head_dim=3, head_dim_v=2, batch=2, seqlen_q=4, seqlen_k=5, kv_heads=2, group=2,
        causal=True, mods=mods, sink="fp64", grads=("q", "k", "v", "sink", *tensors), lse=True, dlse=True,
    )  # fmt: skip
    t = values.make(call, "cpu")
    truth = truths(call, t)

    def loss(changed: dict[str, torch.Tensor]) -> float:
        by_name = truths(call.replace(grads=()), changed)
        seen = by_name["lse"].value != -torch.inf
        return float((by_name["o"].value * t["do"]).sum() + (by_name["lse"].value[seen] * t["dlse"][seen]).sum())

    step = 1e-5
    for name in call.grads:
        direction = torch.randn(t[name].shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        ends = [loss(t | {name: t[name] + sign * step * direction}) for sign in (1, -1)]
        expected = (truth[name].value * direction).sum()
        # A step of 1e-5 leaves an error of its square, and of the last digit over the step.
        assert abs((ends[0] - ends[1]) / (2 * step) - expected) <= 1e-7 * (1 + abs(expected)), name


def test_the_oracles_positions_by_hand() -> None:
    """Three queries at the end of five keys, and packed sequences whose lengths differ."""
    call = Call(seqlen_q=3, seqlen_k=5, mask=["window", 1, 0])
    t = values.make(call, "cpu")
    seen = allowed(call, t, _places(call, Padding(call, t)))[0, 0]
    assert seen.int().tolist() == [[0, 1, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 1, 1]]
    call = Call(adapter="varlen", lengths_q=(2, 1), lengths_k=(1, 3), causal=True)
    t = values.make(call, "cpu")
    seen = allowed(call, t, _places(call, Padding(call, t)))
    assert seen[0, 0].int().tolist() == [[0, 0, 0], [1, 0, 0]]
    assert seen[1, 0, :1].int().tolist() == [[1, 1, 1]]


@pytest.mark.parametrize("backend", [None, "triton"])
def test_drawn_calls_are_right(backend: str | None) -> None:
    for number in range(20 if backend is None else 1):
        draw = Draw(f"test {number}", "cpu", backend)
        call = draw.sizes(draw.structure(), 3_000)
        wrong = trial.failure(call, "cpu")
        assert wrong is None, f"{wrong}\n{sketch(call)}\n{call.to_json()}"


def failing(monkeypatch: pytest.MonkeyPatch, spoil: object) -> None:
    """A package whose attention is wrong."""
    right = tileattn.attention
    monkeypatch.setattr(tileattn, "attention", lambda *tensors, **options: spoil(right(*tensors, **options)))  # type: ignore[operator]


@pytest.mark.parametrize(
    ("what", "spoil"),
    [
        ("o", lambda outputs: (outputs[0] * (1 + 2**-4), outputs[1])),
        ("o", lambda outputs: (outputs[0].masked_fill(torch.arange(7)[:, None, None] == 3, torch.nan), outputs[1])),
        ("lse", lambda outputs: (outputs[0], outputs[1] + 0.01)),
        ("o", lambda outputs: (outputs[0].roll(1, dims=2), outputs[1])),
        ("WrongFormError", lambda outputs: (outputs[0].float(), outputs[1])),
        ("WrongFormError", lambda outputs: (outputs[0][:, :-1], outputs[1])),
    ],
)
def test_what_is_wrong_is_seen(monkeypatch: pytest.MonkeyPatch, what: str, spoil: object) -> None:
    call = WRONG.replace(grads=())
    assert trial.failure(call, "cpu") is None
    failing(monkeypatch, spoil)
    wrong = trial.failure(call, "cpu")
    assert wrong is not None
    assert what in wrong


def test_one_gradient_that_is_wrong_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = adapters.run
    monkeypatch.setattr(
        adapters, "run", lambda call, t: (outputs := right(call, t)) | {"k": outputs["k"].roll(1, dims=1)}
    )
    wrong = trial.failure(WRONG, "cpu")
    assert wrong is not None
    assert wrong.startswith("k is off by")
    assert "o, lse, q, v: right" in wrong


# What kernels cannot compute to the last digit: numbers below float32's normal ones, which GPUs make 0 ...
TINY = Call(dtype="bf16", seqlen_q=3, head_dim=16, scale=-5.1, values="constant", v_size=0.01, sink="fp32")
# ... gradients of scores that a soft cap makes smaller than float16's normal numbers ...
CAPPED = Call(
    dtype="fp16", seqlen_q=40, seqlen_k=47, mods=(["softcap", 52.212],), grads=("q",), values="offset", q_size=4.0,
    v_size=0.01,
)  # fmt: skip
# ... sums of weights that are all rounded to the same side ...
EQUAL = Call(
    dtype="fp8", head_dim=112, seqlen_q=2, seqlen_k=127, mods=(["fn", "decay", "fp32"],), values="constant", v_size=30.0
)
# ... and gradients that are beyond their dtype's largest number.
STEEP = Call(
    seed=1648752370, head_dim=210, head_dim_v=211, batch=2, seqlen_q=55, seqlen_k=111, group=2,
    mods=(["alibi", "bh", "fp16"],), grads=("alibi0",), values="integers", v_size=30.0,
)  # fmt: skip
# Equal values: dS is 0, and all roundings of a row's dP are one. The reference once gave their sum to a single key.
EQUAL_VALUES = Call(
    seed=677459068, adapter="reference", head_dim=1, seqlen_k=127, kv_heads=2, strides=("dense", "dense", "seq0"),
    grads=("k",), module="standard_attention",
)  # fmt: skip


def worst(call: Call, name: str, got: torch.Tensor) -> float:
    t = values.make(call, "cpu")
    truth = truths(call, adapters.quantized(call, t)[1] if call.dtype == "fp8" else t)
    return float(compare.ratios(call, t, {name: got}, truth)[name])


def scores_of(call: Call) -> tuple[torch.Tensor, ...]:
    """Scaled scores of one head, and k, v and do, (rows, .), in float64."""
    t = values.make(call, "cpu")
    exact = adapters.quantized(call, t)[1] if call.dtype == "fp8" else t
    q, k, v, do = (x[0, :, 0].double() for x in (exact["q"], exact["k"], exact["v"], t["do"]))
    return call.scale_value * (q @ k.T), k, v, do


def test_what_gpus_flush_to_zero_is_right_and_no_more() -> None:
    """The weight is e^-82 beside the sink's: o is below 2^-126. With e^-74 it is not."""
    nothing = torch.zeros(1, 3, 1, 16)
    right = truths(TINY, values.make(TINY, "cpu"))["o"].value
    assert 0 < float(right.abs().max()) < 2.0**-126
    assert worst(TINY, "o", nothing) <= 1
    assert worst(TINY.replace(scale=-4.6), "o", nothing) > 1


def test_gradients_rounded_behind_a_soft_cap_are_right_and_no_more() -> None:
    """dS is rounded to float16 after the cap's derivative has joined; rounded to three digits less it is wrong."""
    scores, k, v, do = scores_of(CAPPED)
    scores.requires_grad_()
    cap = CAPPED.mods[0][1]
    loss = (torch.softmax(cap * torch.tanh(scores / cap), dim=-1) @ v * do).sum()
    (ds,) = torch.autograd.grad(loss, scores)
    assert float(ds.abs().max()) < 2.0**-14

    def ratio(rounded: torch.Tensor) -> float:
        dq = (CAPPED.scale_value * (rounded @ k)).half()
        return worst(CAPPED, "q", dq[None, :, None])

    assert ratio(ds.half().double()) <= 1
    assert ratio((ds / 8).half().double() * 8) > 1


@pytest.mark.parametrize("base", [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.7, 1.9])
def test_equal_weights_that_are_rounded_equally_are_right_and_no_more(base: float) -> None:
    """Weights are rounded to float8, from several first values. An error of o of twice one rounding is wrong."""
    scores, _, v, _ = scores_of(EQUAL)
    distance = (torch.arange(127) - torch.tensor([[125], [126]])).abs()
    scores = scores + 2 * torch.exp2(-0.25 * distance.double())
    weights = base * torch.exp(scores - scores.amax(-1, keepdim=True))
    o = weights.float().to(torch.float8_e4m3fn).double() @ v / weights.sum(-1, keepdim=True)
    assert worst(EQUAL, "o", o.bfloat16()[None, :, None]) <= 1
    exact = weights @ v / weights.sum(-1, keepdim=True)
    assert worst(EQUAL, "o", (exact * (1 + 2.0**-3)).bfloat16()[None, :, None]) > 1


def test_a_gradient_beyond_its_dtype_is_infinite_and_no_other_is() -> None:
    """Slopes in float16 end at 65504; half of such a gradient is a number."""
    truth = truths(STEEP, values.make(STEEP, "cpu"))["alibi0"].value
    assert float(truth.abs().max()) > 65504
    rounded = truth.half()
    assert rounded.isinf().any()
    assert worst(STEEP, "alibi0", rounded) <= 1
    assert worst(STEEP, "alibi0", -rounded) > 1
    assert worst(STEEP, "alibi0", rounded.nan_to_num(posinf=torch.nan, neginf=torch.nan)) > 1
    half = (truth / 2).half()
    assert half.isfinite().all()
    assert worst(STEEP, "alibi0", half) > 1
    smaller = STEEP.replace(v_size=STEEP.v_size / 2)
    assert worst(smaller, "alibi0", rounded) > 1


@pytest.mark.parametrize("module", ["standard_attention", "flash_attention_1", "flash_attention_2"])
def test_gradients_of_equal_values_are_right(module: str) -> None:
    assert trial.failure(EQUAL_VALUES.replace(module=module), "cpu") is None


@pytest.mark.parametrize("strides", [EQUAL_VALUES.strides, ("dense", "dense", "dense")], ids=["equal", "unequal"])
def test_one_wrong_gradient_is_seen_also_where_values_are_equal(strides: tuple[str, ...]) -> None:
    """-inf, NaN, half of it where it is not 0, and three times what is allowed, in one element."""
    call = EQUAL_VALUES.replace(strides=strides)
    dk, variance = truths(call, values.make(call, "cpu"))["k"]
    bound = compare.FACTOR * variance[0, 97, 1, 0].sqrt()
    wrong = [-torch.inf, torch.nan, dk[0, 97, 1, 0] - 3 * bound, dk[0, 97, 1, 0] + 3 * bound]
    if strides != EQUAL_VALUES.strides:
        wrong.append(dk[0, 97, 1, 0] / 2)
    assert worst(call, "k", dk.float()) <= 1
    for value in wrong:
        spoilt = dk.clone()
        spoilt[0, 97, 1, 0] = value
        assert worst(call, "k", spoilt.float()) > 1


def test_a_failure_is_shrunk_to_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong from the ninth key on, in calls with a mask: all else goes."""
    right = tileattn.attention

    def wrong(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: object) -> object:
        hidden = options["mask"] is not None and k.shape[1] > 8
        return right(q, k, v * 2 if hidden else v, **options)  # type: ignore[arg-type, call-overload]

    monkeypatch.setattr(tileattn, "attention", wrong)
    call = WRONG.replace(
        seqlen_q=40, seqlen_k=30, mask=["or", ["window", 5, None], ["prefix", 3]], mods=(["softcap", 3.0],),
        sink="fp32", lse=False, values="offset", strides=("odd", "dense", "heads"), scale=0.3, poisoned=True,
    )  # fmt: skip
    minimal = shrink(call, lambda smaller: trial.failure(smaller, "cpu") is not None, seconds=60)
    assert set(minimal.changed()) <= {"seed", "mask", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v"}
    assert (minimal.seqlen_k, minimal.mods, minimal.grads) == (9, (), ())
    text = Failure(call.to_json(), minimal.to_json(), "o is off", "", "7 0 1 5", "cpu").text()
    assert "seed 7 0 1 5" in text
    assert "seqlen=1/9" in text
    assert "--call" in text


def test_the_share_of_dropped_weights_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    call = WRONG.replace(dropout=0.5, seqlen_k=100)
    assert trial.failure(call, "cpu") is None
    monkeypatch.setattr(adapters, "kept_weights", lambda call, device: torch.full((2, 4, 7, 100), 2.0).double())
    wrong = trial.failure(call, "cpu")
    assert wrong is not None
    assert "dropout's share is off" in wrong


@pytest.mark.skipif(find_spec("tilelang") is None, reason="needs tilelang")
def test_kernels_of_a_structure_are_found_ahead() -> None:
    compiled = [each for each in ahead.structures(1, 12, "sm_90a") if each.compiles]
    jobs = [ahead.jobs_of(structure) for structure in compiled[:3]]
    assert all(jobs)
    assert all(job.call.forward.arch == "sm_90a" for each in jobs for job in each if hasattr(job.call, "forward"))


def test_verdicts_wait_for_nothing() -> None:
    """On a GPU the verdict leaves one number of each output on the device, and reads no value."""
    tree = ast.parse((FUZZ / "compare.py").read_text()), ast.parse((FUZZ / "oracle.py").read_text())
    called = {
        each.func.attr
        for part in tree
        for each in ast.walk(part)
        if isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute)
    }
    assert not called & {"item", "tolist", "cpu", "numpy", "nonzero"}
    assert compare.FACTOR > 0


def dies_at_its_fourth_call(plan: Plan, connection: Any, progress: Any) -> None:
    """A stand-in for `worker.work`."""
    right = worker.draw_call

    def draw(plan: Plan, number: int, structure: Call | None) -> Call:
        if number == 3:
            os._exit(9)
        return right(plan, number, structure)

    worker.draw_call = draw
    worker.work(plan, connection, progress)


@pytest.mark.slow
def test_a_process_that_dies_is_told_with_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process makes the calls of the block one by one, and dies at the same call."""
    monkeypatch.setattr(run, "work", dies_at_its_fourth_call)
    leg = run.Run(1, "cpu", [None], time.time() + 120, 1, structures=3, state=None, most_failures=1)
    assert leg.run() == 1
    (failure,) = leg.failures
    assert failure.wrong == "the process died (exit status 9)"
    assert failure.seed == "1 0 0 3"
    assert leg.deaths == 2


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--structures", "4"]], ids=["calls", "structures"])
def test_the_command(tmp_path: Path, more: list[str]) -> None:
    """A leg of some calls, then another that goes on with its state."""
    state = tmp_path / "state.json"
    command = [
        sys.executable,
        "-m",
        "fuzz",
        *["--calls", "8", "--workers", "1", "--seed", "2", "--backend", "torch", "--state"],
        str(state),
    ]
    counts = []
    for leg in (1, 2):
        done = subprocess.run([*command, *more], cwd=FUZZ.parent, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        kept = json.loads(state.read_text())
        assert (kept["seed"], kept["legs"]) == (2, leg)
        counts.append(kept["counts"]["calls"])
    assert 0 < counts[0] < counts[1]
