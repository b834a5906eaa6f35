"""A figure for pages with a dark background: greys are turned around, colours made light enough, heat maps kept.

Every picture of the pages lies beside one of the same name with "-dark" at its end. The site shows the one that fits
its theme (docs/hooks/links.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.figure import Figure

BACKGROUND = np.array((0x1E, 0x21, 0x29)) / 255  # of the site's dark theme
FOREGROUND = np.array((0.93, 0.93, 0.94))
GREY = 0.1  # the largest difference between the parts of a colour that is taken for a grey
CONTRAST = 4.5  # of a colour with the background, as WCAG 2 defines it
STEP = 0.05


def beside(path: Path) -> Path:
    """Where the dark picture of a picture lies."""
    return path.with_name(f"{path.stem}-dark{path.suffix}")


def darken(figure: Figure) -> Figure:
    """The figure itself, with other colours."""
    from matplotlib.text import Text

    figure.draw_without_rendering()  # makes the ticks
    for artist in figure.findobj():
        _recolour(artist)
        if isinstance(artist, Text):
            for patch in (artist.get_bbox_patch(), getattr(artist, "arrow_patch", None)):
                if patch is not None:
                    _recolour(patch)
    return figure


def colour(rgba: Any) -> tuple[float, ...]:
    """A colour of the light figure as it is in the dark one; its opacity stays."""
    from matplotlib.colors import to_rgba

    *parts, alpha = to_rgba(rgba)
    rgb = np.array(parts)
    if rgb.max() - rgb.min() <= GREY:
        rgb = FOREGROUND + (BACKGROUND - FOREGROUND) * rgb.mean()
    else:
        while contrast(rgb, BACKGROUND) < CONTRAST:
            rgb = rgb + (1 - rgb) * STEP
    return (*map(float, rgb), alpha)


def contrast(a: Any, b: Any) -> float:
    """Of two colours, from 1 to 21."""
    low, high = sorted((_luminance(a), _luminance(b)))
    return (high + 0.05) / (low + 0.05)


def _luminance(rgb: Any) -> float:
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in rgb]
    return float(np.dot(linear, (0.2126, 0.7152, 0.0722)))


def _recolour(artist: Artist) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.collections import Collection
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch
    from matplotlib.text import Text

    if isinstance(artist, Text):
        artist.set_color(colour(artist.get_color()))
    elif isinstance(artist, Line2D):
        face, edge = artist.get_markerfacecolor(), artist.get_markeredgecolor()
        artist.set_color(colour(artist.get_color()))
        artist.set_markerfacecolor(_or_none(face))
        artist.set_markeredgecolor(_or_none(edge))
    elif isinstance(artist, Patch):
        face, edge = artist.get_facecolor(), artist.get_edgecolor()
        artist.set_facecolor(colour(face))
        if edge[3] > 0:  # with its own opacity, a patch would make a transparent edge visible
            artist.set_edgecolor(colour(edge))
    elif isinstance(artist, Collection):
        artist.set_edgecolors([colour(each) for each in artist.get_edgecolors()])
        if artist.get_array() is None:
            artist.set_facecolors([colour(each) for each in artist.get_facecolors()])
    if isinstance(artist, ScalarMappable) and artist.get_array() is not None:
        _remap(artist)


def _or_none(face: Any) -> Any:
    return face if isinstance(face, str) and face in ("none", "auto") else colour(face)


def _remap(artist: Any) -> None:
    """Colours of kinds, and of what has no value, change; a scale of colours has its own order and stays."""
    from matplotlib.colors import ListedColormap

    colours = artist.get_cmap()
    if isinstance(colours, ListedColormap) and colours.N <= 16:
        artist.set_cmap(ListedColormap([colour(each) for each in colours.colors]))
    else:
        artist.set_cmap(colours.with_extremes(bad=colour(colours.get_bad())))
