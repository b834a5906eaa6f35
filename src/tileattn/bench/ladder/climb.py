"""The steps of the mma ladder and the gain of each, computed from a result file.

A step is a rung with its options. The gain of a step is its speed relative to the best earlier step with the same
accumulation, because the gain of an option depends on the options before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from tileattn.bench.results import Results, Row
from tileattn.kernels.mma.backend import parse
from tileattn.kernels.mma.rungs import ACCUMULATIONS, LAYOUTS, NAME, RUNGS, STAGES, RungOptions
from tileattn.kernels.mma.tiles import candidates

BESIDE = ("fa2", "efficient")
TILELANG = "tilelang"


@dataclass(frozen=True)
class Step:
    """One line of the ladder: its label in the table, and the name of its backend."""

    label: str
    backend: str


def steps(head_dim: int, dtype: str, all_tiles: bool) -> list[Step]:
    """The steps from the lowest rung to the highest: accumulating in float32, then also in float16 for float16 inputs.

    all_tiles: Every candidate of the tile sizes, with the options that are fastest by construction.
    """
    ladder = []
    for acc in ACCUMULATIONS if dtype == "fp16" else ACCUMULATIONS[:1]:
        for rung, smem, stages in product(_rungs(head_dim), LAYOUTS, STAGES):
            options = RungOptions(rung, stages, acc, smem)
            label = f"{rung} stages={stages} {smem} acc={acc}"
            if not all_tiles:
                ladder.append(Step(label, str(options)))
            elif stages == STAGES[-1] and smem == LAYOUTS[-1]:
                ladder += [
                    Step(f"{rung} {tiles} acc={acc}", f"{options},tiles={tiles}")
                    for tiles in candidates(options, head_dim)
                ]
    return ladder


def _rungs(head_dim: int) -> tuple[str, ...]:
    return tuple(rung for rung in RUNGS if candidates(RungOptions(rung), head_dim))


@dataclass(frozen=True)
class Climbed:
    """A measured step with its gain over the best earlier one; None for the first, and for slower steps."""

    label: str
    row: Row
    gain: float | None


def climbed(measured: Results, ladder: Sequence[Step]) -> list[Climbed]:
    """The steps in their order, with their gains."""
    measured_steps, best = [], dict.fromkeys(ACCUMULATIONS, 0.0)
    for step in ladder:
        row = next((row for row in measured.rows if row.backend == step.backend), None)
        if row is None:
            continue
        acc = parse(step.backend.removeprefix(f"{NAME}:")).acc
        before = best[acc]
        measured_steps.append(Climbed(step.label, row, row.tflops / before - 1 if 0 < before < row.tflops else None))
        best[acc] = max(before, row.tflops)
    return measured_steps
