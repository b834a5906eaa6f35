"""A picture of the climb: the speed of each step of `tileattn ladder`, with what stands beside as lines."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tileattn.bench.plot import COLOURS, FAINT, INK, LABELS, literal, style
from tileattn.bench.results import Results
from tileattn.cli.ladder import Climbed, Step, climbed
from tileattn.kernels.mma.rungs import NAME

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BARS = {"fp32": "#D55E00", "fp16": "#E69F00"}
LINES = {"tilelang": "#D55E00"}


def save(measured: Results, path: Path) -> None:
    """Draws a file; its suffix (.png, .svg, .pdf) chooses the format."""
    draw(measured).savefig(path, dpi=160, facecolor="white")


def draw(measured: Results) -> Figure:
    """Bars from the lowest rung to the highest, those that were the best so far in full colour."""
    if not measured.rows:
        raise ValueError("nothing was measured, so there is nothing to draw")
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    ladder = steps_of(measured)
    found = climbed(measured, ladder)
    figure = Figure(figsize=(max(7.0, 1.5 + 0.36 * len(found)), 5.2), layout=ConstrainedLayoutEngine())
    axes = figure.add_subplot()
    best: dict[str, float] = {}
    for x, each in enumerate(found):
        acc = _accumulation(each)
        ahead = each.row.tflops > best.get(acc, 0.0)
        best[acc] = max(best.get(acc, 0.0), each.row.tflops)
        label = f"accumulation in {acc}" if x == 0 or _accumulation(found[x - 1]) != acc else None
        bars = axes.bar(
            [x], [each.row.tflops], 0.82, color=BARS[acc], alpha=1.0 if ahead else 0.45, label=label, zorder=2
        )
        axes.bar_label(bars, [f"{each.row.tflops:.0f}"], fontsize=6.5, color=INK, padding=2)
    for row in measured.rows:
        if not row.backend.startswith(NAME):
            colour = LINES.get(row.backend, COLOURS.get(row.backend, FAINT))
            name = LABELS.get(row.backend, row.backend)
            axes.axhline(
                row.tflops, color=colour, linestyle="--", linewidth=1.3, label=f"{name}, {row.tflops:.0f}", zorder=3
            )
    axes.set_xticks(range(len(found)), [each.label.replace(" acc=fp32", "").replace(" acc=fp16", "") for each in found])
    axes.tick_params(axis="x", labelrotation=90)
    axes.set_ylabel("TFLOPS (full colour: best so far)", fontsize=9, color=FAINT)
    style(axes)
    axes.tick_params(axis="x", labelsize=6.5)
    row = measured.rows[0]
    axes.set_title(
        f"{row.case} (batch,seqlen,heads), {row.dtype}, {measured.gpu}", fontsize=10.5, color=INK, loc="left"
    )
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    return literal(figure)


def steps_of(measured: Results) -> list[Step]:
    """The steps of a result file, in its order."""
    return [Step(_label(row.backend), row.backend) for row in measured.rows if row.backend.startswith(f"{NAME}:")]


def _label(backend: str) -> str:
    rung, *options = backend.removeprefix(f"{NAME}:").split(",")
    named = dict(option.split("=", 1) for option in options if "=" in option)
    if {"tiles", "acc"} <= named.keys():
        return f"{rung} {named['tiles']} acc={named['acc']}"
    if not {"stages", "smem", "acc"} <= named.keys():
        return backend.removeprefix(f"{NAME}:")
    return f"{rung} stages={named['stages']} {named['smem']} acc={named['acc']}"


def _accumulation(each: Climbed) -> str:
    return "fp16" if "acc=fp16" in each.row.backend else "fp32"
