"""The pictures of the page as SVG and HTML text: made in milliseconds, and legible in the light and the dark theme.

matplotlib's pictures (`tileattn viz`) take half a second and have one background. Text here takes the page's colour
(`currentColor`), and the colours of tiles are those of `tileattn.viz.tiles`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby

import torch

from tileattn.measure.units import human_bytes
from tileattn.viz.demo.call import Call
from tileattn.viz.demo.implementations import OWN
from tileattn.viz.demo.measure import Measured
from tileattn.viz.style import BLUE, ORANGE, counted
from tileattn.viz.tiles import NAMES, Tile, TileMap, tile_map

FUNCTION = (
    "A plain function does not say which keys it hides, so alone it skips no tile. A subclass of tileattn.Mask can."
)
# Skipped tiles are a faint grey over either background.
COLOURS = {Tile.FULL: BLUE, Tile.PARTIAL: ORANGE, Tile.SKIPPED: "rgba(128, 128, 128, 0.22)"}
SMALLEST_TILE, MOST_TILES = 64, 64
SIDE, MARGIN = 360.0, 26.0


def tiles_of(call: Call) -> TileMap:
    """The tile map of the call's mask for its first head, with tiles of 64 x 64, or larger if there are too many."""
    block = SMALLEST_TILE
    while max(call.seqlen_q, call.seqlen_k) > block * MOST_TILES:
        block *= 2
    mask = call.mask(call.made(torch.device("cpu"), call.masks))
    return tile_map(mask, call.seqlen_q, call.seqlen_k, block, block)


def tile_picture(call: Call) -> str:
    """Queries downwards, keys to the right, a colour for each kind of tile, and how many there are of each."""
    tiles = tiles_of(call)
    # To scale, unless one side is far longer.
    ratio = min(max(tiles.seqlen_q / tiles.seqlen_k, 0.3), 2.0)
    width, height = (SIDE, SIDE * ratio) if ratio <= 1 else (SIDE / ratio, SIDE)
    visited = 1 - tiles.share(Tile.SKIPPED)
    lengths = f"{counted(tiles.seqlen_q, 'query', 'queries')} x {counted(tiles.seqlen_k, 'key')}"
    title = f"{lengths} in tiles of {tiles.block_M} x {tiles.block_N}: {visited:.0%} of the tiles are visited"
    legend = "".join(
        f'<span style="white-space: nowrap; margin-right: 1.2em"><span style="display: inline-block; width: 0.9em; '
        f'height: 0.9em; vertical-align: -0.1em; background: {COLOURS[kind]}"></span> {name} ({tiles.count(kind)})'
        f"</span> "
        for kind, name in NAMES.items()
    )
    return (
        f"<div><b>{title}</b><br>{legend}"
        f'<svg role="img" aria-label="{title}" viewBox="0 0 {width + MARGIN:.1f} {height + MARGIN:.1f}" '
        f'style="display: block; width: 100%; max-width: {width + MARGIN:.0f}px; margin-top: 0.6em">'
        f'<text x="{MARGIN + width / 2:.1f}" y="16" text-anchor="middle" font-size="13" fill="currentColor">key</text>'
        f'<text transform="translate(16 {MARGIN + height / 2:.1f}) rotate(-90)" text-anchor="middle" font-size="13" '
        f'fill="currentColor">query</text>'
        f'<g transform="translate({MARGIN} {MARGIN})">{"".join(_rectangles(tiles, width, height))}</g></svg>'
        f"{FUNCTION if 'FunctionMask' in call.mask_text else ''}</div>"
    )


def _rectangles(tiles: TileMap, width: float, height: float) -> Iterator[str]:
    """One rectangle for each run of equal tiles in a row, with gaps between tiles where they are few."""
    for i, row in enumerate(tiles.tiles.tolist()):
        top, bottom = (min(edge * tiles.block_M, tiles.seqlen_q) * height / tiles.seqlen_q for edge in (i, i + 1))
        apart = len(row) <= 32
        for (kind, _), run in groupby(enumerate(row), key=lambda each: (each[1], each[0] if apart else 0)):
            columns = [column for column, _ in run]
            left, right = (
                min(edge * tiles.block_N, tiles.seqlen_k) * width / tiles.seqlen_k
                for edge in (columns[0], columns[-1] + 1)
            )
            gap = 1.0 if apart else 0.0
            yield (
                f'<rect x="{left:.2f}" y="{top:.2f}" width="{max(right - left - gap, 0.5):.2f}" '
                f'height="{max(bottom - top - gap, 0.5):.2f}" fill="{COLOURS[Tile(kind)]}"/>'
            )


def bars(rows: Sequence[Measured], call: Call) -> str:
    """Memory and time of each implementation, the longest bar as wide as the column, and the call that was measured."""
    memory = [(row, float(row.peak_bytes), human_bytes(row.peak_bytes)) for row in rows]
    what = "forward and backward pass" if call.gradients else "forward pass"
    ms = [row.backward_ms if row.backward_ms is not None else row.ms for row in rows]
    times = [(row, value, f"{value:.3g} ms") for row, value in zip(rows, ms)]
    of = f'<div style="font-size: 0.85em">Measured: {escape(call.title)}</div>'
    return f"{_group(f'Memory of the {what}, at its peak', memory)}{_group(f'Time of the {what}', times)}{of}"


def _group(title: str, entries: Sequence[tuple[Measured, float, str]]) -> str:
    longest = max((value for _, value, _ in entries), default=0.0) or 1.0
    lines = "".join(
        f'<div style="margin: 0.35em 0"><div style="display: flex; justify-content: space-between; gap: 1em">'
        f'<span>{escape(row.label)}</span><b style="white-space: nowrap">{text}</b></div>'
        f'<div style="height: 0.7em; min-width: 2px; width: {100 * value / longest:.2f}%; '
        f'background: {BLUE if row.name == OWN else "#8a8f98"}"></div></div>'
        for row, value, text in entries
    )
    return f'<div style="margin-bottom: 1em"><b>{title}</b>{lines}</div>'
