"""The picture of the suite: time and memory against the length, a line for each module."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from tileattn.bench.modules.report import title
from tileattn.bench.modules.results import NAIVE, Results, Row
from tileattn.bench.plot import FAINT, colours_of, length_label, literal, style
from tileattn.measure.units import human_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CLOSEST = 1 / 20  # of the height: how close two labels may be to each other


def save(results: Results, path: Path) -> None:
    """Draws the results into a file; its suffix (.png, .svg, .pdf) chooses the format."""
    draw(results).savefig(path, dpi=160, facecolor="white")


def draw(results: Results) -> Figure:
    """The figure. All axes are logarithmic, so that a power of the length is a straight line."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure = Figure(figsize=(7.2, 7.4), layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1))
    time, memory = figure.subplots(2, 1)
    _panel(time, results, "milliseconds of a call", [row.ms for row in results.rows], results.faster, "speed vs naive")
    peaks = [float(row.peak_bytes) for row in results.rows]
    _panel(memory, results, "peak memory", peaks, results.smaller, "times less than naive")
    time.yaxis.set_major_formatter(lambda ms, _: f"{ms:g}")
    memory.yaxis.set_major_formatter(lambda count, _: human_bytes(count).replace(".0 ", " "))
    handles, labels = time.get_legend_handles_labels()
    in_two_lines = title(results).replace(": ", ":\n", 1)
    figure.legend(
        handles, labels, title=in_two_lines, title_fontsize=10, loc="outside upper center", ncols=len(labels),
        frameon=False, fontsize=9,
    )  # fmt: skip
    return literal(figure)


def _panel(
    axes: Axes,
    results: Results,
    label: str,
    values: list[float],
    against_naive: Callable[[Row], float | None],
    compared: str,
) -> None:
    """One line for each module; at its end `against_naive`, which `compared` explains."""
    lengths = results.lengths()
    colours = colours_of(results.modules())
    value_of: dict[Row, float] = dict(zip(results.rows, values))
    for name in results.modules():
        rows = sorted((row for row in results.rows if row.module == name), key=lambda row: row.seqlen)
        points = [value_of[row] for row in rows]
        axes.plot([row.seqlen for row in rows], points, color=colours[name], label=name, marker="o", markersize=4)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2 if "memory" in label else 10)
    axes.set_xticks(lengths, [length_label(seqlen) for seqlen in lengths])
    axes.minorticks_off()
    ends = [rows[-1] for name in results.modules() if (rows := [row for row in results.rows if row.module == name])]
    low, high = axes.get_ylim()
    above = low
    for end in sorted(ends, key=lambda row: value_of[row]):
        factor = against_naive(end)
        if end.module != NAIVE and factor is not None:
            # Labels of lines that end close to each other stand one above the other.
            height = max(value_of[end], above * (high / low) ** CLOSEST)
            axes.annotate(
                f"{factor:.3g}x", (end.seqlen, height), xytext=(7, 0), textcoords="offset points", va="center",
                fontsize=8, color=colours[end.module],
            )  # fmt: skip
            above = height
    axes.set_title(label, fontsize=10, loc="left")
    axes.set_xlabel(f"sequence length; at the ends: {compared}", fontsize=9, color=FAINT)
    style(axes)
    axes.margins(x=0.12)
