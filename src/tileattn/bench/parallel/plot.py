"""The picture of the suite: the speed of tileattn, and of the best of PyTorch's, as a part of the ideal."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tileattn.bench.baselines.base import OWN
from tileattn.bench.cases import DIRECTIONS
from tileattn.bench.parallel.results import IDEAL, Results
from tileattn.bench.plot import COLOURS, FAINT, INK, literal, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BARS = {"tileattn": COLOURS["tileattn"], "PyTorch's context_parallel, its best": COLOURS["cudnn"]}
WIDTH = 0.4  # of a bar; a case has the width 1


def save(measured: Results, path: Path) -> None:
    """Draws a result file; the suffix (.png, .svg, .pdf) chooses the format."""
    draw(measured).savefig(path, dpi=160, facecolor="white")


def draw(measured: Results) -> Figure:
    """The figure, a panel for each direction. Raises `ValueError` if there is no row beside the ideal."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    directions = measured.directions()
    cases = [case for case in measured.cases() if any(measured.row(case, IDEAL, each) for each in directions)]
    if not cases:
        raise ValueError("no case has the ideal, so there is nothing to compare")
    figure = Figure(
        figsize=(7.2, 1.1 + len(directions) * (0.7 + 0.3 * len(cases))),
        layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1),
    )
    grid = figure.subplots(len(directions), 1, squeeze=False, sharex=True)[:, 0]
    for axes, direction in zip(grid, directions, strict=True):
        _panel(axes, measured, cases, direction)
    grid[-1].set_xlabel("% of the ideal: as many GPUs, each with its part of the heads, no communication", fontsize=9)
    handles, labels = grid[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=2, frameon=False, fontsize=9)
    return literal(figure)


def _panel(axes: Axes, measured: Results, cases: list[str], direction: str) -> None:
    for number, (label, colour) in enumerate(BARS.items()):
        places, values = [], []
        for place, case in enumerate(cases):
            own = number == 0
            row = measured.row(case, OWN, direction) if own else measured.best_of_pytorch(case, direction)
            ratio = None if row is None else measured.of_ideal(row)
            if ratio is not None:
                places.append(place + (number - 0.5) * WIDTH)
                values.append(100 * ratio)
        bars = axes.barh(places, values, WIDTH, color=colour, label=label)
        axes.bar_label(bars, fmt="%.0f", fontsize=8, padding=2, color=INK)
    axes.axvline(100, color=FAINT, linewidth=0.8, linestyle=(0, (4, 3)))
    axes.set_yticks(range(len(cases)), cases, fontsize=8.5)
    axes.invert_yaxis()
    axes.set_title(f"{DIRECTIONS[direction]}, {measured.ranks} x {measured.gpu}", fontsize=10.5, color=INK, loc="left")
    style(axes)
    axes.grid(visible=False, axis="y")
