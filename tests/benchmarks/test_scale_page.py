"""The page of predictions is what its script writes, and sets measured rows beside the model."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.tools import ROOT
from tileattn import SlidingWindow
from tileattn.parallel import Topology, simulate

sys.path.insert(0, str(ROOT / "benchmarks"))
import make_scale_page  # type: ignore[import-not-found]
import parallel_rows  # type: ignore[import-not-found]

FILE = {"device": "cuda", "gpu": "NVIDIA H200", "ranks": 2, "base": 1 << 17, "head_dim": 128}


def row(case: str, backend: str = "tileattn", direction: str = "fwd", ms: float = 100.0) -> dict[str, Any]:
    return {"case": case, "backend": backend, "direction": direction, "ms": ms}


@pytest.mark.slow(reason="runs the model of all predictions, 11 s")
def test_the_committed_page_is_what_the_script_writes() -> None:
    picture = str(make_scale_page.PICTURE.relative_to(make_scale_page.PAGE.parent))
    written = make_scale_page.page(parallel_rows.compared(make_scale_page.RESULTS), picture)
    assert make_scale_page.PAGE.read_text() == written, "run python benchmarks/make_scale_page.py"
    for block in written.split("\n\n"):  # each row of a table has as many cells as its head
        assert len({line.count("|") for line in block.splitlines() if line.startswith("|")}) <= 1


def test_rows_are_set_beside_the_model(tmp_path: Path) -> None:
    rows = [
        row("128k 32/8 causal"),
        row("32k 32/32 causal", "tileattn-gather4", "fwdbwd"),
        row("128k 32/8 window 1024", "tileattn-ring", "bwd"),
    ]
    left_out = [
        row("128k 32/8 causal", "cudnn-allgather"),
        row("128k 32/8 causal", "ideal"),
        row("128k 32/8 strided 3"),
        row("99k 32/8 causal"),
        row("128k 32/8 causal", direction="sideways"),
        {"case": "128k 32/8 causal"},
    ]
    (tmp_path / "parallel-h200.json").write_text(json.dumps({**FILE, "rows": [*rows, *left_out]}))
    (tmp_path / "parallel-cpu.json").write_text(json.dumps({**FILE, "device": "cpu", "rows": rows}))
    (tmp_path / "other.json").write_text(json.dumps([1, 2]))
    found = parallel_rows.compared(tmp_path)
    assert [(each.case, each.backend, each.direction) for each in found] == [
        (each["case"], each["backend"], each["direction"]) for each in rows
    ]
    assert {each.file for each in found} == {"parallel-h200.json"}
    causal = simulate(Topology(2), None, (1, 1 << 17, 32, 8, 128), causal=True)
    assert found[0].predicted_ms == pytest.approx(1e3 * max(causal.forward))
    grouped = simulate(Topology(2), None, (1, 1 << 15, 32, 32, 128), causal=True, algorithm="gather", head_groups=4)
    assert found[1].predicted_ms == pytest.approx(1e3 * max(map(sum, zip(grouped.forward, grouped.backward))))
    window = simulate(
        Topology(2), SlidingWindow(1024, 0), (1, 1 << 17, 32, 8, 128), layout="contiguous", algorithm="ring"
    )
    assert found[2].predicted_ms == pytest.approx(1e3 * max(window.backward))
    lines = make_scale_page._beside(found)
    assert "Of 3 rows the model's time is" in lines[1]
    assert f"| 2 x NVIDIA H200 | 128k 32/8 causal | tileattn | fwd | 100 | {found[0].predicted_ms:,.0f} |" in lines[4]


def test_a_page_without_rows_says_so() -> None:
    assert "No file of `tileattn bench --suite parallel`" in make_scale_page._beside([])[1]
