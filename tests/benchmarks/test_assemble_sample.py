"""benchmarks/assemble_sample.py: the preset "sample" is lowered and assembled for each architecture."""

from __future__ import annotations

import sys

import pytest

from tests.tools import ROOT
from tileattn.bench import presets

sys.path.insert(0, str(ROOT / "benchmarks"))

import assemble_sample
from assemble_sample import Assembled


def test_the_table_has_failures_and_spills() -> None:
    rows = [
        Assembled("a | b", "sm_80", 255, 16),
        Assembled("c", "sm_80", error="RuntimeError: no"),
        Assembled("d", "gfx942", 120, 0),
    ]
    assert assemble_sample.table(rows).splitlines() == [
        "| architecture | kernels | failed | with spills | most spilled, bytes |",
        "|---|---|---|---|---|",
        "| sm_80 | 2 | 1 | 1 | 16 |",
        "| gfx942 | 1 | 0 | 0 | 0 |",
        "",
        "| architecture | kernel | registers | spilled, bytes |",
        "|---|---|---|---|",
        "| sm_80 | a \\| b | 255 | 16 |",
        "| sm_80 | c | failed |  |",
        "| gfx942 | d | 120 | 0 |",
    ]


@pytest.mark.slow(reason="24 kernels, some minutes for each architecture")
@pytest.mark.parametrize("arch", assemble_sample.ARCHS)
def test_the_sample_is_assembled(arch: str) -> None:
    if reason := assemble_sample.missing(arch):
        pytest.skip(reason)
    found = list(assemble_sample.assemble_all(presets.named("sample", arch), 2))
    assert [(row.kernel, row.error) for row in found if row.error is not None] == []
    assert len(found) == presets.SAMPLED
    assert all(row.registers > 0 for row in found)
