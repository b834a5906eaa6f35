"""The picture of a result file of the suite decode: bandwidth over the bytes of K and V, a panel for each head count.

A column of panels for each kind of cache whose rows all ran. The dashed line is the copy ceiling of the run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tileattn.bench.baselines.base import OWN
from tileattn.bench.decode.ceilings import overall
from tileattn.bench.decode.results import Results
from tileattn.bench.decode.rows import Row
from tileattn.bench.plot import COLOURS, FAINT, INK, literal, style

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LABELS = {
    "tileattn-planning": "tileattn, planning in each call",
    "tileattn-fixed": "tileattn, FixedSplit(1024)",
    "fa3": "FlashAttention-3",
    "fa2": "FlashAttention-2 (SDPA)",
    "cudnn": "cuDNN (SDPA)",
    "flashinfer": "FlashInfer",
    "xqa": "XQA (TensorRT-LLM)",
    "sdpa": "PyTorch SDPA",
}
MARKERS = {"fa3": "s", "fa2": "v", "cudnn": "^", "flashinfer": "D", "xqa": "P", "sdpa": "v"}
OTHER_COLOURS = {"fa3": "#0072B2", "flashinfer": "#E69F00", "xqa": "#CC79A7"}
MIB = 2**20
TICKS = ((1, "1 MB"), (16, "16 MB"), (256, "256 MB"), (4096, "4 GB"), (65536, "64 GB"))
PAGES = (16, 0)


def draw(results: Results) -> Figure:
    """The figure, without pyplot. Raises `ValueError` if there are no rows with pages of 16 or contiguous caches."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    rows = [row for row in results.rows if row.page in PAGES]
    heads = list(dict.fromkeys((row.heads, row.kv_heads) for row in rows))
    pages = [page for page in PAGES if any(row.page == page for row in rows)]
    if not rows:
        raise ValueError("there are no rows with pages of 16 or contiguous caches to draw")
    figure = Figure(
        figsize=(3.3 * len(pages) + 0.6, 2.1 * len(heads) + 1.4), layout=ConstrainedLayoutEngine(h_pad=0.08, w_pad=0.1)
    )
    ceiling = overall(results.ceilings)
    shared: Axes | None = None
    for i, (count, kv_heads) in enumerate(heads):
        for j, page in enumerate(pages):
            axes = figure.add_subplot(len(heads), len(pages), i * len(pages) + j + 1, sharex=shared, sharey=shared)
            shared = shared or axes
            of_panel = [row for row in rows if (row.heads, row.kv_heads, row.page) == (count, kv_heads, page)]
            _panel(axes, of_panel, results.backends, ceiling[0] if ceiling else None)
            kind = f"pages of {page}" if page else "contiguous caches"
            axes.set_title(f"{count} query heads, {kv_heads} KV heads,\n{kind}", fontsize=9.5, color=INK, loc="left")
            if j == 0:
                axes.set_ylabel("GB/s of K and V", fontsize=9, color=FAINT)
            if i == len(heads) - 1:
                axes.set_xlabel("K and V of a call", fontsize=9, color=FAINT)
    _legend(figure, results)
    return literal(figure)


def _panel(axes: Axes, rows: list[Row], backends: list[str], ceiling: float | None) -> None:
    for backend in [OWN, *(each for each in backends if each in MARKERS)]:  # smaller ones lie on tileattn's
        points = [(row.kv_bytes / MIB, row.gbps) for row in rows if row.backend == backend]
        if not points:
            continue  # nor does the legend name it, if it ran in no row
        own = backend == OWN
        axes.plot(
            [x for x, _ in points],
            [y for _, y in points],
            linestyle="none",
            marker="o" if own else MARKERS[backend],
            markersize=6.5 if own else 4.5,
            color=OTHER_COLOURS.get(backend, COLOURS.get(backend, FAINT)),
            markerfacecolor=None if own else "none",
            label=LABELS.get(backend, backend),
            zorder=3 if own else 4,
        )
    if ceiling is not None:
        axes.axhline(ceiling, color=FAINT, linewidth=0.9, linestyle=(0, (4, 3)), label="a copy", zorder=2)
    axes.set_xscale("log", base=2)
    axes.set_xticks([x for x, _ in TICKS], [label for _, label in TICKS])
    axes.minorticks_off()
    style(axes)
    axes.set_ylim(bottom=0)


def _legend(figure: Figure, results: Results) -> None:
    handles: dict[str, Artist] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    names = sorted(handles, key=lambda label: label != OWN)
    figure.legend(
        [handles[name] for name in names],
        names,
        title=f"Decoding, one query per sequence, {results.dtype}, {results.gpu}",
        title_fontsize=12,
        loc="outside upper center",
        ncols=max(1, min(3, len(names))),
        frameon=False,
        fontsize=9,
    )
    figure.supxlabel(results.date[:10], fontsize=8, color=FAINT)
