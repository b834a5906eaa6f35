"""What the tile ranges of a mask say about keys: those that a run of queries needs, and the area of its scores.

`Mask.kv_range` answers for one (batch, head, queries); here it is asked for all batch elements and heads of many runs
at once. A mask with tensors on a GPU makes the host wait once for each mask and plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...variant.masks import Mask
from .layout import Layout, Run, Span

_ROWS = 256  # of queries whose keys an area counts at once: the order of a kernel's tile


def device_of(mask: Mask | None, default: torch.device) -> torch.device:
    """The device of a mask's tensors, also of those inside; the default if it has none."""
    for value in vars(mask).values() if mask is not None else ():
        if isinstance(value, Tensor) and value.ndim:
            return value.device
        if isinstance(value, Mask):
            return device_of(value, default)
    return default


def key_ranges(mask: Mask | None, layout: Layout, runs: Sequence[Run], batch: int, heads: int) -> list[Span]:
    """The keys of its sequence that each run may see, clamped; at least one key for each run.

    A run that sees no key gets one that the mask hides: its rows then have o = 0 and lse = -inf (or the sink), as on
    one device.
    """
    first, last = [run.start for run in runs], [run.stop - 1 for run in runs]
    lows, highs = _asked(mask, layout, [run.sequence for run in runs], first, last, batch, heads)
    ranges = []
    for run, low, high in zip(runs, lows, highs):
        length = layout.length(run.sequence)
        start, stop = max(0, min(low, length)), max(0, min(high, length))
        ranges.append((start, stop) if start < stop else (run.start, run.start + 1))
    return ranges


def areas(mask: Mask | None, layout: Layout, runs: Sequence[Run], batch: int, heads: int) -> list[int]:
    """Scores that each run computes, for one batch element and head: of each 256 queries all keys of their range."""
    tiles = [
        (number, Run(run.sequence, start, min(start + _ROWS, run.stop)))
        for number, run in enumerate(runs)
        for start in range(run.start, run.stop, _ROWS)
    ]
    totals = [0] * len(runs)
    found = key_ranges(mask, layout, [tile for _, tile in tiles], batch, heads) if tiles else []
    for (number, tile), (start, stop) in zip(tiles, found):
        # A tile on the diagonal of a causal mask counts whole, as a kernel computes it.
        totals[number] += (tile.stop - tile.start) * (stop - start)
    return totals


def _asked(
    mask: Mask | None,
    layout: Layout,
    sequences: list[int],
    first: list[int],
    last: list[int],
    batch: int,
    heads: int,
) -> tuple[list[int], list[int]]:
    """The smallest start and the largest stop over batch elements and heads."""
    lengths = [layout.length(sequence) for sequence in sequences]
    if mask is None or batch == 0:  # without a batch element there is nobody to ask
        return [0] * len(first), lengths
    device = device_of(mask, torch.device("cpu"))

    def column(values: list[int]) -> Tensor:
        return torch.tensor(values, device=device)[:, None, None]

    b = column(sequences) if layout.packed else torch.arange(batch, device=device)[:, None]
    h = torch.arange(heads, device=device)
    found: Any = mask.kv_range(b, h, column(first), column(last), column(lengths))
    size = (len(first), 1 if layout.packed else batch, heads)
    low, high = (torch.as_tensor(end, device=device).broadcast_to(size).flatten(1) for end in found)
    return low.amin(1).tolist(), high.amax(1).tolist()
