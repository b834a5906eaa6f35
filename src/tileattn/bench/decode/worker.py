"""The process of the baselines whose packages clash with TileLang's: it measures a row when it is told to.

It reads a JSON object a line from stdin, and answers with one on stdout: `python -m tileattn.bench.decode.worker`.
What the baselines print goes to stderr. When a kernel has broken its CUDA context, it answers and ends.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TextIO

import torch

from tileattn.bench.decode import ceilings
from tileattn.bench.decode.cases import Case
from tileattn.bench.decode.flashinfer import ELSEWHERE, PACKAGES
from tileattn.bench.decode.problem import Pool
from tileattn.bench.decode.rows import Measurer, is_lost

NAME = "baselines"


def main() -> None:
    """Answers requests until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    start = json.loads(sys.stdin.readline())
    device = torch.device(start["device"])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    measurer = Measurer(Pool(device, getattr(torch, start["dtype"])), start["rounds"])
    _answer(answers, {"versions": versions()})
    for line in sys.stdin:
        request = json.loads(line)
        if "build" in request:
            _build(measurer.pool, [Case(**each) for each in request["build"]], request["methods"])
            _answer(answers, {})
        elif "ceilings" in request:
            _answer(answers, asdict(ceilings.measure(request["ceilings"], NAME, device)))
            torch.cuda.empty_cache()
        else:
            methods = [method for method in ELSEWHERE if method.name in request["methods"]]
            _answer(answers, asdict(measurer(Case(**request["case"]), methods)))
        if measurer.lost:
            raise SystemExit("a kernel broke the CUDA context")


@torch.no_grad()
def _build(pool: Pool, cases: Sequence[Case], names: Sequence[str]) -> None:
    """Calls each method once on each row, so that its kernels are there. What fails here fails in its row again."""
    for case in cases:
        for method in ELSEWHERE:
            if method.name in names and method.refusal(case, pool.device, pool.dtype) is None:
                with suppress(Exception):
                    method.prepare(pool.problem(case))(0)
                if is_lost(pool.device):
                    raise SystemExit(f"{method.name} broke the CUDA context")


def versions() -> dict[str, str]:
    """Versions of the packages that count here."""
    found = {"torch": str(torch.__version__)}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _answer(answers: TextIO, content: dict[str, Any]) -> None:
    answers.write(json.dumps(content) + "\n")


if __name__ == "__main__":
    main()
