"""The picture of `tileattn ladder`: speed by rung, a line for each choice of options, other implementations dashed.

Results of a single rung, and of tile sizes (`--tiles`), have no such lines: their steps are bars.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tileattn.bench.ladder.climb import Climbed, Step, climbed
from tileattn.bench.plot import COLOURS, FAINT, INK, LABELS, legend_columns, literal, style
from tileattn.bench.results import Results
from tileattn.kernels.mma.backend import Choice, parse
from tileattn.kernels.mma.rungs import NAME

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BARS = {"fp32": "#D55E00", "fp16": "#E69F00"}
LINES = {"tilelang": "#D55E00"}
# Of (stages, smem): stages decide the colour, the layout in shared memory the marker.
OPTIONS = {
    (1, "padded"): ("#CC79A7", "o"),
    (1, "swizzle"): ("#CC79A7", "s"),
    (2, "padded"): ("#0072B2", "o"),
    (2, "swizzle"): ("#0072B2", "s"),
}


def save(measured: Results, path: Path) -> None:
    """Draws the results into a file; its suffix (.png, .svg, .pdf) chooses the format."""
    draw(measured).savefig(path, dpi=160, facecolor="white")


def draw(measured: Results) -> Figure:
    """The figure: a panel for each accumulation, its rungs from the lowest (left, or top for bars) to the highest."""
    if not measured.rows:
        raise ValueError("nothing was measured, so there is nothing to draw")
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    ladder = climbed(measured, steps_of(measured))
    panels = {acc: [each for each in ladder if _accumulation(each) == acc] for acc in BARS}
    panels = {acc: climb for acc, climb in panels.items() if climb}
    as_lines = all(_has_lines(climb) for climb in panels.values())
    longest = max(map(len, panels.values()), default=0)
    # As wide as a page's column, so that the texts can be read there.
    height = 1.1 + max(1, len(panels)) * (2.7 if as_lines else 0.8 + 0.23 * longest)
    figure = Figure(figsize=(7.2, height), layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1))
    fastest = max(row.tflops for row in measured.rows)
    for index, (acc, climb) in enumerate(panels.items()):
        axes = figure.add_subplot(len(panels), 1, index + 1)
        _beside(axes, measured, horizontal=as_lines)
        if as_lines:
            _lines(axes, climb)
            axes.set_ylim(0, 1.08 * fastest)
        else:
            _bars(axes, climb, BARS[acc])
            axes.set_xlim(0, 1.08 * fastest)
        axes.set_title(f"accumulation in {acc}", fontsize=10, color=INK, loc="left")
    row = measured.rows[0]
    handles, labels = figure.axes[0].get_legend_handles_labels() if figure.axes else ([], [])
    figure.legend(
        handles, labels, title=f"{row.case} (batch,seqlen,heads), {row.dtype}, {measured.gpu}", title_fontsize=10.5,
        loc="outside upper center", ncols=max(1, legend_columns(labels, figure.get_figwidth())), frameon=False,
        fontsize=9,
    )  # fmt: skip
    return literal(figure)


def _has_lines(climb: Sequence[Climbed]) -> bool:
    """Whether the steps are several rungs with options, each known: not tile sizes, and not one rung alone."""
    choices = [_choice(each) for each in climb]
    known = all(choice.tiles is None and (choice.stages, choice.smem) in OPTIONS for choice in choices)
    return known and len({choice.rung for choice in choices}) > 1


def _choice(each: Climbed) -> Choice:
    return parse(each.row.backend.removeprefix(f"{NAME}:"))


def _lines(axes: Axes, climb: Sequence[Climbed]) -> None:
    """A line for each choice of options over the rungs; the fastest step of each rung has its speed above it."""
    rungs = list(dict.fromkeys(str(_choice(each).rung) for each in climb))
    for (stages, smem), (colour, marker) in OPTIONS.items():
        of_options = [(_choice(each), each.row.tflops) for each in climb]
        points = [
            (rungs.index(str(choice.rung)), speed)
            for choice, speed in of_options
            if (choice.stages, choice.smem) == (stages, smem)
        ]
        if points:
            label = f"{stages} stage{'s' * (stages > 1)}, {smem}"
            axes.plot(
                *zip(*points), color=colour, marker=marker, markersize=5, linewidth=1.6, label=label, zorder=3,
                markerfacecolor=colour if smem == "swizzle" else "white",
            )  # fmt: skip
    for x, rung in enumerate(rungs):
        best = max(each.row.tflops for each in climb if _choice(each).rung == rung)
        axes.annotate(
            f"{best:.0f}", (x, best), xytext=(0, 7), textcoords="offset points", ha="center", fontsize=8, color=INK,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6}, zorder=4,
        )  # fmt: skip
    axes.set_xticks(range(len(rungs)), rungs)
    axes.set_xlim(-0.35, len(rungs) - 0.65)
    axes.set_ylabel("TFLOPS", fontsize=9, color=FAINT)
    style(axes)


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
    axes.set_ylim(len(climb) - 0.4, -0.6)


def _beside(axes: Axes, measured: Results, horizontal: bool) -> None:
    """A dashed line for each other implementation."""
    for row in measured.rows:
        if not row.backend.startswith(NAME):
            colour = LINES.get(row.backend, COLOURS.get(row.backend, FAINT))
            name = LABELS.get(row.backend, row.backend)
            line = axes.axhline if horizontal else axes.axvline
            line(row.tflops, color=colour, linestyle="--", linewidth=1.3, label=f"{name}, {row.tflops:.0f}", zorder=1)


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
