"""`benchmarks/mi300x.py`: candidates and --lower-only on any machine, the measurement on any GPU."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tests.tools import ROOT, hip
from tileattn.bench.cases import square
from tileattn.kernels.tilelang.forward.amd.config import AmdConfig
from tileattn.kernels.tilelang.forward.amd.space import is_article_best

spec = importlib.util.spec_from_file_location("mi300x", ROOT / "benchmarks" / "mi300x.py")
assert spec is not None
assert spec.loader is not None
mi300x = importlib.util.module_from_spec(spec)
sys.modules["mi300x"] = mi300x
spec.loader.exec_module(mi300x)

ARTICLE = square(1, 4096, 8, 128, "full", "fp16")


@pytest.mark.parametrize(("space", "count", "best"), [("article", 22, 2), ("example", 2, 0), ("best", 2, 2)])
def test_the_candidates_of_a_space(space: str, count: int, best: int) -> None:
    configs = mi300x.candidates(ARTICLE, space)
    assert (len(configs), sum(map(is_article_best, configs))) == (count, best)
    assert set(configs) <= set(mi300x.candidates(ARTICLE, "all"))


def lower_only(monkeypatch: pytest.MonkeyPatch, folder: Path, fails_at: int) -> tuple[int, str, dict[str, Any]]:
    """The exit code, output and result file, without generating code. Sources with fewer keys than `fails_at` fail."""

    def hip_source(call: object, config: AmdConfig) -> str:
        if config.block_N < fails_at:
            raise ValueError("no layout")
        return f"source of {config.kernel_text}"

    monkeypatch.setattr(mi300x, "hip_source", hip_source)
    monkeypatch.setattr(mi300x, "assembled", lambda source: {"vgprs": len(source)})
    done = CliRunner().invoke(mi300x.app, ["--lower-only", "--out", str(folder / "lowered.json")])
    return done.exit_code, done.output, json.loads((folder / "lowered.json").read_text())


def test_without_the_machine_nothing_is_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code, output, report = lower_only(monkeypatch, tmp_path, fails_at=0)
    assert code == 0, output
    assert {row[name] for row in report["rows"] for name in ("ms", "tflops")} == {"not run"}
    assert all(row["lowered"] > 0 for row in report["rows"])
    assembled = [row["config"]["threads"] for row in report["rows"] if "assembled" in row]
    assert assembled == [512, 512]
    assert "not run" in output
    assert "article's fastest" in " ".join(output.split())


def test_a_candidate_that_is_not_lowered_fails_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code, output, report = lower_only(monkeypatch, tmp_path, fails_at=64)
    assert code == 1
    assert len(report["wrong"]) == sum("no layout" in str(row["lowered"]) for row in report["rows"]) > 0
    assert any(row["lowered"] != "ValueError: no layout" for row in report["rows"])
    assert "was not lowered: no layout" in " ".join(output.split())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--dtype", "fp32"], "'fp32' is not known; accepted: fp16, bf16"),
        (["--space", "mine"], "'mine' is not known; accepted: article, example, best, all"),
        (["--kv-heads", "3"], "3 is no divisor of the 8 heads"),
        (["--space", "example", "--D", "256"], "no configuration of 'example' fits head dim 256"),
        ([], "measures on an MI300X (gfx942), and PyTorch finds no GPU; --lower-only needs none"),
    ],
)
def test_a_bad_call_is_one_error(arguments: list[str], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = CliRunner().invoke(mi300x.app, arguments)
    assert done.exit_code == 2
    assert says in done.output


@pytest.mark.slow
def test_the_fastest_of_the_article_is_lowered_and_assembled(tmp_path: Path) -> None:
    out = tmp_path / "best.json"
    done = CliRunner().invoke(mi300x.app, ["--lower-only", "--space", "best", "--out", str(out)])
    assert done.exit_code == 0, done.output
    for row in json.loads(out.read_text())["rows"]:
        assert row["lowered"] > 10_000
        assert hip.REASON in row["assembled"] if hip.MISSING else row["assembled"]["scratch"] == 0


@pytest.mark.gpu
def test_a_run_tunes_verifies_and_times() -> None:
    configs = [AmdConfig(64, 32, threads=128), AmdConfig(128, 32, threads=256)]
    report = mi300x.measure(square(1, 256, 2, 64, "causal", "fp16"), configs, torch.device("cuda"))
    assert report["verified"] == {"article": "passed", "rule": "passed"}
    assert not report["wrong"]
    names = {row["name"]: row["ms"] for row in report["rows"]}
    assert set(names) == {"tuned", "default", "eager", "sdpa", "triton"}
    assert all(isinstance(ms, float) for ms in names.values()), names
