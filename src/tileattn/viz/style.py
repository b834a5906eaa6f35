"""Figures, colours, titles and axes that all pictures share. The benchmark's pictures use the same style."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tileattn.bench.plot import FAINT, INK, style
from tileattn.installation import pip_install

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

# Okabe and Ito's palette, which colour-blind readers can tell apart. BLUE, ORANGE and LIGHT also differ in grey prints.
BLUE, ORANGE, LIGHT, RED, GREEN = "#0072B2", "#E69F00", "#EDEDED", "#D55E00", "#009E73"
# Lightness grows steadily, and colour-blind readers see the same order.
SEQUENTIAL = "cividis"
MOST_TICKS = 9
# The most tiles on a side between which lines are drawn; with more, the lines would merge.
MOST_LINES = 64


def empty_figure(width: float, height: float) -> Figure:
    """An empty figure without pyplot, so that it needs no display and leaves no global state. Sizes in inches."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"pictures need matplotlib: {pip_install('plot')}") from error

    return Figure(figsize=(width, height), dpi=160, layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1, wspace=0.05))


def titled(axes: Axes, title: str, xlabel: str = "", ylabel: str = "") -> None:
    """Sets a panel's title, labels and frame."""
    style(axes)
    axes.set_title(title, fontsize=10.5, color=INK, loc="left")
    axes.set_xlabel(xlabel, fontsize=9, color=FAINT)
    axes.set_ylabel(ylabel, fontsize=9, color=FAINT)


def heading(figure: Figure, title: str, below: str = "") -> None:
    """Sets the figure's title and, on the lines below it, a description."""
    # One text, because the layout makes room for one only.
    figure.suptitle(f"{title}\n{below}" if below else title, fontsize=10, color=INK)


def counted(count: int, one: str, many: str = "") -> str:
    """A count with its noun, such as "1 key" or "2 keys"; `many` is the plural, by default `one` with an s."""
    return f"{count} {one if count == 1 else many or one + 's'}"


def integer_ticks(*axes: Axis) -> None:
    """Puts ticks at integers only, at least one: keys and queries have no fractions."""
    from matplotlib.ticker import MaxNLocator

    for axis in axes:
        axis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))


def powers(axes: Axes, which: str, base: int, low: float, high: float, most: int = MOST_TICKS) -> None:
    """Makes an axis ("x" or "y") logarithmic, from low to high.

    base: 2 puts ticks at powers of 2; 10 puts them at 1, 2 and 5 times powers of 10. most: the largest number of ticks.
    """
    ticks = _ticks(base, low, high, most)
    getattr(axes, f"set_{which}scale")("log", base=base)
    getattr(axes, f"set_{which}ticks")(ticks)
    axes.minorticks_off()
    # The limits are a little beyond the outermost ticks, so that dots there are not cut.
    getattr(axes, f"set_{which}lim")(ticks[0] * 0.93, ticks[-1] * 1.07)


def _ticks(base: int, low: float, high: float, most: int) -> list[float]:
    """Two to `most` ticks that enclose low and high: every n-th of the possible ticks."""
    steps = (1.0,) if base == 2 else (1.0, 2.0, 5.0)
    first, last = math.floor(math.log(low, base)), math.ceil(math.log(high, base)) + 1
    # The list goes on above `high`: with n > 1 the last tick may be higher than needed.
    possible = [step * float(base) ** power for power in range(first, 2 * last - first + most) for step in steps]
    begin = max(i for i, tick in enumerate(possible) if tick <= low)
    end = min(i for i, tick in enumerate(possible) if tick >= high and i > begin)
    every = -(-(end - begin) // (most - 1))
    count = -(-(end - begin) // every)
    return possible[begin : begin + count * every + 1 : every]
