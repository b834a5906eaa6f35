"""The code of docs/parallel.md runs, and torch.compile breaks its graph at a plan's calls."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools import ROOT

BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "parallel.md").read_text(), re.DOTALL)


@pytest.mark.slow  # three processes import everything
def test_the_training_example_runs_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "step.py"
    script.write_text(BLOCKS[0])
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    losses = []
    for ranks in ("1", "2"):
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
        done = subprocess.run(
            [*torchrun, str(script)], capture_output=True, text=True, timeout=120, env=environment, check=False
        )
        assert done.returncode == 0, done.stderr
        losses.append(set(re.findall(r"loss ([\d.]+)", done.stdout)))
    assert losses[0] == losses[1]
    assert len(losses[0]) == 1


def test_the_prediction_runs(capsys: pytest.CaptureFixture[str]) -> None:
    exec(BLOCKS[1], {})
    assert len(re.findall(r"\d+ ranks, \w+, \d group", capsys.readouterr().out)) == 3
