"""Measures what the rescale threshold costs in error and gains in speed, on a Hopper GPU.

    python benchmarks/rescale_threshold.py --out rescale.json      # about a minute on an H200, compilation included

The Hopper schedule keeps a row's old maximum while it has grown by at most the threshold, in powers of two
(`HopperConfig.rescale_threshold`), and does not rescale O. The weight of the largest score is exactly 1 where the
maximum is exact. With an old maximum it is some number above 1, which is rounded to 16 bits like all others. A row that
one key dominates shows this rounding. The script runs the default configuration with its threshold and with 0, beside
FlashAttention-2 and cuDNN. It compares all rows of an output with float64, or a sample where there are too many.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any

import torch

from tileattn.bench import problem
from tileattn.bench.baselines import BASELINES
from tileattn.bench.cases import Case, square
from tileattn.bench.environment import commit, versions
from tileattn.bench.oracle import output as oracle
from tileattn.call.facts import AttentionCall, device_arch
from tileattn.call.inputs import Inputs
from tileattn.kernels.tilelang.build.batch import CORES, compile_all
from tileattn.kernels.tilelang.forward import defaults
from tileattn.kernels.tilelang.forward import launch as forward_launch
from tileattn.kernels.tilelang.forward.config import HopperConfig
from tileattn.kernels.tilelang.forward.library import Job
from tileattn.measure import rounds, timing
from tileattn.testing.numerics import row_error

CASES = [
    *(square(b, s, 32, 64, v) for b, s in ((16, 1024), (4, 4096), (1, 16384)) for v in ("full", "causal")),
    *(square(b, s, 16, 128, v) for b, s in ((16, 1024), (4, 4096), (1, 16384)) for v in ("full", "causal")),
    *(square(b, s, 8, 256, v) for b, s in ((16, 1024), (4, 4096), (1, 16384)) for v in ("full", "causal")),
]
LINE = "{case:28} {implementation:12} {tflops:7.1f} TFLOPS  worst {error_worst_row:.5f}  whole {error_whole:.5f}"
EFFORT = dataclasses.replace(timing.DEFAULT, rounds=5)


def job(case: Case, threshold: float | None) -> Job:
    """The kernel of a case's default configuration; `threshold` replaces the configuration's unless it is None."""
    call = AttentionCall(
        dtype=case.value_dtype,
        head_dim=case.head_dim,
        head_dim_v=case.head_dim_v,
        variant="Causal()" if case.causal else "",
        return_lse=False,
        arch=device_arch(torch.device("cuda")),
    )
    config = defaults.default(call, min(case.seqlen_q, case.seqlen_k))
    if threshold is not None and isinstance(config, HopperConfig):
        config = dataclasses.replace(config, rescale_threshold=threshold)
    return Job(call, config)


def with_threshold(given: problem.Problem, threshold: float | None) -> Callable[[], torch.Tensor]:
    """The call, ready to be timed."""
    chosen = job(given.case, threshold)
    forward = forward_launch.prepare_with(chosen.config, chosen.call, given.q.shape, given.k.shape, given.scale)
    return lambda: forward(Inputs(given.q, given.k, given.v))[0]


def measured(case: Case) -> list[dict[str, Any]]:
    """A row for each implementation: milliseconds, and the relative error of the worst row and of the whole output."""
    device = torch.device("cuda")
    given = problem.build(case, device)
    expected = oracle.build(given)
    calls = {"default": with_threshold(given, None), "threshold 0": with_threshold(given, 0.0)}
    calls |= {name: BASELINES[name].prepare(given).call for name in ("fa2", "cudnn")}
    contexts = {name: BASELINES[name].prepare(given).context for name in ("fa2", "cudnn")}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(EFFORT.rounds):
        for name in (list(calls)[i] for i in rounds.order(len(calls), number)):
            with contexts[name]() if name in contexts else torch.no_grad():
                samples[name] += timing.sample_ms(calls[name], device, EFFORT)
    rows = []
    for name, call in calls.items():
        with contexts[name]() if name in contexts else torch.no_grad():
            error = row_error(expected.sampled(call()), expected.expected)
        ms = median(samples[name])
        rows.append(
            {
                "case": case.name,
                "implementation": name,
                "ms": ms,
                "tflops": case.flops() / ms / 1e9,
                "error_worst_row": error.worst_row,
                "error_whole": error.whole,
                "checked": expected.sample.text,
            }
        )
    return rows


def main() -> None:
    """Measures all cases and writes the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    path: Path = parser.parse_args().out
    if not torch.cuda.is_available():
        raise SystemExit("there is no GPU here to measure on")
    jobs = [job(case, threshold) for case in CASES for threshold in (None, 0.0)]
    for done in compile_all(list({each.key: each for each in jobs}.values()), CORES):
        if done.error is not None:
            raise SystemExit(f"{done.job}: {done.error}")
    rows = []
    for case in CASES:
        rows += measured(case)
        for row in rows[-4:]:
            print(LINE.format(**row))
    about = {
        "gpu": torch.cuda.get_device_name(),
        "python": platform.python_version(),
        "versions": versions(),
        "commit": commit(),
        "command": "python benchmarks/rescale_threshold.py",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    path.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
