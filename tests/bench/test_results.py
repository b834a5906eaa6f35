"""Result files with wrong values, and with names that pictures must draw as they are."""

from __future__ import annotations

import colorsys
import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.tools.made_up import made_up
from tileattn.bench import plot, plot_memory, results
from tileattn.bench.baselines.base import OWN
from tileattn.bench.ladder import plot as plot_ladder
from tileattn.bench.results import Results
from tileattn.cli.app import app
from tileattn.cli.choices import LADDER, MEMORY
from tileattn.measure import ceilings
from tileattn.viz import draw_dashboard, draw_lengths


def measured() -> Results:
    made = made_up("fa", "cuda", OWN, "fa2")
    # One shape by length, as `tileattn memory` measures it too.
    shown = [row for row in made.rows if (row.head_dim, row.variant, row.heads) == (128, "full", 16)]
    # The same whenever it is made.
    made.date, made.rows = "2026-11-22", [replace(row, date="2026-11-22") for row in shown]
    made.ceilings = [ceilings.Ceiling("before", 767.0, 4.29)]
    return made


def written(path: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """A file that was changed by hand."""
    results.save(measured(), path)
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    return path


def in_row(**fields: Any) -> Callable[[dict[str, Any]], object]:
    return lambda content: content["rows"][0].update(fields)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (in_row(ms=1e300), r"rows\[0\] has 'ms' = 1e\+300, which is no time; accepted: 1e-06 to 1e\+09"),
        (in_row(ms=1e-300), r"rows\[0\] has 'ms' = 1e-300, which is no time; accepted: 1e-06 to 1e\+09"),
        (in_row(ms=10**400), r"rows\[0\] has 'ms' = 10+\.\.\.0+, which is no time"),
        (in_row(tflops=-1.0), r"rows\[0\] has 'tflops' = -1.0, which is no speed; accepted: 0 to 1e\+09"),
        (in_row(tflops=math.nan), r"rows\[0\] has 'tflops' = nan, which is no speed"),
        (in_row(peak_bytes=-5), r"rows\[0\] has 'peak_bytes' = -5, which is no number of bytes"),
        (in_row(peak_bytes=10**30), r"rows\[0\] has 'peak_bytes' = 10+, which is no number of bytes"),
        (in_row(seqlen_q=0), r"rows\[0\] has 'seqlen_q' = 0, which is no size"),
        (in_row(error=-1.0), r"rows\[0\] has 'error' = -1.0, which is neither 0 nor an error"),
        (in_row(error=1e-300), r"rows\[0\] has 'error' = 1e-300, which is neither 0 nor an error"),
        (in_row(error=10**400), r"rows\[0\] has 'error' = 10+\.\.\.0+, which is neither"),
        (
            lambda content: content["ceilings"][0].update(matmul_tflops=0),
            r"ceilings\[0\] has 'matmul_tflops' = 0, which is no speed; accepted: 1e-06 to 1e\+09",
        ),
        (
            lambda content: content["ceilings"][0].update(copy_tbps=math.inf),
            r"ceilings\[0\] has 'copy_tbps' = inf, which is no speed",
        ),
    ],
)
def test_a_value_that_cannot_be_right_is_one_error(
    change: Callable[[dict[str, Any]], object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        results.load(written(tmp_path / "r.json", change))


@pytest.mark.parametrize("error", [math.inf, math.nan])
@pytest.mark.parametrize("command", ["plot", "viz dashboard", "viz lengths"])
def test_a_row_whose_error_is_not_finite_is_left_out_and_said(error: float, command: str, tmp_path: Path) -> None:
    path = written(tmp_path / "r.json", in_row(error=error))
    before, first = path.read_bytes(), measured().rows[0]
    said = f"left out is what has no finite error: {first.backend} in {first.case}"
    with pytest.warns(UserWarning, match=re.escape(said)):
        loaded = results.load(path)
    assert loaded.rows == measured().rows[1:]
    assert loaded.failed == [*measured().failed, results.Missing(first.case, first.backend, f"its error is {error}")]
    with pytest.warns(UserWarning, match=re.escape(said)):
        outcome = CliRunner().invoke(app, [*command.split(), str(path), "-o", str(tmp_path / "p.png")])
    assert outcome.exit_code == 0, outcome.output
    assert path.read_bytes() == before


RARE = ({"error": 0.0}, {"peak_bytes": 0}, {"tflops": 0.0}, {"error": 1e60})


@pytest.mark.parametrize("command", ["plot", "viz dashboard", "viz lengths"])
def test_values_that_are_rare_are_drawn(command: str, tmp_path: Path) -> None:
    """Each in a row of its own, for a picture takes a third of a second."""

    def change(content: dict[str, Any]) -> None:
        for row, fields in zip(content["rows"], RARE, strict=False):
            row.update(fields)

    path = written(tmp_path / "r.json", change)
    assert len(json.loads(path.read_text())["rows"]) >= len(RARE)
    outcome = CliRunner().invoke(app, [*command.split(), str(path), "-o", str(tmp_path / "p.png")])
    assert outcome.exit_code == 0, outcome.output


@pytest.mark.slow_cases("fa-save", "fa-<lambda>0", reason="draws a large picture, 0.5 s each")
@pytest.mark.parametrize(
    ("suite", "save"),
    [
        ("fa", plot.save),
        (MEMORY, plot_memory.save),
        (LADDER, plot_ladder.save),
        ("fa", lambda run, path: draw_dashboard(run).savefig(path)),
        ("fa", lambda run, path: draw_lengths(run).savefig(path)),
    ],
)
def test_names_are_drawn_as_they_are(suite: str, save: Callable[[Results, Path], None], tmp_path: Path) -> None:
    """Names are not parsed as mathematics; matplotlib would raise on malformed formulas."""
    hostile = r"$\foo$ $\frac{$"
    hostile_run = measured()
    hostile_run.gpu, hostile_run.versions, hostile_run.date = hostile, {"torch": hostile}, hostile
    hostile_run.rows = [
        replace(row, suite=suite, case=f"{row.case} {hostile}", backend=row.backend.replace("fa2", hostile))
        for row in hostile_run.rows
    ]
    save(hostile_run, tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size > 10_000


def test_a_step_of_the_ladder_with_unknown_options_keeps_its_name() -> None:
    names = ["shared_kv,tiles=64x64", "shared_kv,async"]
    renamed = measured()
    renamed.rows = [replace(row, backend=f"mma:{name}") for row, name in zip(renamed.rows, names)]
    assert [step.label for step in plot_ladder.steps_of(renamed)] == names


def test_bars_that_stand_beside_each_other_have_hues_of_their_own() -> None:
    """The four of the files of Triton's kernels."""
    hues = []
    for name in (OWN, "fa2", "triton", "triton-tutorial"):
        red, green, blue = (int(plot.COLOURS[name][i : i + 2], 16) / 255 for i in (1, 3, 5))
        hues.append(colorsys.rgb_to_hls(red, green, blue)[0])
    apart = [abs(a - b) for i, a in enumerate(hues) for b in hues[:i]]
    assert min(min(each, 1 - each) for each in apart) > 0.05
