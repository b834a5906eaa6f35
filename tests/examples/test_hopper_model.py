"""The model of the Hopper kernel's barriers computes attention, and shows a wrong barrier."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest

from tests.tools import ROOT


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import hopper_model  # type: ignore[import-not-found]

    return hopper_model


@pytest.mark.parametrize("order", ["simple", "overlapped"])
@pytest.mark.parametrize(("stages", "tiles", "consumers"), [(1, 1, 2), (1, 5, 3), (2, 5, 2), (3, 8, 1)])
def test_it_computes_attention(model: Any, order: str, stages: int, tiles: int, consumers: int) -> None:
    machine, error = model.attention(order, stages, tiles, consumers)
    assert error < 1e-12  # float64
    products = [label for unit, label, *_ in machine.log if unit == "tensor cores"]
    assert len(products) == 2 * tiles * consumers


def test_one_consumer_gains_by_overlapping(model: Any) -> None:
    simple, overlapped = (model.attention(order, 2, 8, 1)[0].now for order in ("simple", "overlapped"))
    assert overlapped < simple


@pytest.mark.parametrize(
    ("line", "instead", "message"),
    [
        (r"self\.v\.free\[stage\]\.arrive\(\)", "pass", r"producer waits for V.free\[0\]"),
        (r"yield f\"\{self\.name\}\.free.*", "yield 'nothing', lambda: True", r"A waits for K.ready\[0\]"),
    ],
    ids=["never-freed", "not-waited-for"],
)
def test_a_wrong_barrier_is_a_deadlock(line: str, instead: str, message: str) -> None:
    """The tasks of docs/tutorial/hopper.md."""
    source, edits = re.subn(line, instead, (ROOT / "examples/hopper_model.py").read_text())
    assert edits == 1
    edited: dict[str, Any] = {"__name__": "edited"}
    exec(source, edited)
    with pytest.raises(RuntimeError, match=rf"deadlock after \d+ cycles: .*{message}"):
        edited["attention"]("overlapped", 2, 8)


@pytest.mark.parametrize("option", ["--stages", "--tiles"])
def test_errors(model: Any, option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["hopper_model.py", option, "0"])
    with pytest.raises(SystemExit):
        model.main()
    assert f"{option} must be at least 1, got 0" in capsys.readouterr().err
