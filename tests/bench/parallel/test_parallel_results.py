"""The result file, the tables and the picture of the suite parallel, from invented results."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from tests.bench.parallel.made_up import made_up
from tileattn.bench.parallel import plot, report
from tileattn.bench.parallel.check import verdict
from tileattn.bench.parallel.results import Missing, load, resume, save
from tileattn.cli.app import app

WINDOW = "128k 32/8 window 1024"


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    save(made_up(), tmp_path / "r.json")
    assert load(tmp_path / "r.json") == made_up()


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ('"ms": 7.0', '"ms": 0', "rows[0] has ms, tflops or peak_bytes that is not above 0"),
        ('"ms"', '"msec"', "rows[0] lacks 'ms'"),
        ('"failed": false', '"failed": 0', "missing[0] has 'failed' = 0"),
        ("parallel-1", "parallel-9", "it has format 'parallel-9'"),
    ],
)
def test_a_file_that_is_none_is_one_error(old: str, new: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    save(made_up(), path)
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(ValueError, match=re.escape(text)):
        load(path)


def test_what_was_measured_says_how_near_the_ideal_is() -> None:
    measured = made_up()
    own = measured.row("32k 32/8 causal", "tileattn", "fwd")
    best = measured.best_of_pytorch("32k 32/8 causal", "fwd")
    assert own is not None
    assert best is not None
    assert measured.of_ideal(own) == pytest.approx(7.0 / 7.2)
    assert best.backend == "cudnn-alltoall"
    assert measured.best_of_pytorch("1M 32/8 causal", "fwdbwd") is None
    assert [(row.case, row.backend) for row in measured.suspicious()] == [(WINDOW, "tileattn")]


def test_failures_of_tileattn_fail_the_run() -> None:
    measured = made_up()
    measured.rows = [row for row in measured.rows if not row.wrong]
    assert not measured.failed()
    measured.rows[1] = replace(measured.rows[1], wrong="o")
    assert measured.failed()
    assert replace(measured, rows=measured.rows[:1]).failed()
    missing = [Missing("a", "tileattn-ring", "fwd", "rank 0: OSError", True)]
    assert replace(measured, rows=measured.rows[2:], missing=missing).failed()


def test_the_tables_flag_what_is_wrong() -> None:
    console = Console(width=250, record=True, file=io.StringIO())
    console.print(report.render(made_up()))
    lines = console.export_text().splitlines()
    (fast,) = [line for line in lines if "measurement wrong: over 101% of the ideal" in line]
    assert "tileattn " in fast
    assert "103.4%" in fast
    (differs,) = [line for line in lines if "more than two roundings from one device: o" in line]
    assert "tileattn-ring" in differs
    assert any("plan.attention, check='always'" in line and "350" in line for line in lines)
    assert "failed: fa2-allgather: rank 1: OutOfMemoryError: too much [32k 32/8 causal]" in lines
    assert f"refused: cudnn-alltoall: it takes no mask [{WINDOW}]" in lines


def test_a_run_goes_on_after_the_case_that_ended_it(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    measured = made_up()
    save(replace(measured, begun=[*measured.begun, "256k"]), path)
    there = resume(path, replace(measured, commands=["again"]))
    assert there.commands == ["tileattn bench", "again"]
    assert there.done[-1] == "256k"
    assert there.missing[-1] == Missing("256k", "all", "", "the process ended in this case", True)
    with pytest.raises(ValueError, match="has ranks 2, and this run has 4"):
        resume(path, replace(measured, ranks=4))


def test_the_picture_has_a_bar_for_each_case_beside_the_ideal(tmp_path: Path) -> None:
    figure = plot.draw(made_up())
    forward, both = figure.axes
    widths = [round(bar.get_width(), 1) for bar in forward.patches]
    assert widths == [97.2, 103.4, 84.3, 60.0]
    assert [round(bar.get_width(), 1) for bar in both.patches] == [96.2, 87.7]
    assert [label.get_text() for label in forward.get_yticklabels()] == ["32k 32/8 causal", WINDOW]
    save(made_up(), tmp_path / "r.json")
    ran = CliRunner().invoke(app, ["plot", str(tmp_path / "r.json"), "-o", str(tmp_path / "p.svg")])
    assert ran.exit_code == 0, ran.output
    assert "of the ideal" in (tmp_path / "p.svg").read_text()


def test_no_picture_without_the_ideal() -> None:
    measured = made_up()
    measured.rows = [row for row in measured.rows if row.case.startswith("1M")]
    with pytest.raises(ValueError, match="no case has the ideal"):
        plot.draw(measured)


def test_values_may_differ_by_a_rounding() -> None:
    x = torch.randn(5, 2, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert verdict({"o": x}, {"o": x}).errors == {"o": 0.0}
    assert verdict({"o": (x * 1.005).bfloat16(), "dq": x}, {"o": x}).wrong == ""
    assert verdict({"o": (x * 1.05).bfloat16()}, {"o": x}).wrong == "o"
    assert verdict({"o": torch.full_like(x, torch.nan)}, {"o": x}).wrong == "o"


def test_the_file_is_json_for_others(tmp_path: Path) -> None:
    save(made_up(), tmp_path / "r.json")
    content = json.loads((tmp_path / "r.json").read_text())
    assert content["format"] == "parallel-1"
    assert content["rows"][1]["backend"] == "tileattn"
