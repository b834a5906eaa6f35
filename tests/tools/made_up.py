"""Invented results, to test how results are shown."""

from __future__ import annotations

from dataclasses import fields, replace

import torch

from tileattn.bench import cases, results
from tileattn.bench.draws import shapes


def made_up(suite: str, device: str, *backends: str, direction: str = "fwd") -> results.Results:
    """Results with invented times (each backend 10 % slower than the one before), to test how they are shown."""
    measured = replace(results.begin(torch.device("cpu"), None, "test", direction), device=device, gpu="Imaginary GPU")
    drawn = shapes.draw(1, shapes.CASES) if suite == shapes.SUITE else None
    if drawn is not None:
        measured.draws = {"1": [case.name for case in drawn]}
    for case in drawn or cases.suite(suite, "fp8" if suite == "fp8" else "bf16", device, direction):
        for index, backend in enumerate(backends):
            if backend == "fa2" and case.head_dim != case.head_dim_v:
                measured.refused.append(results.Missing(case.name, backend, "needs [one] head dim"))
                continue
            given = {field.name: getattr(case, field.name) for field in fields(case)}
            if backend == "tileattn-bf16":
                given["dtype"] = "bf16"
            ms = 1.1**index
            measured.rows.append(
                results.Row(
                    suite=suite,
                    case=case.name,
                    direction=direction,
                    backend=backend,
                    causal=case.causal,
                    ms=ms,
                    tflops=case.flops(direction) / ms / 1e9,
                    error=0.002,
                    peak_bytes=3 * 2**20,
                    gpu=measured.gpu,
                    versions=measured.versions,
                    commit=measured.commit,
                    date=measured.date,
                    **given,
                )
            )
    return measured
