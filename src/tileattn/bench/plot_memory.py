"""The picture of `tileattn memory`: peak bytes of attention against the length, a line for each implementation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tileattn.bench.baselines.base import OWN
from tileattn.bench.cases import DIRECTIONS, DTYPES
from tileattn.bench.plot import FAINT, INK, LABELS, colours_of, length_label, literal, style
from tileattn.bench.results import Results, Row
from tileattn.measure.units import human_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_IN_A_ROW = 3  # names in the legend
CLOSEST = 1 / 18  # of the height: how close two numbers may be to each other


def save(results: Results, path: Path) -> None:
    """Draws the results into a file; its suffix (.png, .svg, .pdf) chooses the format."""
    draw(results).savefig(path, dpi=160, facecolor="white")


def draw(results: Results) -> Figure:
    """The figure. Its axes are logarithmic, so that linear memory is parallel to the line of the outputs."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure = Figure(figsize=(7.2, 4.6), layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1))
    axes = figure.add_subplot()
    lengths = sorted({row.seqlen_q for row in results.rows})
    _outputs(axes, results)
    for backend in reversed(results.backends()):
        _line(axes, results, backend)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    _ends(axes, results, last=lengths[-1])
    axes.set_xticks(lengths, [length_label(seqlen) for seqlen in lengths])
    axes.yaxis.set_major_formatter(lambda count, _: human_bytes(count).replace(".0 ", " "))
    axes.minorticks_off()
    axes.set_xlabel("sequence length", fontsize=9, color=FAINT)
    style(axes)
    row = results.rows[0]
    title = f"Peak memory of {DIRECTIONS[results.direction]}"
    shape = f"batch {row.batch}, {row.heads} heads, head dim {row.head_dim}, {row.variant}, {row.dtype}, {results.gpu}"
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(
        handles[::-1], labels[::-1], title=f"{title}\n{shape}", title_fontsize=10.5, loc="outside upper center",
        ncols=MOST_IN_A_ROW if len(labels) > MOST_IN_A_ROW else len(labels), frameon=False, fontsize=9,
    )  # fmt: skip
    return literal(figure)


def _rows(results: Results, backend: str) -> list[Row]:
    """The rows of one implementation, by length."""
    return sorted((row for row in results.rows if row.backend == backend), key=lambda row: row.seqlen_q)


def _line(axes: Axes, results: Results, backend: str) -> None:
    """Draws one implementation. tileattn has a broad line below the others, which may overlap it."""
    rows = _rows(results, backend)
    if not rows:
        return
    ours = backend == OWN
    axes.plot(
        [row.seqlen_q for row in rows], [row.peak_bytes for row in rows], color=colours_of(results.backends())[backend],
        label=LABELS.get(backend, backend), marker="o", markersize=8 if ours else 3.5, linewidth=5.0 if ours else 1.4,
        zorder=3 if ours else 4,
    )  # fmt: skip


def _ends(axes: Axes, results: Results, last: int) -> None:
    """What each line ends at: beside the last length, one above the other; earlier, that it does not go on.

    Lines that end at the same number lie on each other, so it has their names.
    """
    low, high = axes.get_ylim()
    apart = (high / low) ** CLOSEST
    free = low
    for (says, _), ends in _by_number(results).items():
        end, height = ends[0], float(ends[0].peak_bytes)
        place: dict[str, Any] = {"xytext": (-4, 5), "ha": "right"}
        if end.seqlen_q == last:
            names = [LABELS.get(row.backend, row.backend) for row in ends] if len(ends) > 1 else []
            says, half = "\n".join([says, *names]), apart ** ((1 + len(names)) / 2)
            height, place = max(height, free * half), {"xytext": (8, 0), "ha": "left", "va": "center"}
            free = height * half
        elif _out_of_memory(results, [row.backend for row in ends]):
            says += ", then out of memory"
        axes.annotate(says, (end.seqlen_q, height), textcoords="offset points", fontsize=8, color=INK, **place)


def _out_of_memory(results: Results, backends: Sequence[str]) -> bool:
    """Whether one of them did not go on for want of memory."""
    return any("OutOfMemory" in entry.reason for entry in results.failed if entry.backend in backends)


def _by_number(results: Results) -> dict[tuple[str, int], list[Row]]:
    """The last row of each implementation, the least memory first, by what is written there and its length."""
    ends = [rows[-1] for backend in results.backends() if (rows := _rows(results, backend))]
    ends_of: dict[tuple[str, int], list[Row]] = {}
    for end in sorted(ends, key=lambda row: row.peak_bytes):
        ends_of.setdefault((human_bytes(end.peak_bytes), end.seqlen_q), []).append(end)
    return ends_of


def _outputs(axes: Axes, results: Results) -> None:
    """Draws the bytes of the outputs, a lower bound. They are linear in the length, for comparing slopes."""
    rows = {row.seqlen_q: row for row in results.rows}
    lengths = sorted(rows)
    what = "o" if results.direction == "fwd" else "o, dq, dk and dv"
    axes.plot(
        lengths, [_output_bytes(rows[seqlen], results.direction) for seqlen in lengths], color=FAINT, linestyle=":",
        linewidth=1.2, label=f"{what} alone", zorder=2,
    )  # fmt: skip


def _output_bytes(row: Row, direction: str) -> int:
    case = row.as_case()
    o = case.seqlen_q * case.heads * case.head_dim_v
    gradients = case.seqlen_q * case.heads * case.head_dim
    gradients += case.seqlen_k * case.kv_heads * (case.head_dim + case.head_dim_v)
    return case.batch * (o + (gradients if direction != "fwd" else 0)) * DTYPES[case.dtype].itemsize
