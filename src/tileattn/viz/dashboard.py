"""A whole result file at a glance: a line for each case, a dot for each implementation, a column for each question."""

from __future__ import annotations

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


MOST_ON_A_LINE = 10  # dots of a case
MOST_TICKS = 5  # of a logarithmic axis: more labels of memory do not fit


@dataclass(frozen=True)
class Column:
    """One question.

    title: what is asked. answer: for a row; None: there is none. log: the base of a logarithmic axis, 0 for a linear
    one. label: how an answer is written.
    """

    title: str
    answer: Callable[[Row], float | None]
    log: int = 0
    label: Callable[[float], str] = "{:g}".format


def draw_dashboard(results: Results) -> Figure:
    """Speed against the best baseline, share of the measured ceiling, error and memory of every case of a result file.

    Args:
        results: of `tileattn.bench.results.load`.

    Raises:
        ValueError: the file has no measurement.
    """
    if not results.rows:
        raise ValueError("nothing was measured, so there is nothing to draw")
    cases, columns = [case for case in results.cases() if any(r.case == case for r in results.rows)], _columns(results)
    width = 3.1 * len(columns) + 2.6
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
        title=_words(results),
        title_fontsize=10,
        loc="outside upper center",
        ncols=ncols,
        frameon=False,
        fontsize=9.5,
    )
    return literal(figure)


def _lines_of_a_case(backends: int) -> float:
    """How high a case is, in lines: more dots than can lie on one are spread."""
    return 1.0 if backends <= MOST_ON_A_LINE else backends / 2


def _places(backends: list[str]) -> dict[str, float]:
    """How far below the middle of its case a backend's dots are: nowhere, where all of them may lie on one line."""
    if len(backends) <= MOST_ON_A_LINE:
        return dict.fromkeys(backends, 0.0)
    return {backend: 0.9 * (index + 0.5) / len(backends) - 0.45 for index, backend in enumerate(backends)}


def _columns(results: Results) -> list[Column]:
    """The questions that this file answers: not every run has baselines, and a CPU's has no ceilings."""
    cases = {row.case for row in results.rows}
    fastest = {case: ms for case in cases if (ms := best_baseline_ms(results, case)) is not None}
    found = []
    if fastest:
        found.append(
            Column("speed, best baseline = 1", lambda row: fastest[row.case] / row.ms if row.case in fastest else None)
        )
    ceiling = overall(results.ceilings)
    if ceiling is not None:
        found.append(
            Column("FLOP rate, cuBLAS = 100 %", lambda row: row.tflops / ceiling.matmul_tflops, label="{:.0%}".format)
        )
    else:
        unit, factor = ("TFLOPS", 1.0) if results.device == "cuda" else ("GFLOPS", 1e3)
        found.append(Column(unit, lambda row: row.tflops * factor))
    found.append(
        Column("largest error of a row", lambda row: row.error if row.error > 0 else None, 10, "{:.0e}".format)
    )
    # A forward pass in 16 bits may need nothing beyond its output.
    found.append(Column("peak memory", lambda row: row.peak_bytes or None, 2, human_bytes))
    return found


def _dots(axes: Axes, column: Column, results: Results, cases: list[str]) -> None:
    titled(axes, column.title)
    colours, places = colours_of(results.backends()), _places(results.backends())
    for backend in results.backends():  # ours is drawn first and large, so that dots upon it can be seen
        ours = backend == OWN
        found = [
            (value, cases.index(row.case) + places[backend])
            for row in results.rows
            if row.backend == backend and (value := column.answer(row)) is not None
        ]
        axes.plot(
            [value for value, _ in found], [place for _, place in found], linestyle="", marker="D" if ours else "o",
            markersize=8 if ours else 5, color=colours[backend], label=LABELS.get(backend, backend),
            markeredgecolor="white", markeredgewidth=0.5, zorder=3 if ours else 4,
        )  # fmt: skip
    if column.log:
        answers = [value for row in results.rows if (value := column.answer(row)) is not None]
        if answers:
            powers(axes, "x", column.log, min(answers), max(answers), MOST_TICKS)
    else:
        axes.margins(x=0.06)
        axes.set_xlim(left=0)
    if column.title.startswith("speed"):
        axes.axvline(1, color=INK, linewidth=0.8, zorder=1)
    axes.xaxis.set_major_formatter(lambda value, _: column.label(value).replace(".0 ", " "))
    axes.grid(axis="x", color="#E3E3E3", linewidth=0.6, zorder=0)
    axes.tick_params(labelsize=8)
    axes.tick_params(axis="x", colors=FAINT)


def _words(results: Results) -> str:
    """What was measured on what, and the means that the table of `tileattn bench` ends with."""
    dtypes = ", ".join(sorted({row.dtype for row in results.rows}))
    shown = ("tileattn", "tilelang", "torch", "cuda")
    versions = " · ".join(f"{name} {results.versions[name]}" for name in shown if name in results.versions)
    lines = [f"Attention {DIRECTIONS[results.direction]}, {dtypes}, {results.gpu}, {results.date[:10]} · {versions}"]
    means = [f"{each.geometric_mean:.2f}× {LABELS.get(each.baseline, each.baseline)}" for each in compare(results)]
    if means:
        lines.append("tileattn's speed, geometric mean: " + ", ".join(means))
    if (ceiling := overall(results.ceilings)) is not None:
        lines.append(ceiling_text(ceiling))
    return "\n".join(lines)
