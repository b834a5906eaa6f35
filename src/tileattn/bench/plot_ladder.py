"""The picture of `tileattn ladder`: the speed of each step as bars, other implementations as lines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tileattn.bench.climb import Climbed, Step, climbed
from tileattn.bench.plot import COLOURS, FAINT, INK, LABELS, literal, style
from tileattn.bench.results import Results
from tileattn.kernels.mma.rungs import NAME

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BARS = {"fp32": "#D55E00", "fp16": "#E69F00"}
LINES = {"tilelang": "#D55E00"}


def save(measured: Results, path: Path) -> None:
    """Draws the results into a file; its suffix (.png, .svg, .pdf) chooses the format."""
    draw(measured).savefig(path, dpi=160, facecolor="white")


def draw(measured: Results) -> Figure:
    """The figure: bars from the lowest rung (top) to the highest. Steps that are the best so far have full colour."""
    if not measured.rows:
        raise ValueError("nothing was measured, so there is nothing to draw")
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    ladder = climbed(measured, steps_of(measured))
    panels = {acc: [each for each in ladder if _accumulation(each) == acc] for acc in BARS}
    panels = {acc: climb for acc, climb in panels.items() if climb}
    longest = max(map(len, panels.values()), default=0)
    figure = Figure(
        figsize=(5.4 * max(1, len(panels)), 1.7 + 0.23 * longest), layout=ConstrainedLayoutEngine(h_pad=0.1)
    )
    fastest = max(row.tflops for row in measured.rows)
    for index, (acc, climb) in enumerate(panels.items()):
        axes = figure.add_subplot(1, len(panels), index + 1)
        _beside(axes, measured)
        _bars(axes, climb, BARS[acc])
        axes.set_title(f"accumulation in {acc}", fontsize=10, color=INK, loc="left")
        axes.set_xlim(0, 1.08 * fastest)
    row = measured.rows[0]
    handles, labels = figure.axes[0].get_legend_handles_labels() if figure.axes else ([], [])
    figure.legend(
        handles, labels, title=f"{row.case} (batch,seqlen,heads), {row.dtype}, {measured.gpu}", title_fontsize=10.5,
        loc="outside upper center", ncols=max(1, len(labels)), frameon=False, fontsize=9,
    )  # fmt: skip
    return literal(figure)


def _bars(axes: Axes, climb: Sequence[Climbed], colour: str) -> None:
    """A bar for each step, with its speed behind it."""
    best = 0.0
    for y, each in enumerate(climb):
        speed = each.row.tflops
        bars = axes.barh([y], [speed], 0.8, color=colour, alpha=1.0 if speed > best else 0.45, zorder=2)
        best = max(best, speed)
        (label,) = axes.bar_label(bars, [f"{speed:.0f}"], fontsize=8, color=INK, padding=2)
        label.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.6})  # the lines end at it
        label.set_zorder(4)
    axes.set_yticks(range(len(climb)), [each.label.replace(f" acc={_accumulation(each)}", "") for each in climb])
    axes.set_xlabel("TFLOPS (full colour: best so far)", fontsize=9, color=FAINT)
    style(axes)
    axes.grid(visible=False, axis="y")
    axes.grid(axis="x", color="#E3E3E3", linewidth=0.6, zorder=0)
    axes.tick_params(axis="y", labelsize=8)
    axes.set_ylim(len(climb) - 0.4, -0.6)


def _beside(axes: Axes, measured: Results) -> None:
    """A line for each other implementation."""
    for row in measured.rows:
        if not row.backend.startswith(NAME):
            colour = LINES.get(row.backend, COLOURS.get(row.backend, FAINT))
            name = LABELS.get(row.backend, row.backend)
            axes.axvline(
                row.tflops, color=colour, linestyle="--", linewidth=1.3, label=f"{name}, {row.tflops:.0f}", zorder=1
            )


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
