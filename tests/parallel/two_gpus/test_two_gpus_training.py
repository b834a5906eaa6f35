"""examples/train_gpt.py on two GPUs: the losses are those of one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools import ROOT
from tests.tools.ranks.two_gpus import MARKS

pytestmark = MARKS
HEADS, HEAD_DIM, SEQLEN, BATCH = 2, 16, 33, 4
OPTIONS = {"layers": 1, "heads": HEADS, "dim": HEADS * HEAD_DIM, "seqlen": SEQLEN, "batch": BATCH, "steps": 30}

# Without the picture, which needs matplotlib.
SCRIPT = """
import sys
sys.path.insert(0, {examples!r})
import train_gpt, typer
train_gpt.check_picture = train_gpt.draw = lambda *_: None
typer.run(train_gpt.main)
"""


@pytest.mark.parametrize("option", [(), ("--fsdp",)], ids=["replicated", "fsdp"])
def test_two_gpus_learn_as_one(option: tuple[str, ...], tmp_path: Path) -> None:
    """An odd length, so that shards differ."""
    for module in ("typer", "rich"):
        pytest.importorskip(module)
    script, kept = tmp_path / "script.py", tmp_path / "losses.json"
    script.write_text(SCRIPT.format(examples=str(ROOT / "examples")))
    options = [part for name, value in OPTIONS.items() for part in (f"--{name}", str(value))]
    options += ["--device", "cuda", "--dtype", "float32", "--losses", str(kept), *option]
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*torchrun, str(script), "--context-parallel", "2", "--compare", *options],
        capture_output=True, text=True, timeout=150, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    several, alone = json.loads(kept.read_text())["rows"]
    assert several["attention"] == "tileattn on 2 ranks"
    assert several["losses"][-1] < several["losses"][0] - 0.5
    assert max(abs(a - b) for a, b in zip(several["losses"], alone["losses"], strict=True)) < 1e-3  # as the example's
    assert abs(several["held_out"] - alone["held_out"]) < 1e-3
