"""The picture of a result file: speed as bars, with the same colour for a backend in every picture.

Panels: full and causal by head dim, over sequence lengths, where a run has at least three lengths; then one for each
shape with at least three variants; then one for all other cases. Speed is in FLOPs per second (`Case.flops` over the
median time), on a GPU and a CPU alike. Unlike milliseconds, it can be compared across lengths on one linear axis.
"""

from __future__ import annotations

import colorsys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tileattn.bench.cases import DIRECTIONS
from tileattn.bench.results import Results, Row
from tileattn.installation import pip_install

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, safe for colour-blind readers, with a grey and an indigo (Paul Tol) for PyTorch's own,
# and more of Tol's for those that came later.
COLOURS = {
    "tileattn": "#D55E00",
    "tileattn-bf16": "#E69F00",
    "tileattn-dense": "#CC6677",
    "tileattn-deterministic": "#AA4499",
    "fa2": "#56B4E9",
    "cudnn": "#009E73",
    "fa2-varlen": "#44AA99",
    "fa4": "#0072B2",
    "flex": "#CC79A7",
    "sdpa": "#332288",
    "efficient": "#F0E442",
    "eager": "#999999",
    "triton": "#882255",
    "triton-tutorial": "#DDCC77",
}
LABELS = {
    "tileattn-bf16": "tileattn in bf16",
    "tileattn-dense": "tileattn, not packed",
    "tileattn-deterministic": "tileattn, deterministic",
    "fa2": "FlashAttention-2 (SDPA)",
    "cudnn": "cuDNN (SDPA)",
    "fa2-varlen": "FlashAttention-2 (PyTorch)",
    "fa4": "FlashAttention-4",
    "flex": "FlexAttention",
    "sdpa": "PyTorch SDPA",
    "efficient": "memory-efficient (SDPA)",
    "eager": "PyTorch eager",
    "triton": "tileattn in Triton",
    "triton-tutorial": "Triton's tutorial",
}
INK, FAINT = "#222222", "#777777"
# One turn of the colour wheel times this leads to the next unknown backend: no two of them come close soon.
GOLDEN = 0.618034
ENOUGH_FOR_A_PANEL = 3
GROUPS_PER_COLUMN = 3
# More than these to a column, and the names of variants run into each other.
MOST_GROUPS_PER_COLUMN = 5


def colours_of(backends: Sequence[str]) -> dict[str, str]:
    """The colour of each backend of a file: that of `COLOURS`, or a generated one, such as for the ladder's rungs."""
    colours = {name: COLOURS[name] for name in backends if name in COLOURS}
    for index, name in enumerate(sorted(set(backends) - set(colours))):
        # Light, middling and dark in turns, for hues alone tell few apart.
        rgb = colorsys.hls_to_rgb(index * GOLDEN % 1, (0.42, 0.65, 0.28)[index % 3], 0.75)
        colours[name] = "#" + "".join(f"{round(255 * part):02X}" for part in rgb)
    return colours


def legend_columns(labels: Sequence[str], width: float) -> int:
    """The number of columns of a legend as wide as a figure: one for each name where they fit."""
    inches = [0.5 + 0.085 * len(label) for label in labels]
    return len(labels) if sum(inches) <= width else max(1, int(width / max(inches)))


@dataclass(frozen=True)
class Panel:
    """One set of axes: its title, the label of its x axis, and each group of bars: its label and its case's name."""

    title: str
    xlabel: str
    groups: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Layout:
    """Rows of panels that share a scale (full above causal, or side by side), then panels in rows of their own."""

    grid: list[list[Panel]]
    wide: list[Panel]

    @property
    def columns(self) -> int:
        if self.grid:
            return max(len(line) for line in self.grid)
        return max(2, *(-(-len(panel.groups) // MOST_GROUPS_PER_COLUMN) for panel in self.wide))


def save(results: Results, path: Path) -> None:
    """Draws the results into a file; its suffix (.png, .svg, .pdf) chooses the format."""
    if not results.rows:
        raise ValueError("nothing was measured, so there is nothing to draw")
    draw(results).savefig(path, dpi=160, facecolor="white")


def draw(results: Results) -> Figure:
    """The figure, without pyplot: no display is needed and no global state is left behind."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"plots need matplotlib: {pip_install('plot')}") from error

    plan = layout(results)
    lines = len(plan.grid) + len(plan.wide)
    figure = Figure(
        figsize=(4.7 * max(2, plan.columns), 2.7 * lines + 1.2), layout=ConstrainedLayoutEngine(h_pad=0.1, w_pad=0.1)
    )
    spec = figure.add_gridspec(lines, plan.columns)
    shared: Axes | None = None
    for i, line in enumerate(plan.grid):
        for j, panel in enumerate(line):
            axes = figure.add_subplot(spec[i, j], sharey=shared)
            shared = shared or axes
            _panel(axes, panel, results, slots=len(panel.groups), first=j == 0)
    for i, panel in enumerate(plan.wide, start=len(plan.grid)):
        # Few groups take fewer columns, so that their bars are about as wide as those above.
        span = min(plan.columns, -(-len(panel.groups) // GROUPS_PER_COLUMN))
        slots = max(len(panel.groups), GROUPS_PER_COLUMN * span)
        _panel(figure.add_subplot(spec[i, :span]), panel, results, slots=slots, first=True)
    _titles(figure, results)
    return literal(figure)


def literal(figure: Figure) -> Figure:
    """The figure with "$" in names taken literally, which matplotlib would read as mathematics."""
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        text.set_parse_math(False)
    return figure


def layout(results: Results) -> Layout:
    """The layout of a result file's cases."""
    rows = {row.case: row for row in results.rows}
    lengths = by_length(rows.values())
    shown = {case for panel in lengths.values() for _, case in panel.groups}
    by_shape = _by_shape(row for row in rows.values() if row.case not in shown)
    shown |= {case for panel in by_shape for _, case in panel.groups}
    rest = tuple((_in_lines(case), case) for case in rows if case not in shown)
    lines = [[panel for key, panel in sorted(lengths.items()) if key[0] == v] for v in ("full", "causal")]
    grid = [line for line in lines if line]
    if all(len(line) == 1 for line in grid):
        grid = [[panel for line in grid for panel in line]] if grid else []
    return Layout(grid, [*by_shape, *([Panel("other cases (batch, seqlen, heads)", "", rest)] if rest else [])])


def by_length(rows: Iterable[Row]) -> dict[tuple[str, int], Panel]:
    """Panels of plain self-attention over lengths, by (variant, head dim); the first case of a length stands for it."""
    lengths_of: dict[tuple[str, int], dict[int, str]] = {}
    for row in rows:
        square = row.seqlen_q == row.seqlen_k and row.heads == row.kv_heads and row.head_dim == row.head_dim_v
        if square and not row.packing and row.variant in ("full", "causal"):
            lengths_of.setdefault((row.variant, row.head_dim), {}).setdefault(row.seqlen_q, row.case)
    return {
        (variant, head_dim): Panel(
            f"head dim {head_dim}, {variant}",
            "sequence length",
            tuple((length_label(seqlen), case) for seqlen, case in sorted(lengths.items())),
        )
        for (variant, head_dim), lengths in lengths_of.items()
        if len(lengths) >= ENOUGH_FOR_A_PANEL
    }


def _by_shape(rows: Iterable[Row]) -> list[Panel]:
    """Panels of the variants of one shape."""
    groups_of: dict[str, list[tuple[str, str]]] = {}
    for row in rows:
        groups_of.setdefault(_shape(row), []).append((_in_lines(row.variant), row.case))
    panels = [Panel(title, "", tuple(groups)) for title, groups in groups_of.items()]
    return [panel for panel in panels if len(panel.groups) >= ENOUGH_FOR_A_PANEL]


def _shape(row: Row) -> str:
    """A shape in words: "head dim 128, batch 4, 4096 tokens, 32 heads (8 of k and v)"."""
    head_dim = f"{row.head_dim}" if row.head_dim == row.head_dim_v else f"{row.head_dim}/{row.head_dim_v}"
    seqlen = f"{row.seqlen_q}" if row.seqlen_q == row.seqlen_k else f"{row.seqlen_q} on {row.seqlen_k}"
    kv_heads = "" if row.heads == row.kv_heads else f" ({row.kv_heads} of k and v)"
    packing = f", {row.packing}" if row.packing else ""
    return f"head dim {head_dim}, batch {row.batch}, {seqlen} tokens, {row.heads} heads{kv_heads}{packing}"


def length_label(seqlen: int) -> str:
    """16k for 16384."""
    return f"{seqlen // 1024}k" if seqlen % 1024 == 0 else str(seqlen)


def _in_lines(name: str) -> str:
    """A name broken into lines, to stand under its bars."""
    return name.replace(" ", "\n").replace("+", "\n+ ")


def _panel(axes: Axes, panel: Panel, results: Results, slots: int, first: bool) -> None:
    """Draw a panel, with room for `slots` groups; `first` on its line, it names the unit."""
    backends = results.backends()
    colours = colours_of(backends)
    unit, per_unit = ("TFLOPS", 1.0) if results.device == "cuda" else ("GFLOPS", 1e3)
    width = 0.84 / len(backends)
    for index, backend in enumerate(backends):
        offset = (index - (len(backends) - 1) / 2) * width
        bars = [(x + offset, results.row(case, backend)) for x, (_, case) in enumerate(panel.groups)]
        _bars(
            axes, [(x, row.tflops * per_unit) for x, row in bars if row is not None], width, backend, colours[backend]
        )
    axes.set_xlim(-0.5, slots - 0.5)
    axes.set_xticks(range(len(panel.groups)), [label for label, _ in panel.groups])
    axes.set_title(panel.title, fontsize=10.5, color=INK, loc="left")
    axes.set_xlabel(panel.xlabel, fontsize=9, color=FAINT)
    if first:
        axes.set_ylabel(f"{unit} (higher is better)", fontsize=9, color=FAINT)
    style(axes)


def _bars(axes: Axes, bars: list[tuple[float, float]], width: float, backend: str, colour: str) -> None:
    """Bars at (x, height) with their heights written above, tileattn's own in bold."""
    xs, heights = [x for x, _ in bars], [height for _, height in bars]
    label = LABELS.get(backend, backend)
    drawn = axes.bar(xs, heights, width * 0.92, color=colour, label=label, zorder=2)
    weight = "bold" if backend == "tileattn" else "normal"
    texts = [f"{height:.0f}" if height >= 10 else f"{height:.1f}" for height in heights]
    axes.bar_label(drawn, texts, rotation=90, fontsize=6.5, color=INK, padding=2, fontweight=weight)


def style(axes: Axes) -> None:
    """Frame, grid and ticks of every panel."""
    # Room for the figures above the bars.
    axes.margins(y=0.18)
    axes.grid(axis="y", color="#E3E3E3", linewidth=0.6, zorder=0)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, labelsize=8.5, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#AAAAAA")


def _titles(figure: Figure, results: Results) -> None:
    """Above, what was measured on what, and the legend; below, with which versions and when."""
    shown = ("tileattn", "tilelang", "torch", "cuda", "cudnn")
    named = [f"{name} {results.versions[name]}" for name in shown if name in results.versions]
    figure.supxlabel(" · ".join([results.date[:10], *named]), fontsize=8, color=FAINT)
    handles: dict[str, Artist] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    dtypes = ", ".join(sorted({row.dtype for row in results.rows}))
    figure.legend(
        list(handles.values()),
        list(handles),
        # The legend's own title, because a figure's title and an outside legend would be drawn over each other.
        title=f"Attention {DIRECTIONS[results.direction]}, {dtypes}, {results.gpu}",
        title_fontsize=13,
        loc="outside upper center",
        ncols=legend_columns(list(handles), figure.get_figwidth()),
        frameon=False,
        fontsize=9.5,
    )
