"""What all pictures share: an empty figure, colours, titles. The benchmark's pictures have the same style."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tileattn.bench.plot import FAINT, INK, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

# Okabe and Ito's palette, safe for colour-blind readers; the three also differ in lightness, for a print in grey.
BLUE, ORANGE, LIGHT, RED, GREEN = "#0072B2", "#E69F00", "#EDEDED", "#D55E00", "#009E73"
# From dark to light without turning back, and the same to a colour-blind reader.
SEQUENTIAL = "cividis"
MOST_TICKS = 9
# Up to so many tiles on a side, lines between them can be told apart.
MOST_LINES = 64


def empty_figure(width: float, height: float) -> Figure:
    """A figure without pyplot: no display is needed and no global state is left behind. Sizes in inches."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("pictures need matplotlib: pip install 'tileattn[plot]'") from error

    return Figure(figsize=(width, height), dpi=160, layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1, wspace=0.05))


def titled(axes: Axes, title: str, xlabel: str = "", ylabel: str = "") -> None:
    """Title and labels of a panel, and the frame that all panels have."""
    style(axes)
    axes.set_title(title, fontsize=10.5, color=INK, loc="left")
    axes.set_xlabel(xlabel, fontsize=9, color=FAINT)
    axes.set_ylabel(ylabel, fontsize=9, color=FAINT)


def heading(figure: Figure, title: str, below: str = "") -> None:
    """The figure's title, and in smaller letters what it is of."""
    # One text, for the layout makes room for no more; the second size is that of the smaller lines.
    figure.suptitle(f"{title}\n{below}" if below else title, fontsize=10, color=INK)


def counted(count: int, one: str, many: str = "") -> str:
    """As in "1 key" and "2 keys"; `many` is the plural where it takes more than an s."""
    return f"{count} {one if count == 1 else many or one + 's'}"


def integer_ticks(*axes: Axis) -> None:
    """Ticks at whole numbers, as many as have room, be it one alone: there is no query 2.5."""
    from matplotlib.ticker import MaxNLocator

    for axis in axes:
        axis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))


def powers(axes: Axes, which: str, base: int, low: float, high: float, most: int = MOST_TICKS) -> None:
    """A logarithmic axis ("x" or "y") from low to high; ticks at powers of 2, or at 1, 2 and 5 times those of 10."""
    ticks = _ticks(base, low, high, most)
    getattr(axes, f"set_{which}scale")("log", base=base)
    getattr(axes, f"set_{which}ticks")(ticks)
    axes.minorticks_off()
    # A little beyond the outermost ticks, where dots would be cut.
    getattr(axes, f"set_{which}lim")(ticks[0] * 0.93, ticks[-1] * 1.07)


def _ticks(base: int, low: float, high: float, most: int) -> list[float]:
    """At most so many that enclose low and high, and at least two, as far from each other as all their neighbours."""
    steps = (1.0,) if base == 2 else (1.0, 2.0, 5.0)
    first, last = math.floor(math.log(low, base)), math.ceil(math.log(high, base)) + 1
    # Some beyond: where not every power has a tick, the last one may be higher than it need be.
    found = [step * float(base) ** power for power in range(first, 2 * last - first + most) for step in steps]
    begin = max(i for i, tick in enumerate(found) if tick <= low)
    end = min(i for i, tick in enumerate(found) if tick >= high and i > begin)
    every = -(-(end - begin) // (most - 1))
    count = -(-(end - begin) // every)
    return found[begin : begin + count * every + 1 : every]
