"""A picture of a whole result file: a line per case, a dot per implementation, a column per quantity."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tileattn.bench.baselines.base import OWN
from tileattn.bench.cases import DIRECTIONS
from tileattn.bench.compare import best_baseline_ms, compare
from tileattn.bench.plot import FAINT, INK, LABELS, colours_of, legend_columns, literal
from tileattn.bench.report import ceiling_text
from tileattn.bench.results import Results, Row
from tileattn.measure.ceilings import overall
from tileattn.measure.units import human_bytes
from tileattn.viz.style import empty_figure, powers, titled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


MOST_LETTERS = 95  # of a line of the description
MOST_ON_A_LINE = 10  # dots of a case that are drawn on one line; more are spread vertically
MOST_TICKS = 3  # on an axis: more labels of memory do not fit


@dataclass(frozen=True)
class Column:
    """One column of the picture.

    title: of the column. value: the quantity of a row; None: the row has none. log: the base of a logarithmic axis, 0
    for a linear axis. label: formats a value.
    """

    title: str
    value: Callable[[Row], float | None]
    log: int = 0
    label: Callable[[float], str] = "{:g}".format


def draw_dashboard(results: Results) -> Figure:
    """Draws speed against the best baseline, share of the measured ceiling, error and memory of every case.

    Args:
        results: a result file, from `tileattn.bench.results.load`.

    Raises:
        ValueError: the file has no measurement.
    """
    if not results.rows:
        raise ValueError("nothing was measured, so there is nothing to draw")
    cases, columns = [case for case in results.cases() if any(r.case == case for r in results.rows)], _columns(results)
    width = max(1.5 * len(columns) + 1.6, 7.0)  # with four columns about as wide as a page's text
    names = [LABELS.get(backend, backend) for backend in results.backends()]
    ncols = legend_columns(names, width)
    lines = -(-len(names) // ncols)
    figure = empty_figure(width, 0.21 * len(cases) * _lines_of_a_case(len(names)) + 2.4 + 0.2 * lines)
    grid = figure.subplots(1, len(columns), sharey=True, squeeze=False)[0]
    for axes, column in zip(grid, columns):
        _dots(axes, column, results, cases)
    grid[0].set_yticks(range(len(cases)), cases)
    grid[0].set_ylim(len(cases) - 0.5, -0.5)
    handles, labels = grid[-1].get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        title=_description(results),
        title_fontsize=9,
        loc="outside upper center",
        ncols=ncols,
        frameon=False,
        fontsize=9,
    )
    return literal(figure)


def _lines_of_a_case(backends: int) -> float:
    """The height of a case, in lines: more dots than fit on one line are spread vertically."""
    return 1.0 if backends <= MOST_ON_A_LINE else backends / 2


def _offsets(backends: list[str]) -> dict[str, float]:
    """The vertical offset of each backend's dots from the middle of their case; 0 if all dots fit on one line."""
    if len(backends) <= MOST_ON_A_LINE:
        return dict.fromkeys(backends, 0.0)
    return {backend: 0.9 * (index + 0.5) / len(backends) - 0.45 for index, backend in enumerate(backends)}


def _columns(results: Results) -> list[Column]:
    """The columns that this file has data for: not every run has baselines, and a CPU's run has no ceilings."""
    cases = {row.case for row in results.rows}
    fastest = {case: ms for case in cases if (ms := best_baseline_ms(results, case)) is not None}
    columns = []
    if fastest:
        columns.append(
            Column("speed, best\nbaseline = 1", lambda row: fastest[row.case] / row.ms if row.case in fastest else None)
        )
    ceiling = overall(results.ceilings)
    if ceiling is not None:
        columns.append(
            Column("FLOP rate,\ncuBLAS = 100 %", lambda row: row.tflops / ceiling.matmul_tflops, label="{:.0%}".format)
        )
    else:
        unit, factor = ("TFLOPS", 1.0) if results.device == "cuda" else ("GFLOPS", 1e3)
        columns.append(Column(unit, lambda row: row.tflops * factor))
    columns.append(
        Column("largest error\nof a row", lambda row: row.error if row.error > 0 else None, 10, "{:.0e}".format)
    )
    # 0 bytes have no place on a logarithmic axis: a forward pass may allocate nothing beyond its output.
    columns.append(Column("peak memory", lambda row: row.peak_bytes or None, 2, human_bytes))
    return columns


def _dots(axes: Axes, column: Column, results: Results, cases: list[str]) -> None:
    titled(axes, column.title)
    colours, offsets = colours_of(results.backends()), _offsets(results.backends())
    for backend in results.backends():  # tileattn's dots are large and below the others, so that all can be seen
        ours = backend == OWN
        dots = [
            (value, cases.index(row.case) + offsets[backend])
            for row in results.rows
            if row.backend == backend and (value := column.value(row)) is not None
        ]
        axes.plot(
            [value for value, _ in dots], [line for _, line in dots], linestyle="", marker="D" if ours else "o",
            markersize=7 if ours else 4, color=colours[backend], label=LABELS.get(backend, backend),
            markeredgecolor="white", markeredgewidth=0.5, zorder=3 if ours else 4,
        )  # fmt: skip
    if column.log:
        values = [value for row in results.rows if (value := column.value(row)) is not None]
        if values:
            powers(axes, "x", column.log, min(values), max(values), MOST_TICKS)
    else:
        axes.margins(x=0.06)
        axes.set_xlim(left=0)
        axes.locator_params(axis="x", nbins=MOST_TICKS)
    if column.title.startswith("speed"):
        axes.axvline(1, color=INK, linewidth=0.8, zorder=1)
    axes.xaxis.set_major_formatter(lambda value, _: column.label(value).replace(".0 ", " "))
    axes.grid(axis="x", color="#E3E3E3", linewidth=0.6, zorder=0)
    axes.tick_params(labelsize=8)
    axes.tick_params(axis="x", colors=FAINT)


def _description(results: Results) -> str:
    """What was measured, on which device, with which versions; and the means of `tileattn bench`'s table."""
    dtypes = ", ".join(sorted({row.dtype for row in results.rows}))
    shown = ("tileattn", "tilelang", "torch", "cuda")
    versions = " · ".join(f"{name} {results.versions[name]}" for name in shown if name in results.versions)
    lines = [f"Attention {DIRECTIONS[results.direction]}, {dtypes}, {results.gpu}, {results.date[:10]}", versions]
    means = [f"{each.geometric_mean:.2f}× {LABELS.get(each.baseline, each.baseline)}" for each in compare(results)]
    if means:
        lines.append("tileattn's speed, geometric mean: " + ", ".join(means))
    if (ceiling := overall(results.ceilings)) is not None:
        lines.append(ceiling_text(ceiling))
    return "\n".join(textwrap.fill(line, MOST_LETTERS) for line in lines)
