"""The suite decode-ratios: its rows, the variants beside definitions of their own, the requirements and the command."""

from __future__ import annotations

import json
import math
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from tileattn.bench.decode import methods, problem, variants
from tileattn.bench.decode.cases import Case
from tileattn.bench.decode.ceilings import Ceiling
from tileattn.bench.decode.check import expect
from tileattn.bench.decode.goals import Goal, goals
from tileattn.bench.decode.problem import Pool, Problem
from tileattn.bench.decode.ratios.cases import MOST_ROWS, WINDOW, suite
from tileattn.bench.decode.ratios.report import outcomes
from tileattn.bench.decode.results import Results
from tileattn.bench.decode.rows import Measurer, Row
from tileattn.bench.decode.variants import Variant
from tileattn.cli.app import app

CPU = torch.device("cpu")
CASE = Case(3, 48, 4, 2, 16, 16)


@pytest.fixture(autouse=True)
def small_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few distinct caches, and files in an empty folder."""
    monkeypatch.setitem(problem.COLD_BYTES, "cpu", 2**19)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setenv("TERMINAL_WIDTH", "300")


# --- Variants ---


def by_hand(given: Problem, variant: str) -> Tensor:
    """o of the last query of all sequences, by loops: (batch, heads, head_dim)."""
    case, out = given.case, torch.empty(given.case.batch, given.case.heads, given.case.head_dim, dtype=torch.float64)
    for b in range(case.batch):
        k, v = (x.double() for x in given.keys_of(b))
        for h in range(case.heads):
            of = h // (case.heads // case.kv_heads)
            scores = []
            for j in range(case.context):
                score = float(given.q[b, 0, h].double() @ k[j, of]) * case.head_dim**-0.5
                distance = case.context - 1 - j
                if variant == "softcap":
                    score = 30 * math.tanh(score / 30)
                if variant == "alibi":
                    score -= 2 ** (-8 * (h + 1) / case.heads) * distance
                if variant == "function":
                    score -= 0.001 * distance
                if (variant == "window" and distance >= 20) or (variant == "shorter" and j >= 20):
                    score = -math.inf
                scores.append(math.exp(score))
            total = sum(scores) + (math.exp(math.sin(h)) if variant == "sink" else 0.0)
            out[b, h] = sum(scores[j] / total * v[j, of] for j in range(case.context))
    return out


VARIANTS: dict[str, Variant] = {
    "plain": variants.PLAIN,
    "softcap": variants.SOFTCAP,
    "sink": variants.SINK,
    "function": variants.FUNCTION,
    "alibi": variants.alibi(4),
    "window": variants.window(20),
    "shorter": variants.shorter(20),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_is_what_it_is_called_and_tileattn_computes_it(name: str) -> None:
    given, variant = Pool(CPU, torch.float32).problem(CASE), VARIANTS[name]
    wanted = by_hand(given, name)
    expected = expect(given, variant)
    assert torch.allclose(expected.o, wanted[[0, 2]], rtol=1e-9, atol=1e-12)
    got = methods.Own("tileattn-x", variant=variant).prepare(given)(0)
    assert torch.allclose(got.double(), wanted, rtol=1e-4, atol=1e-5)
    expected.check(got)
    given = Pool(CPU, torch.bfloat16).problem(CASE)
    expect(given, variant).check(methods.Own("tileattn-x", variant=variant).prepare(given)(0))


@pytest.mark.parametrize("page", [0, 16])
def test_a_shorter_call_is_one_on_smaller_caches(page: int) -> None:
    """A plan deals the capacity: the reference of a window is a call as it would be without more keys."""
    given = Pool(CPU, torch.float32).problem(replace(CASE, page=page))
    short = given.shortened(20)
    assert given.shortened(None) is given
    assert short.seqlens.tolist() == [20] * 3
    if short.table is None:
        assert all(x.shape[1] == 20 for x in (*short.k, *short.v))
    else:
        assert short.table.shape == (3, 2)
    assert len(short.k) == len(given.k)
    got = methods.Own("tileattn-x", variant=variants.shorter(20)).prepare(given)(0)
    assert torch.allclose(got.double(), by_hand(given, "shorter"), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("causal", [True, False])
def test_the_last_of_several_queries_is_that_of_one(causal: bool) -> None:
    given = Pool(CPU, torch.float32).problem(CASE)
    assert torch.equal(given.queries(4)[:, -1:], given.q)
    got = methods.Own("tileattn-q4", q_len=4, causal=causal).prepare(given)(0)
    assert torch.allclose(got.double(), by_hand(given, "plain"), rtol=1e-4, atol=1e-5)
    dense = Pool(CPU, torch.float32).problem(replace(CASE, page=0))
    sdpa = methods.Sdpa("sdpa-q4", q_len=4).prepare(dense)(0)
    assert torch.allclose(sdpa.double(), by_hand(dense, "plain"), rtol=1e-4, atol=1e-5)


def test_a_window_has_as_many_cold_bytes_as_other_rows() -> None:
    pool = Pool(CPU, torch.float32)
    window = methods.Own("tileattn-window", variant=variants.window(12))
    measured = Measurer(pool, 1)(CASE, [window])
    (row,) = measured.rows
    assert row.kv_bytes == CASE.kv_bytes(4) // 4
    assert len(pool.problem(CASE).k) == math.ceil(2**19 / CASE.kv_bytes(4))
    assert len(pool.problem(CASE, 12 / 48).k) == math.ceil(2**19 / row.kv_bytes)


# --- Rows ---


def test_the_rows_show_what_is_required() -> None:
    chosen = suite("cuda")
    groups = {each.group for each in chosen.comparisons}
    assert groups == {
        "q_len", "score modification", "window", "FixedSplit(1024)", "against cudnn", "against fa2", "batch 1 at 1k",
        "plan alone", "a launch",
    }  # fmt: skip
    for each in chosen.comparisons:
        names = [method.name for method in chosen.methods[each.case]]
        assert len(names) == len(set(names))
        assert {each.method, each.reference} - {None} <= set(names)
    for case, compared in chosen.methods.items():
        for method in compared:
            if isinstance(method, methods.Own) and method.causal:
                assert method.q_len * case.heads // case.kv_heads <= MOST_ROWS
            if isinstance(method, methods.Own) and method.splits is not None:
                assert case.kv_bytes(2) >= 64 * 2**20
            if isinstance(method, methods.Own) and method.variant.keys is not None:
                assert method.variant.keys == WINDOW + 2 * case.page
    of = {each.method for each in chosen.comparisons if each.group == "score modification"}
    assert of == {"tileattn-softcap", "tileattn-sink", "tileattn-alibi", "tileattn-function"}
    q_lens = {each.method for each in chosen.comparisons if each.group == "q_len"}
    assert q_lens == {"tileattn-q2", "tileattn-q4", "tileattn-q8"}
    assert len(chosen.names) == len(set(chosen.names))


def test_the_first_table_of_contiguous_rows_is_complete() -> None:
    against = [each for each in suite("cuda").comparisons if each.group == "against cudnn"]
    shapes = {
        (c.batch, c.context, c.heads, c.kv_heads, c.head_dim, each.method) for each in against for c in [each.case]
    }
    assert shapes == {
        (1, 8192, 32, 8, 128, "tileattn"),
        (1, 131072, 32, 8, 128, "tileattn"),
        (16, 8192, 32, 8, 128, "tileattn"),
        (64, 4096, 64, 8, 128, "tileattn"),
        (16, 8192, 32, 32, 128, "tileattn"),
        (16, 8192, 64, 4, 128, "tileattn"),
        (16, 8192, 32, 8, 128, "tileattn-q4-full"),
        (16, 8192, 8, 1, 256, "tileattn"),
    }  # fmt: skip
    assert all(each.case.page == 0 and each.most == 1.0 for each in against)


def made_row(case: Case, name: str, us: float) -> Row:
    kv_bytes = case.kv_bytes(2)
    sizes = (case.batch, case.context, case.heads, case.kv_heads, case.head_dim, case.page, kv_bytes)
    return Row(case.name, name, *sizes, us, kv_bytes / us / 1e3, 1e-3)


def results_of(*rows: Row) -> Results:
    names = list(dict.fromkeys(row.backend for row in rows))
    return Results("cuda", "made up", "bf16", {"torch": "2"}, None, "today", names, rows=list(rows))


def test_outcomes_are_ratios_or_microseconds() -> None:
    chosen = suite("cuda")
    case = Case(1, 8192, 32, 8, 16)
    short = Case(1, 1024, 32, 32, 0)
    ran = outcomes(
        results_of(
            made_row(case, "tileattn", 10.0), made_row(case, "tileattn-q2", 11.5),
            made_row(case, "tileattn-sink", 10.5), made_row(short, "tileattn", 10.4),
        ),
        chosen,
    )  # fmt: skip
    assert {each.comparison.method: (each.measure, each.met) for each in ran} == {
        "tileattn-q2": (pytest.approx(1.15), False),
        "tileattn-sink": (pytest.approx(1.05), True),
        "tileattn": (10.4, True),
    }


# --- Requirements of the suite decode ---


def of(found: list[Goal], text: str) -> Goal:
    (goal,) = [goal for goal in found if goal.text.startswith(text)]
    return goal


def test_requirements_are_held_against_the_rows() -> None:
    small, large, page_1 = Case(1, 1024, 32, 8, 16), Case(16, 32768, 32, 8, 16), Case(16, 32768, 32, 8, 1)
    dense = Case(1, 8192, 32, 8, 0)
    ideal = large.kv_bytes(2) / 4000e3  # microseconds at 4000 GB/s
    results = results_of(
        made_row(small, "tileattn", 7.6), made_row(small, "fa3", 10.0), made_row(small, "xqa", 8.0),
        made_row(large, "tileattn", ideal / 0.8), made_row(large, "fa3", ideal),
        made_row(page_1, "tileattn", ideal / 0.7), made_row(page_1, "fa3", ideal / 0.75),
        made_row(dense, "tileattn", 10.0), made_row(dense, "cudnn", 5.0),
    )  # fmt: skip
    results.ceilings = [Ceiling("before", "tileattn", 4000.0, None)]
    found = goals(results)
    assert all(goal.verdict in ("yes", "no", "-") for goal in found)
    assert (of(found, "K and V from 64 MB").verdict, of(found, "K and V from 64 MB").rows) == ("yes", 1)
    assert of(found, "K and V from 128 MB").verdict == "no"
    assert of(found, "page 1 from 512 MB: 75%").lowest == "0.700"
    assert of(found, "from 512 MB: 0.97").lowest == "0.800"
    assert of(found, "page 1 from 512 MB: 0.92").verdict == "yes"
    # cuDNN is none of the three.
    mean = of(found, "mean against the best, all")
    assert mean.rows == 3
    assert float(mean.lowest) == pytest.approx((8 / 7.6 * 0.8 * 0.7 / 0.75) ** (1 / 3), abs=1e-3)
    at_1k = of(found, "batch 1 at 1k")
    assert (at_1k.verdict, at_1k.lowest, at_1k.at) == ("no", "7.60 us", small.name)
    assert of(found, "batch 1, 8k").verdict == "-"


# --- The command ---


def test_the_command_measures_all_and_shows_ratios() -> None:
    line = "bench --suite decode-ratios --device cpu --rounds 1 --json r.json --commit abc"
    result = CliRunner().invoke(app, shlex.split(line))
    text = " ".join(result.output.split())
    assert result.exit_code == 0, result.output
    written = json.loads(Path("r.json").read_text())
    assert written["backends"] == suite("cpu").names
    assert {entry["kind"] for entry in written["missing"]} == {"refused"}  # cuDNN and FA-2, on a CPU
    assert "FixedSplit(1024)" in text
    assert "score modification" in text
    again = CliRunner().invoke(app, shlex.split(f"{line} --resume"))
    assert again.exit_code == 0
    assert json.loads(Path("r.json").read_text())["rows"] == written["rows"]


@pytest.mark.parametrize("option", ["--rows batch=1", "--baselines fa3", "--heads 4"])
def test_the_command_refuses_what_it_does_not_take(option: str) -> None:
    result = CliRunner().invoke(app, ["bench", "--suite", "decode-ratios", "--device", "cpu", *option.split()])
    assert result.exit_code == 2
    assert "the suite decode-ratios does not have it" in " ".join(result.output.split())
