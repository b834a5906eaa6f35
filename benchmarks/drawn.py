"""The data that a matplotlib figure shows, kept in its PNG: numbers and words, but not where and how they are drawn.

Two versions of matplotlib draw one figure with different pixels. The data stay the same as long as the result files do,
so a test can tell a picture that is out of date.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dark
import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure
    from matplotlib.legend import Legend

KEY = "Data"  # of the PNG's text chunk
DIGITS = 6


def save(figure: Figure, path: Path, dpi: int = 160) -> None:
    """Write the figure as a PNG that carries its data, and beside it the one for dark pages (`dark.beside`)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = {KEY: json.dumps(data_of(figure))}
    figure.set_facecolor("white")
    figure.savefig(path, dpi=dpi, metadata=metadata)
    dark.darken(figure).savefig(dark.beside(path), dpi=dpi, metadata=metadata)


def data_in(path: Path) -> Any:
    """The data that a PNG of `save` carries; KeyError where there are none."""
    from PIL import Image

    with Image.open(path) as image:
        return json.loads(image.text[KEY])  # type: ignore[attr-defined]


def data_of(figure: Figure) -> dict[str, Any]:
    """The data of all axes, of the legends and of the figure's own texts, as JSON values."""
    from matplotlib.text import Text

    return {
        "axes": [_of_axes(axes) for axes in figure.axes],
        "legends": [_legend(legend) for legend in figure.legends],
        "texts": [
            text for text in (figure.get_suptitle(), figure.get_supxlabel(), *map(Text.get_text, figure.texts)) if text
        ],
    }


def _of_axes(axes: Axes) -> dict[str, Any]:
    from matplotlib.container import BarContainer
    from matplotlib.patches import StepPatch

    bars = [each for each in axes.containers if isinstance(each, BarContainer)]
    steps = [each for each in axes.patches if isinstance(each, StepPatch)]
    arrays = [each.get_array() for each in (*axes.images, *axes.collections)]
    legend = axes.get_legend()
    data = {
        "titles": [text for place in ("left", "center") if (text := axes.get_title(loc=place))],
        "labels": [axes.get_xlabel(), axes.get_ylabel()],
        "ticks": [_named_ticks(axis) for axis in (axes.xaxis, axes.yaxis)],
        "lines": [
            {"label": line.get_label(), "x": numbers(line.get_xdata()), "y": numbers(line.get_ydata())}
            for line in axes.lines
        ],
        "bars": [
            {
                "label": each.get_label(),
                "from": [numbers(bar.get_xy()) for bar in each],
                "size": [numbers((bar.get_width(), bar.get_height())) for bar in each],
            }
            for each in bars
        ],
        "steps": [
            {"values": numbers(each.get_data().values), "edges": numbers(each.get_data().edges)} for each in steps
        ],
        "arrays": [numbers(np.ma.filled(array, math.nan).ravel()) for array in arrays if array is not None],
        "texts": [text.get_text() for text in axes.texts],
        "legend": _legend(legend) if legend else [],
    }
    return {name: value for name, value in data.items() if value}


def _legend(legend: Legend) -> list[str]:
    return [legend.get_title().get_text(), *(text.get_text() for text in legend.get_texts())]


def _named_ticks(axis: Axis) -> list[str]:
    """The names of ticks that were set one by one; those that matplotlib chooses depend on its version."""
    from matplotlib.ticker import FixedLocator

    if not isinstance(axis.get_major_locator(), FixedLocator):
        return []
    return [label.get_text() for label in axis.get_ticklabels()]


def numbers(values: Iterable[Any]) -> list[float | None]:
    """Rounded, and None for NaN."""
    return [None if math.isnan(value) else float(f"{value:.{DIGITS}g}") for value in map(float, values)]
