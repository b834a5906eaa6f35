"""Time and peak memory against the sequence length, from a result file of `tileattn bench` or `tileattn memory`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tileattn.bench.baselines.base import OWN
from tileattn.bench.cases import DIRECTIONS
from tileattn.bench.plot import LABELS, Panel, by_length, colours_of, legend_columns, length_label, literal
from tileattn.bench.results import Results, Row
from tileattn.measure.units import human_bytes
from tileattn.viz.style import empty_figure, heading, powers, titled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw_lengths(results: Results, variant: str | None = None) -> Figure:
    """Draws a column per head dim and variant that was measured at three lengths or more: time above memory.

    All axes are logarithmic. A line of slope 1 means linear growth with the length, slope 2 quadratic growth.

    Args:
        results: a result file, from `tileattn.bench.results.load`.
        variant: "full" or "causal"; None: both.

    Raises:
        ValueError: no such case was measured at three lengths.
    """
    columns = [panel for (name, _), panel in sorted(by_length(results.rows).items()) if variant in (None, name)]
    if not columns:
        raise ValueError(f"no {variant or 'full or causal'} case was measured at three lengths or more")
    figure = empty_figure(max(2.4 * len(columns), 6.6), 5.8)
    grid = figure.subplots(2, len(columns), sharex="col", sharey="row", squeeze=False)
    for j, panel in enumerate(columns):
        rows = _rows(results, panel)
        tokens = "" if len({row.batch for row in rows}) == 1 else "\n(batch x length constant)"
        _lines(grid[0][j], results, rows, lambda row: row.ms)
        titled(grid[0][j], panel.title + tokens, "", "milliseconds" if j == 0 else "")
        _lines(grid[1][j], results, rows, lambda row: max(row.peak_bytes, 1))
        titled(grid[1][j], "", "sequence length", "peak memory beyond the inputs" if j == 0 else "")
        lengths = sorted({row.seqlen_q for row in rows})
        for axes in (grid[0][j], grid[1][j]):
            axes.set_xscale("log", base=2)
            axes.set_xticks(lengths, [length_label(length) for length in lengths])
            axes.minorticks_off()
    shown = [row for panel in columns for row in _rows(results, panel)]
    powers(grid[0][0], "y", 10, min(row.ms for row in shown), max(row.ms for row in shown))
    low, high = (bound(max(row.peak_bytes, 1) for row in shown) for bound in (min, max))
    powers(grid[1][0], "y", 2, low / 2, high * 2)
    grid[0][0].yaxis.set_major_formatter(lambda ms, _: f"{ms:g}")
    grid[1][0].yaxis.set_major_formatter(lambda count, _: human_bytes(count).replace(".0 ", " "))
    handles, labels = grid[0][0].get_legend_handles_labels()
    ncols = min(legend_columns(labels, figure.get_figwidth()), 4)
    figure.legend(handles, labels, loc="outside lower center", ncols=ncols, frameon=False, fontsize=9)
    dtypes = ", ".join(sorted({row.dtype for row in results.rows}))
    heading(figure, "Time and memory against length", f"{DIRECTIONS[results.direction]}, {dtypes}, {results.gpu}")
    return literal(figure)


def _rows(results: Results, panel: Panel) -> list[Row]:
    cases = {case for _, case in panel.groups}
    return sorted((row for row in results.rows if row.case in cases), key=lambda row: row.seqlen_q)


def _lines(axes: Axes, results: Results, rows: list[Row], value: Callable[[Row], float]) -> None:
    colours = colours_of(results.backends())
    for backend in results.backends():  # tileattn's line is broad and below the others, so that all can be seen
        own = [row for row in rows if row.backend == backend]
        ours = backend == OWN
        axes.plot(
            [row.seqlen_q for row in own], [value(row) for row in own], color=colours[backend],
            label=LABELS.get(backend, backend), marker="D" if ours else "o", markersize=7 if ours else 3,
            linewidth=4.5 if ours else 1.3, zorder=3 if ours else 4,
        )  # fmt: skip
