"""`benchmarks/small_calls.py` on a CPU: all calls run, and a file says what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
import typer
from typer.testing import CliRunner, Result

from tests.tools import ROOT


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    import small_calls  # type: ignore[import-not-found]

    return small_calls  # type: ignore[no-any-return]


def run(module: ModuleType, *arguments: str) -> Result:
    app = typer.Typer()
    app.command()(module.main)
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200", "TERM": "dumb"})


def test_every_call_has_its_times(script: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "small.json"
    result = run(script, "--seqlens", "33", "--rounds", "2", "--calls", "1", "--json", str(path), "--commit", "abc")
    assert result.exit_code == 0, result.output
    found = json.loads(path.read_text())
    assert found["commit"] == "abc"
    rows = found["rows"]
    names = {(row["work"], row["variant"], row["implementation"]) for row in rows}
    assert len(names) == len(rows) == 2 * 2 + 4 + 2 * 2
    assert ("forward + backward", "causal", "sdpa") in names
    assert all(0 < row["host"] <= row["done"] and row["graph"] is None for row in rows)


def test_implementations_compute_the_same(script: ModuleType) -> None:
    settings = script.Settings("cpu", "float32")
    for runs in (dict(script.forward_calls(settings)), dict(script.both_calls(settings, 40))):
        for variant in ("full", "causal"):
            ours, theirs = (runs[variant][name]() for name in ("tileattn", "sdpa"))
            pairs = zip(ours, theirs) if isinstance(ours, tuple) else [(ours, theirs)]
            for mine, its in pairs:
                torch.testing.assert_close(mine, its.transpose(1, 2))


@pytest.mark.parametrize("given", ["0", "512,x", ""])
def test_a_wrong_length_is_refused(script: ModuleType, given: str) -> None:
    result = run(script, "--seqlens", given)
    assert result.exit_code == 2
    assert "is no length; accepted: positive integers with commas" in result.output
