"""The picture of the suite random: the speed of each row against its best baseline, rows in order of that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tileattn.bench.cases import DIRECTIONS
from tileattn.bench.draws.standing import LEAST, standings
from tileattn.bench.plot import COLOURS, FAINT, INK, literal, style
from tileattn.bench.results import Results

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LEGEND_COLUMNS = 4
LINES = (COLOURS["tileattn"], COLOURS["fa4"], COLOURS["cudnn"], COLOURS["flex"], COLOURS["eager"])


def save(measured: Results, path: Path) -> None:
    """Draws a result file; the suffix (.png, .svg, .pdf) chooses the format."""
    ratios = {name: list(each.ratios.values()) for name, each in standings(measured).items() if each.ratios}
    if not ratios:
        raise ValueError("no row has a baseline, so there is nothing to compare")
    draw({f"{DIRECTIONS[measured.direction]}, {measured.gpu}": ratios}).savefig(path, dpi=160, facecolor="white")


def draw(panels: Mapping[str, Mapping[str, Sequence[float]]]) -> Figure:
    """A panel for each title, a line for each set of ratios: at x % of it, x % of its rows are as slow or slower."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure = Figure(figsize=(7.2, 3.4), layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1))
    grid = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axes, (title, lines) in zip(grid, panels.items(), strict=True):
        for name, ratios in lines.items():
            share = [100 * (rank + 0.5) / len(ratios) for rank in range(len(ratios))]
            colour = LINES[list(lines).index(name) % len(LINES)]
            label = f"{name}: {len(ratios)} rows"
            axes.plot(share, sorted(ratios), label=label, color=colour, marker=".", markersize=4, linewidth=1.2)
        axes.axhline(1.0, color=INK, linewidth=0.8, zorder=1)
        axes.axhline(LEAST, color=FAINT, linewidth=0.8, linestyle=":", zorder=1)
        axes.set_title(title, fontsize=10.5, color=INK, loc="left")
        axes.set_xlabel("% of rows, the slowest first", fontsize=9, color=FAINT)
        # Below the axes: within them a legend lies on the lines at 1 and LEAST, or on the rows.
        axes.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=LEGEND_COLUMNS)
        style(axes)
    grid[0].set_ylabel("speed, × the best baseline's", fontsize=9, color=FAINT)
    return literal(figure)
