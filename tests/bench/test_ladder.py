"""`tileattn ladder` without a GPU: its steps, gains, table, picture and errors; and the page that shows them."""

from __future__ import annotations

import importlib.util
import io
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from tests.tools import ROOT
from tileattn.bench import results
from tileattn.bench.cases import square
from tileattn.bench.ladder.climb import Step, climbed, steps
from tileattn.bench.ladder.plot import steps_of
from tileattn.bench.results import Results, Row
from tileattn.cli import ladder
from tileattn.cli.app import app
from tileattn.kernels.mma.backend import parse
from tileattn.kernels.mma.rungs import HEAD_DIMS, LARGE_HEAD_DIMS, RUNGS
from tileattn.kernels.mma.tiles import candidates

spec = importlib.util.spec_from_file_location("make_ladder", ROOT / "benchmarks" / "make_ladder.py")
assert spec is not None
assert spec.loader is not None
make_ladder = importlib.util.module_from_spec(spec)
sys.modules["make_ladder"] = make_ladder
spec.loader.exec_module(make_ladder)


def measured(speeds: dict[str, float]) -> Results:
    """A result file with these TFLOPS by backend."""
    case = square(1, 8192, 8, 64, "full", "fp16")
    made = results.begin(torch.device("cpu"), None, "tileattn ladder")
    for backend, tflops in speeds.items():
        row = Row(
            "ladder", case.name, "fwd", backend, 1, 8192, 8192, 8, 8, 64, 64, False, "full", "fp16",
            ms=case.flops() / tflops / 1e9, tflops=tflops, error=1e-3, peak_bytes=0, gpu="GPU", versions={},
            commit=None, date="2026-11-21",
        )  # fmt: skip
        made.rows.append(row)
    return replace(made, gpu="GPU", date="2026-11-21")


def measured_at_once(ladder: Sequence[Step]) -> Results:
    """A result file in which all steps are equally fast."""
    return measured({step.backend: 1.0 for step in ladder})


LADDER = steps(64, "fp16", all_tiles=False)


@pytest.fixture
def climb() -> Results:
    """Every step is 10 TFLOPS faster than the one before, but the third, which is slower than the second."""
    speeds = {step.backend: 100.0 + 10 * i for i, step in enumerate(LADDER)}
    speeds[LADDER[2].backend] = 105.0
    return measured(speeds | {"fa2": 200.0, "tilelang": 400.0})


@pytest.mark.parametrize("head_dim", HEAD_DIMS + LARGE_HEAD_DIMS)
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("all_tiles", [False, True])
def test_steps_are_backends_that_exist(head_dim: int, dtype: str, all_tiles: bool) -> None:
    all_steps = steps(head_dim, dtype, all_tiles)
    assert len({step.backend for step in all_steps}) == len({step.label for step in all_steps}) == len(all_steps) > 0
    for step in all_steps:
        choice = parse(step.backend.removeprefix("mma:"))
        tiles = candidates(choice.options(head_dim), head_dim)
        assert tiles if choice.tiles is None else choice.tiles in tiles
        assert choice.acc == "fp32" or dtype == "fp16"


def test_the_ladder_has_every_option_of_every_rung() -> None:
    assert len(LADDER) == 5 * 2 * 2 * 2
    rungs = ["split_kv", "split_q", "shared_kv", "shared_qkv", "pipelined"]
    assert [step.label.split()[0] for step in LADDER[:20:4]] == rungs
    assert len(steps(512, "bf16", all_tiles=False)) == 4


def test_gains_are_over_the_best_so_far_with_the_same_accumulation(climb: Results) -> None:
    gained = climbed(climb, LADDER)
    assert [each.gain for each in gained[:4]] == [None, pytest.approx(0.1), None, pytest.approx(130 / 110 - 1)]
    first_fp16 = next(i for i, step in enumerate(LADDER) if "acc=fp16" in step.backend)
    assert gained[first_fp16].gain is None
    assert gained[first_fp16 + 1].gain is not None


def test_a_step_that_failed_is_left_out(climb: Results) -> None:
    climb.rows = [row for row in climb.rows if row.backend != LADDER[0].backend]
    assert [each.label for each in climbed(climb, LADDER)] == [step.label for step in LADDER[1:]]


def test_the_table_has_values_times_and_gains(climb: Results) -> None:
    console = Console(width=140, file=io.StringIO())
    climb.first_values = {LADDER[0].backend: [0.5, -0.25, 0.125]}
    console.print(ladder.render(climb, LADDER))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "+0.500000 -0.250000 +0.125000" in text
    assert "+10.0%" in text
    assert re.search(r"fa2 .* 200\.0 .* 1\.00", text)
    assert re.search(r"tilelang .* 400\.0 .* 2\.00", text)
    assert all(step.label in text for step in LADDER)


def test_the_picture_has_a_line_for_each_option_and_others_beside(climb: Results, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from tileattn.bench.ladder import plot as plot_ladder

    options = ["1 stage, padded", "1 stage, swizzle", "2 stages, padded", "2 stages, swizzle"]
    figure = plot_ladder.draw(climb)
    for axes, acc in zip(figure.axes, ("fp32", "fp16")):
        lines = {line.get_label(): list(line.get_ydata()) for line in axes.lines}
        assert list(lines)[2:] == options
        measured = [row.tflops for row in climb.rows if f"stages=1,acc={acc},smem=padded" in row.backend]
        assert lines["1 stage, padded"] == measured
        assert [label.get_text() for label in axes.get_xticklabels()] == [*RUNGS[:-1]]
    # One rung alone, or tile sizes: bars.
    for steps_of_bars in (steps(512, "bf16", all_tiles=False), steps(64, "bf16", all_tiles=True)):
        (axes,) = plot_ladder.draw(measured_at_once(steps_of_bars)).axes
        assert (len(axes.patches), len(axes.lines)) == (len(steps_of_bars), 0)
    plot_ladder.save(climb, tmp_path / "climb.png")
    assert (tmp_path / "climb.png").stat().st_size > 10_000


def test_labels_can_be_read_back_from_a_file(climb: Results) -> None:
    assert steps_of(climb) == LADDER
    tiles = steps(512, "bf16", all_tiles=True)
    assert steps_of(measured({step.backend: 1.0 for step in tiles})) == tiles


# --- The command ---


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--D 48", "48 is no head dim of the ladder; accepted: 32, 64"),
        ("--dtype fp32", "'fp32' is not known; accepted: fp16, bf16"),
        ("--N 0", "0 is too few"),
        ("--iters 0", "Invalid value for --iters: 0 is too few"),
        ("--plot climb.bmp", "Invalid value for --plot: climb.bmp has the suffix '.bmp'"),
        ("", "need an NVIDIA GPU"),
    ],
)
def test_a_bad_call_is_one_error(arguments: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = CliRunner().invoke(app, ["ladder", *shlex.split(arguments)])
    assert done.exit_code == 2
    assert says in " ".join(re.sub(r"[│╭╮╰╯─]", " ", done.output).split())


@pytest.fixture
def measuring(climb: Results, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """As on a GPU, in an empty folder, but that nothing is compiled and measured; what was asked to be."""
    asked: list[str] = []

    def measure(measured: Results, *_: object) -> None:
        asked.append("measure")
        measured.rows += climb.rows

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ladder, "_gpu", lambda: torch.device("cpu"))
    monkeypatch.setattr(ladder, "_compile", lambda *_: None)
    # In place of the outputs, something that only the seed decides.
    monkeypatch.setattr(ladder, "_first_values", lambda _, given: {"fa2": [float(given.q.flatten()[0])]})
    monkeypatch.setattr(ladder, "_measure", measure)
    return asked


def test_files_are_made_ahead_and_overwritten_only_if_asked(measuring: list[str]) -> None:
    line = ["ladder", "--N", "64", "--json", "new/climb.json", "--plot", "pictures/climb.png"]
    done = CliRunner().invoke(app, line)
    assert done.exit_code == 0, done.output
    assert len(results.load(Path("new/climb.json")).rows) == len(LADDER) + 2
    assert Path("pictures/climb.png").stat().st_size > 10_000
    for options in (line[:5], [*line[:3], *line[5:]]):
        done = CliRunner().invoke(app, options)
        assert done.exit_code == 2
        assert "exists; give another name" in " ".join(re.sub(r"[│╭╮╰╯─]", " ", done.output).split())
    assert measuring == ["measure"]
    assert CliRunner().invoke(app, [*line, "--force"]).exit_code == 0


def test_the_seed_decides_the_values_and_both_are_kept(measuring: list[str]) -> None:
    values = []
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        line = ["ladder", "--N", "64", "--D", "32", "--json", f"{name}.json", "--seed", str(seed)]
        done = CliRunner().invoke(app, line)
        assert done.exit_code == 0, done.output
        assert f"B=1, H=8, N=64, D=32, full, fp16, seed: {seed}, 3 rounds of 10 calls" in done.output
        kept = results.load(Path(f"{name}.json"))
        assert (kept.seed, kept.command) == (
            seed, f"tileattn ladder --B 1 --H 8 --N 64 --D 32 --iters 10 --seed {seed}"
        )  # fmt: skip
        values.append(kept.first_values["fa2"])
    assert values[0] == values[1] != values[2]


@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_files_that_cannot_be_made_are_said_ahead(option: str, measuring: list[str]) -> None:
    Path("file").write_text("")
    done = CliRunner().invoke(app, ["ladder", option, "file/climb.png"])
    assert done.exit_code == 2
    assert "file is no folder" in done.output
    assert not measuring


def test_without_a_measurement_there_is_no_picture(measuring: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladder, "_measure", lambda *_: None)
    done = CliRunner().invoke(app, ["ladder", "--N", "64", "--json", "climb.json", "--plot", "climb.png"])
    assert done.exit_code == 1
    assert "no picture: nothing was measured" in done.output
    assert [path.name for path in Path().iterdir()] == ["climb.json"]
    done = CliRunner().invoke(app, ["plot", "climb.json"])
    assert done.exit_code == 2
    assert "has no measurements to draw" in done.output


# --- The page ---


def test_the_committed_page_is_what_the_script_makes() -> None:
    committed = make_ladder.PAGE.read_text()
    assert committed == make_ladder.filled(committed, make_ladder.load(make_ladder.SOURCES)), "run make_ladder.py"


def test_links_of_the_page_are_there() -> None:
    prose = re.sub(r"```.*?```", "", make_ladder.PAGE.read_text(), flags=re.DOTALL)
    targets = re.findall(r"\]\((?!http)([^)#]+)\)", prose)
    assert targets
    for target in targets:
        assert (ROOT / "docs" / target).exists(), target


def test_code_is_included_as_it_is() -> None:
    assert "statistics.max(best, warp, 0);" in make_ladder.code("split_kv.cu", "tile")
    with pytest.raises(ValueError, match=re.escape("split_q.cu has no part // [nothing]")):
        make_ladder.code("split_q.cu", "nothing")


def test_measured_gains_become_a_table(climb: Results) -> None:
    text = make_ladder.filled("<!-- gains -->\nold\n<!-- end -->\n", {"ladder-d64.json": climb})
    assert "old" not in text
    assert "| split_kv stages=2 padded acc=fp32 |" in text
    assert "+10.0% | 0.55× |" in text
    assert "fa2 200 TFLOPS, tilelang 400 TFLOPS." in text
