"""The README's example runs, and its figures and those of docs/speed.md are those of the result files."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from typing import Any

import pytest
import torch

from tests.tools import ROOT
from tileattn.kernels.tilelang.architecture import ARCHITECTURES

README = (ROOT / "README.md").read_text()
SPEED = (ROOT / "docs/speed.md").read_text()
ATTENTION = (ROOT / "docs/attention.md").read_text()


@pytest.mark.parametrize("text", [README, ATTENTION], ids=["README.md", "docs/attention.md"])
def test_the_example_runs(text: str) -> None:
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert code is not None
    scope: dict[str, object] = {}
    exec(code[1], scope)
    assert isinstance(scope["o"], torch.Tensor)
    assert scope["o"].isfinite().all()


@pytest.mark.slow  # a process of its own, which imports transformers
def test_the_adapters_are_entered_as_it_says() -> None:
    pytest.importorskip("transformers")
    _, code = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    code += "\nimport flash_attn\nassert flash_attn.flash_attn_func.__module__.startswith('tileattn.')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_readme_is_short() -> None:
    """One screen to start, and a page in all: longer texts are pages of docs/."""
    assert len(README) < 7400
    order = [README.index(part) for part in ("```python", "## Install", "<picture>", "## What works on")]
    assert order == sorted(order)


def test_cards_have_the_architectures_of_the_kernels() -> None:
    """Each architecture in the table of cards is one that TileLang's kernels know, and only sm_90a was run."""
    rows = re.findall(r"^\| ([^|]*\((?:sm|gfx)[^|]*) \|[^|]*\| ([^|]*) \|$", README, re.M)
    assert len(rows) == 8
    for card, done in rows:
        named = re.findall(r"\(((?:sm_|gfx)\w+)\)", card)
        assert named
        assert set(named) <= set(ARCHITECTURES), card
        assert ("run, tested" in done) == card.startswith("H200 (sm_90a)")


def test_the_table_is_the_result_files() -> None:
    rows = _rows()
    measured = {(row["case"], row["backend"]): row["tflops"] for row in rows}
    table = re.findall(
        r"^\| \((\d+), (\d+), (\d+)(?: over (\d+))?\), (\d+), (full|causal) "
        r"\| (\d+) \| (\d+) \| (\d+) \| (\d+) \| ([\d.]+)×",
        SPEED,
        re.M,
    )
    assert len(table) == 7
    for batch, seqlen, heads, kv_heads, head_dim, variant, ours, fa2, cudnn, fa4, ratio in table:
        case = f"D{head_dim} {variant} ({batch},{seqlen},{heads}{f'/{kv_heads}' if kv_heads else ''})"
        figures = [measured[case, backend] for backend in ("tileattn", "fa2", "cudnn", "fa4")]
        assert [round(figure) for figure in figures] == [int(ours), int(fa2), int(cudnn), int(fa4)]
        assert abs(figures[0] / figures[1] - float(ratio)) <= 0.01


def test_the_totals_are_the_result_files() -> None:
    rows = _rows()
    ms: dict[str, dict[str, float]] = {}
    for row in rows:
        ms.setdefault(row["case"], {})[row["backend"]] = row["ms"]

    def speed_against(baseline: str) -> list[float]:
        return [of[baseline] / of["tileattn"] for of in ms.values() if baseline in of]

    def speed_against_best(short: bool) -> list[float]:
        lengths = {row["case"]: row["seqlen_q"] for row in rows}
        chosen = [of for case, of in ms.items() if (lengths[case] < 2048) == short]
        return [min(t for name, t in of.items() if name != "tileattn") / of["tileattn"] for of in chosen]

    fa2, cudnn, fa4 = speed_against("fa2"), speed_against("cudnn"), speed_against("fa4")
    text = " ".join(SPEED.split())
    assert f"all {len(fa2)} rows that FA-2 runs" in text
    # The lowest is cut, not rounded: 1.295 is no 1.30.
    totals = f"{_geometric_mean(fa2):.2f}× (geometric mean), {math.floor(min(fa2) * 100) / 100}× to {max(fa2):.2f}×"
    assert totals in text
    assert f"Over all {len(cudnn)} rows the geometric mean is {_geometric_mean(cudnn):.2f}× against cuDNN" in text
    assert f"{_geometric_mean(fa4):.2f}× against FA-4" in text
    assert (
        f"{_geometric_mean(fa2):.2f} times FlashAttention-2's speed (geometric mean of {len(fa2)} shapes on an H200, "
        f"bfloat16), {_geometric_mean(cudnn):.2f} times cuDNN's and {_geometric_mean(fa4):.2f} times FlashAttention-4's"
    ) in " ".join(README.split())
    short, long = (_geometric_mean(speed_against_best(short)) for short in (True, False))
    assert f"{short:.2f}× below 2048 tokens and {long:.2f}× from there on" in text
    close = sum(ratio > 0.98 for short in (True, False) for ratio in speed_against_best(short))
    assert f"({close} of {len(ms)} rows are ahead, or behind by less than 2 %)" in text


def test_the_speed_of_decoding_is_the_result_file() -> None:
    text, us, rate = " ".join(SPEED.split()), dict[str, dict[str, float]](), dict[str, float]()
    large = {}
    for row in json.loads((ROOT / "benchmarks/results/decode/decode-h200.json").read_text())["rows"]:
        us.setdefault(row["case"], {})[row["backend"]] = row["us"]
        large[row["case"]] = row["kv_bytes"] >= 512e6
        if row["backend"] == "tileattn" and large[row["case"]]:
            rate[row["case"]] = row["gbps"]
    speed = {c: min(of[x] for x in ("fa3", "flashinfer", "xqa") if x in of) / of["tileattn"] for c, of in us.items()}
    below, above = (
        _geometric_mean([x for c, x in speed.items() if large[c] is is_large]) for is_large in (False, True)
    )
    assert f"reads {min(rate.values()) / 1e3:.1f} to {max(rate.values()) / 1e3:.1f} TB/s" in text
    assert f"of {len(speed)} rows it has {below:.2f}× their speed below 512 MB and {above:.2f}× from there on" in text
    assert f"(geometric means; {min(speed.values()):.2f} to {max(speed.values()):.2f}×)" in text
    cudnn = _geometric_mean([of["tileattn"] / of["cudnn"] for of in us.values() if "cudnn" in of])
    assert f"is {cudnn - 1:.1%} faster".replace("%", " %") in text


def test_the_ranges_are_the_result_files() -> None:
    """Ranges for gradients, variants and float32: relative speed, cut to two decimals."""
    text = " ".join((SPEED + ATTENTION).split())
    flex = [_speeds(f"variants/{name}-h200.json", ["flex"]) for name in ("variants", "variants-bwd")]
    assert [_cut(min(speeds)) for speeds in flex] == ["1.26", "1.26"]
    assert [f"{max(speeds):.1f}" for speeds in flex] == ["3.5", "2.9"]
    assert "at 1.26 to 3.5 times FlexAttention's speed forward, and at 1.26 to 2.9 times backward" in text
    fa2 = _speeds("backward/fa-bwd-h200.json", ["fa2"])
    assert f"plain attention is at {_cut(min(fa2))} to {_cut(max(fa2))} times FA-2" in text
    best = _speeds("backward/fa-bwd-h200.json", ["fa2", "cudnn", "fa4"])
    assert f"{_geometric_mean(best):.2f} times the best of the three in each row" in text
    assert f"(geometric means of {len(best)} rows; {min(best):.2f} to {max(best):.2f})" in text
    fp32 = {
        (way, dim): _speeds(f"triton/{way}-d{dim}-causal-fp32-h200.json", ["efficient"])
        for way in ("fwd", "bwd")
        for dim in (64, 128)
    }
    forward = fp32["fwd", 64] + fp32["fwd", 128]
    ranges = [f"{_cut(min(each))} to {_cut(max(each))}" for each in (forward, fp32["bwd", 64], fp32["bwd", 128])]
    assert (
        f"forward at {ranges[0]} times PyTorch's efficient kernel, gradients at {ranges[1]} and {ranges[2]} times"
        in text
    )


def _speeds(name: str, baselines: list[str]) -> list[float]:
    """tileattn's speed beside the fastest of these, in each row that one of them runs."""
    ms: dict[str, dict[str, float]] = {}
    for row in json.loads((ROOT / "benchmarks/results" / name).read_text())["rows"]:
        ms.setdefault(row["case"], {})[row["backend"]] = row["ms"]
    beside = [([of[baseline] for baseline in baselines if baseline in of], of["tileattn"]) for of in ms.values()]
    return [min(theirs) / ours for theirs, ours in beside if theirs]


def _cut(ratio: float) -> str:
    return f"{math.floor(ratio * 100) / 100:.2f}"


def _rows() -> list[dict[str, Any]]:
    """The rows of the result file that docs/speed.md names."""
    name = re.search(r"\(\.\./(benchmarks/results/[^)]*\.json)\)", SPEED)
    assert name is not None
    rows: list[dict[str, Any]] = json.loads((ROOT / name[1]).read_text())["rows"]
    return rows


def _geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))
