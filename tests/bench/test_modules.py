"""`tileattn bench --suite modules`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tileattn.bench.modules import run
from tileattn.bench.modules.results import Missing, Results, Row, Shape, load, save
from tileattn.cli import module_bench
from tileattn.cli.app import app
from tileattn.measure import timing
from tileattn.measure.timing import Effort

OPTIONS = ["bench", "--suite", "modules", "--device", "cpu"]
TINY = [*OPTIONS, "--seqlen", "16,256", "--heads", "4", "--head-dim", "8", "--rounds", "1"]


def test_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = ("naive", "flash_v2", "gqa")
    monkeypatch.setattr(run, "MODULES", modules)
    monkeypatch.setattr(module_bench, "find_spec", lambda name: None)  # as without matplotlib
    monkeypatch.setattr(timing, "DEFAULT", Effort(0, 0, 1))
    monkeypatch.setenv("COLUMNS", "140")
    measured = tmp_path / "out.json"
    ran = CliRunner().invoke(app, [*TINY, "--json", str(measured)])
    assert ran.exit_code == 0, ran.output
    content = json.loads(measured.read_text())
    rows = {(row["module"], row["seqlen"]): row for row in content["rows"]}
    assert set(rows) == {(module, seqlen) for module in modules for seqlen in (16, 256)}
    assert content["shape"]["kv_heads"] == 1
    assert all(0 < row["error"] < 1e-5 and row["ms"] > 0 for row in rows.values())
    grown = {module: rows[module, 256]["peak_bytes"] / rows[module, 16]["peak_bytes"] for module in modules}
    assert grown["naive"] > 2 * max(growth for module, growth in grown.items() if module != "naive")
    assert "speed vs naive" in ran.output
    assert "no picture: plots need matplotlib" in ran.output


def test_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "MODULES", ("naive", "flash_v2", "gqa"))
    kept = []
    for direction in ("fwd", "fwdbwd"):
        results = Results("cpu", {}, None, "", "", Shape(1, 4, 1, 8, "fp32", direction))
        run.measure(results, 128, torch.device("cpu"), Effort(0, 0, 1), lambda text: None)
        kept.append([row.peak_bytes for row in results.rows])
    assert all(both > forward for forward, both in zip(*kept))


def test_factors_are_against_naive() -> None:
    shape = Shape(1, 4, 1, 8, "fp32", "fwd")
    results = Results("cpu", {}, None, "", "", shape, [Row("naive", 8, 6.0, 600, 0.0), Row("gqa", 8, 2.0, 100, 0.0)])
    assert (results.faster(results.rows[1]), results.smaller(results.rows[1])) == (3, 6)
    lonely = Row("gqa", 16, 2.0, 100, 0.0)
    assert (results.faster(lonely), results.smaller(lonely)) == (None, None)


def test_a_module_out_of_memory_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(*arguments: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nmore")

    monkeypatch.setattr("tileattn.nn.NaiveAttention.attend", attend)
    monkeypatch.setattr(run, "MODULES", ("naive",))
    results = Results("cpu", {}, None, "", "", Shape(1, 4, 1, 8, "fp32", "fwd"))
    run.measure(results, 8, torch.device("cpu"), Effort(0, 0, 1), lambda text: None)
    assert results.rows == []
    assert results.missing == [Missing("naive", 8, "OutOfMemoryError: CUDA out of memory.")]


def test_the_picture_of_a_file_is_drawn_again(tmp_path: Path) -> None:
    shape = Shape(1, 4, 1, 8, "fp32", "fwd")
    results = Results("cpu", {}, None, "", "", shape, [Row("naive", 8, 6.0, 600, 0.0)], [Missing("gqa", 8, "none")])
    path = tmp_path / "r.json"
    save(results, path)
    assert load(path) == results
    ran = CliRunner().invoke(app, ["plot", str(path), "-o", str(tmp_path / "p.svg")])
    assert ran.exit_code == 0, ran.output
    assert "milliseconds of a call" in (tmp_path / "p.svg").read_text()


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ('"ms": 6.0', '"ms": 0', "ms, peak_bytes or seqlen that is not above 0"),
        ('"ms"', '"msec"', "rows[0] lacks 'ms'"),
        ('"shape": {', '"shape": 1, "more": {', "shape is 1, not an object"),
        ("modules-1", "modules-9", "it has format 'modules-9'"),
    ],
)
def test_a_file_that_cannot_be_drawn_is_one_error(old: str, new: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    save(Results("", {}, None, "", "", Shape(1, 4, 1, 8, "fp32", "fwd"), [Row("naive", 8, 6.0, 600, 0.0)]), path)
    path.write_text(path.read_text().replace(old, new))
    ran = CliRunner().invoke(app, ["plot", str(path), "-o", str(tmp_path / "p.svg")], env={"COLUMNS": "500"})
    assert ran.exit_code == 2
    assert text in ran.output


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--causal"], "the suite modules does not have it"),
        (["--dtype", "fp8"], "'fp8' is not measured in this suite"),
        (["--direction", "bwd"], "'bwd' is not measured in this suite; accepted: fwd, fwdbwd"),
        (["--kv-heads", "3", "--heads", "4"], "3 does not divide the 4 heads of q"),
        (["--seqlen", "0"], "'0' is not understood"),
    ],
)
def test_errors(options: list[str], text: str) -> None:
    ran = CliRunner().invoke(app, [*OPTIONS, *options], env={"COLUMNS": "200"})
    assert ran.exit_code == 2
    assert text in ran.output
