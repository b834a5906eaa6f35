"""Continuous batching by ``flash_attention_2`` on tileattn's flash-attn functions: block tables reach `decode`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="needs transformers: pip install 'tileattn[transformers]'")

from tests.tools.transformers.batching import NEW

ROOT = Path(__file__).parents[3]


def run(device: str) -> dict[str, dict[str, int]]:
    """The calls of each kind for each model. The process holds the log probabilities to the rule."""
    command = [sys.executable, "-m", "tests.tools.flash_attn_batching", device]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line.pop("kind"): line for line in lines}


@pytest.mark.slow(reason="a process of its own, which imports transformers: 8 s")
def test_on_a_cpu() -> None:
    layers, steps = 2, NEW - 1
    assert run("cpu") == {
        "llama": {"varlen": layers, "append_kv": layers * steps, "decode": layers * steps},
        "gemma3": {"varlen": layers * NEW},  # a sliding window: no block tables
    }


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    """Steps are replayed from CUDA graphs, so fewer calls are made than steps."""
    counts = run("cuda")
    llama, gemma3 = counts["llama"], counts["gemma3"]
    assert llama["decode"] == llama["append_kv"] > 0
    assert llama["kernel"] >= llama["decode"]
    assert llama["varlen"] > 0
    assert gemma3["varlen"] > 0
    assert "decode" not in gemma3
