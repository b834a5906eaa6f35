"""`benchmarks/published_rows.py`: its commands are ones that `tileattn` takes, for files that do not exist yet."""

from __future__ import annotations

import importlib.util
import shlex
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tests.tools import ROOT
from tileattn.bench.baselines import BASELINES
from tileattn.cli.app import app

spec = importlib.util.spec_from_file_location("published_rows", ROOT / "benchmarks" / "published_rows.py")
assert spec is not None
assert spec.loader is not None
published_rows = importlib.util.module_from_spec(spec)
sys.modules["published_rows"] = published_rows
spec.loader.exec_module(published_rows)


@pytest.mark.parametrize("row", published_rows.ROWS, ids=lambda row: row.file)
def test_a_command_is_taken_as_far_as_the_gpu(
    row: published_rows.Entry, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    needs: dict[str, tuple[list[str], str]] = {
        "ladder": ([], "need an NVIDIA GPU"),
        "tilelang": (["--device", "cuda"], "is not a device here"),
    }
    gpu, says = needs[row.work]
    done = CliRunner().invoke(app, [*shlex.split(row.command), *gpu])
    assert done.exit_code == 2
    assert says in " ".join(done.output.split()), done.output


def test_its_baselines_are_known() -> None:
    words = shlex.split(published_rows.TILELANG)
    assert set(words[words.index("--baselines") + 1].split(",")) <= BASELINES.keys()


def test_the_list_names_commands_and_files() -> None:
    done = CliRunner().invoke(published_rows.app, ["ladder", "--list", "--folder", "new"])
    assert done.exit_code == 0
    assert done.output.splitlines() == [
        "tileattn ladder --B 1 --H 8 --N 8192 --D 32 --iters 10 --json new/ladder/d32-h200.json",
        "tileattn ladder --B 2 --H 2 --N 4096 --D 64 --iters 10 --json new/ladder/d64-b2-h200.json",
    ]
    done = CliRunner().invoke(published_rows.app, ["flash", "--list"])
    assert done.exit_code == 2
    assert "'flash' is not known; accepted: tilelang, ladder" in done.output


def test_a_failure_is_said_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[list[str]] = []

    def run(line: list[str], check: bool) -> object:
        lines.append(line)
        return type("Done", (), {"returncode": int("32" in line)})

    monkeypatch.setattr(published_rows.subprocess, "run", run)
    done = CliRunner().invoke(published_rows.app, ["ladder"])
    assert (done.exit_code, len(lines)) == (1, 2)
    assert "failed: rows/ladder/d32-h200.json" in done.output
