"""The README's example runs, and its figures are those of the result file that it names."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import torch

from tests.tools import ROOT

README = (ROOT / "README.md").read_text()


def test_the_example_runs() -> None:
    code = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert code is not None
    scope: dict[str, object] = {}
    exec(code[1], scope)
    assert isinstance(scope["o"], torch.Tensor)
    assert scope["o"].isfinite().all()


def test_the_table_is_the_result_files() -> None:
    rows = _rows()
    measured = {(row["case"], row["backend"]): row["tflops"] for row in rows}
    table = re.findall(
        r"^\| \((\d+), (\d+), (\d+)(?: over (\d+))?\), (\d+), (full|causal) "
        r"\| (\d+) \| (\d+) \| (\d+) \| (\d+) \| ([\d.]+)×",
        README,
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

    def speed_against(peer: str) -> list[float]:
        return [of[peer] / of["tileattn"] for of in ms.values() if peer in of]

    def speed_against_best(short: bool) -> list[float]:
        lengths = {row["case"]: row["seqlen_q"] for row in rows}
        chosen = [of for case, of in ms.items() if (lengths[case] < 2048) == short]
        return [min(t for name, t in of.items() if name != "tileattn") / of["tileattn"] for of in chosen]

    fa2, cudnn, fa4 = speed_against("fa2"), speed_against("cudnn"), speed_against("fa4")
    text = " ".join(README.split())
    assert f"all {len(fa2)} rows that FA-2 runs" in text
    # The lowest is cut, not rounded: 1.295 is no 1.30.
    totals = f"{_geometric_mean(fa2):.2f}× (geometric mean), {math.floor(min(fa2) * 100) / 100}× to {max(fa2):.2f}×"
    assert totals in text
    assert f"Over all {len(cudnn)} rows the geometric mean is {_geometric_mean(cudnn):.2f}× against cuDNN" in text
    assert f"{_geometric_mean(fa4):.2f}× against FA-4" in text
    short, long = (_geometric_mean(speed_against_best(short)) for short in (True, False))
    assert f"{short:.2f}× below 2048 tokens and {long:.2f}× from there on" in text
    close = sum(ratio > 0.98 for short in (True, False) for ratio in speed_against_best(short))
    assert f"({close} of {len(ms)} rows are ahead, or behind by less than 2 %)" in text


def _rows() -> list[dict[str, Any]]:
    """Of the result file that the README names."""
    name = re.search(r"\((benchmarks/results/[^)]*\.json)\)", README)
    assert name is not None
    rows: list[dict[str, Any]] = json.loads((ROOT / name[1]).read_text())["rows"]
    return rows


def _geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))
