"""The calibration runs on tiny sizes, and what it writes becomes the rates of `Topology`, with its source."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tools import ROOT
from tests.tools.ranks.pools import pool, returned
from tileattn.parallel import Topology
from tileattn.parallel.prediction.rates import FIGURES
from tileattn.parallel.prediction.topology import MEASURED

sys.path.insert(0, str(ROOT / "benchmarks"))
import calibrate_parallel  # type: ignore[import-not-found]

MADE_UP = {"forward": 6.1234e14, "backward": 5e14, "call": 7.777e-6, "fast": 3.6e11, "transfer": 2e-5}


def calibrated() -> dict[str, Any]:
    """On each rank of a pool."""
    found: dict[str, Any] = calibrate_parallel.calibrate(calibrate_parallel.TINY, torch.device("cpu"))
    return found


@pytest.mark.slow(reason="starts ranks, 4 s")
def test_it_measures_kernels_calls_and_links() -> None:
    for found in returned(pool(2).run(calibrated)):
        topology = found["topology"]
        assert tuple(topology) == MEASURED
        Topology(16, **topology)
        assert all(value > 0 for name, value in topology.items() if name != "call")
        assert [row["bytes"] for row in found["transfers"]] == list(calibrate_parallel.TINY.transfers)
        assert all(row["one_way_s"] > 0 for row in found["transfers"])
        # 2 * tokens^2 * heads * head_dim, for half of all pairs of query and key
        flops = 2 * 512**2 * 4 * 32
        assert found["kernels"]["forward"]["ms"] / 1e3 * topology["forward"] == pytest.approx(flops)
        assert found["kernels"]["backward"]["ms"] / 1e3 * topology["backward"] == pytest.approx(2.5 * flops)


@pytest.mark.slow  # three processes import everything
def test_torchrun_writes_a_file(tmp_path: Path) -> None:
    out = tmp_path / "new" / "calibration.json"
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    script = (str(ROOT / "benchmarks" / "calibrate_parallel.py"), "--tiny", "--out", str(out), "--commit", "abc")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([*torchrun, *script], capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr
    content = json.loads(out.read_text())
    assert (content["device"], content["commit"], content["ranks"]) == ("cpu", "abc", 2)
    assert Topology.calibrated(out, 8).fast == content["topology"]["fast"]


def test_a_file_is_adopted() -> None:
    text = calibrate_parallel.RATES_FILE.read_text()
    module: dict[str, Any] = {"__name__": "rates"}
    exec(calibrate_parallel.adopted(text, MADE_UP, "a/b.json"), module)
    figures = module["FIGURES"]
    for name in MEASURED:
        assert figures[name] == (float(f"{MADE_UP[name]:.3g}"), True, "a/b.json")
    assert figures["network"] == FIGURES["network"]


def test_the_index_names_it_once() -> None:
    text = (ROOT / "benchmarks" / "results" / "README.md").read_text()
    for _ in range(2):
        text = calibrate_parallel.indexed(text, "calibration-x100.json", "2027-01-01T00:00:00", "abcdefabcdefabcdef")
    (line,) = (line for line in text.splitlines() if "calibration-x100" in line)
    assert line.startswith("| [`calibration-x100.json`](parallel/calibration-x100.json) | [Predictions](../../docs/")
    assert "| 2027-01-01, abcdefabcdef | `torchrun" in line


@pytest.mark.parametrize(
    ("gpu", "name"), [("NVIDIA H200", "h200"), ("NVIDIA H100 80GB HBM3", "h100"), ("AMD Instinct MI300X", "mi300x")]
)
def test_names_of_files(gpu: str, name: str) -> None:
    assert calibrate_parallel.short_name(gpu, torch.device("cuda", 0)) == name
    assert calibrate_parallel.short_name(gpu, torch.device("cpu")) == "cpu"


def test_measured_rates_are_those_of_their_file() -> None:
    for name, figure in FIGURES.items():
        assert figure.measured == (re.search(r"\.json$", figure.source) is not None), name
        if figure.measured:
            measured = json.loads((ROOT / figure.source).read_text())["topology"][name]
            assert figure.value == calibrate_parallel.rounded(measured), name
