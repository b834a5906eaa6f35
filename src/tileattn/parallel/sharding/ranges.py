"""What the tile ranges of a mask say about keys: those that a run of queries needs, and the area of its scores.

`Mask.kv_range` answers for one (batch, head, queries); here it is asked for all batch elements and heads of many runs
at once. Of masks without ranges the expression tells (visible.py). What is read off tensors on a GPU makes the host
wait; how long an answer is kept is said in contents.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ...variant.masks import Mask
from .contents import Ask, is_settled, reads_tensors
from .layout import Layout, Run, Span
from .visible import Asked, seen

_ROWS = 256  # of queries whose keys an area counts at once: the order of a kernel's tile
_HOST = torch.device("cpu")  # whatever torch.set_default_device says


def device_of(mask: Mask | None, default: torch.device) -> torch.device:
    """The device of a mask's tensors, also of those inside; the default if it has none."""
    return next(_devices(mask), default)


def _devices(mask: Mask | None) -> Iterator[torch.device]:
    for value in vars(mask).values() if mask is not None else ():
        if isinstance(value, Tensor):
            yield value.device
        elif isinstance(value, Mask):
            yield from _devices(value)


def key_ranges(
    mask: Mask | None, layout: Layout, runs: Sequence[Run], batch: int, heads: int, ask: Ask = Ask.NOW
) -> list[Span]:
    """The keys of its sequence that each run may see, clamped; at least one key for each run.

    A run that sees no key gets one that the mask hides: its rows then have o = 0 and lse = -inf (or the sink), as on
    one device.
    """
    sequences, first, stop = _columns(runs)
    starts, stops = _asked(mask, layout, sequences, first, stop - 1, batch, heads, ask)
    return [
        (start, stop) if start < stop else (run.start, run.start + 1)
        for run, start, stop in zip(runs, starts.tolist(), stops.tolist())
    ]


def areas(
    mask: Mask | None, layout: Layout, runs: Sequence[Run], batch: int, heads: int, ask: Ask = Ask.NOW
) -> list[int]:
    """Scores that each run computes, for one batch element and head: of each 256 queries all keys of their range.

    Thousands of ranks have a hundred thousand runs, so tiles are rows of tensors here, not Python's objects.
    """
    sequences, begin, end = _columns(runs)
    tiles = (end - begin + _ROWS - 1) // _ROWS
    number = torch.arange(len(runs), device=_HOST).repeat_interleave(tiles)
    place = torch.arange(len(number), device=_HOST) - (tiles.cumsum(0) - tiles)[number]
    first = begin[number] + place * _ROWS
    stop = torch.minimum(first + _ROWS, end[number])
    starts, stops = _asked(mask, layout, sequences[number], first, stop - 1, batch, heads, ask)
    # A tile on the diagonal of a causal mask counts whole, as a kernel computes it; one without keys is still a call.
    of_tiles = (stop - first) * (stops - starts).clamp(min=1)
    return torch.zeros(len(runs), dtype=torch.int64, device=_HOST).index_add_(0, number, of_tiles).tolist()


def _columns(runs: Sequence[Run]) -> tuple[Tensor, ...]:
    """The sequences, starts and stops of runs."""
    return torch.tensor([tuple(run) for run in runs], dtype=torch.int64, device=_HOST).reshape(-1, 3).unbind(1)


def _asked(
    mask: Mask | None,
    layout: Layout,
    sequences: Tensor,
    first: Tensor,
    last: Tensor,
    batch: int,
    heads: int,
    ask: Ask,
) -> tuple[Tensor, Tensor]:
    """The smallest start and the largest stop over batch elements and heads, within the sequence."""
    lengths = torch.tensor(layout.bounds, device=_HOST).diff()[sequences]
    if mask is None or batch == 0 or not len(first):  # without a batch element there is nobody to ask
        return torch.zeros_like(first), lengths
    none = torch.zeros_like(lengths)
    if ask is Ask.LASTING and not is_settled(mask):
        low, high = none, lengths
    else:
        low, high = _by_ranges(mask, layout, sequences, first, last, lengths, batch, heads)
    of_runs = sequences if layout.packed else None
    blocks = None
    if ask is not Ask.RANGES:
        blocks = seen(mask, Asked(of_runs, first, last, lengths, batch, heads), reading=ask is Ask.NOW)
    if blocks is not None:
        low, high = low.maximum(blocks[0]), high.minimum(blocks[1])
    return torch.minimum(low.maximum(none), lengths), torch.minimum(high.maximum(none), lengths)


def _by_ranges(
    mask: Mask,
    layout: Layout,
    sequences: Tensor,
    first: Tensor,
    last: Tensor,
    lengths: Tensor,
    batch: int,
    heads: int,
) -> tuple[Tensor, Tensor]:
    """By the mask's own ranges, on the host."""
    device = _HOST
    if reads_tensors(mask):
        device = device_of(mask, device)
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "the host must wait to learn which keys a mask reaches, which a CUDA graph's capture cannot: make the "
                "same call once before, with the same mask object"
            )

    def column(values: Tensor) -> Tensor:
        return values.to(device)[:, None, None]

    b = column(sequences) if layout.packed else torch.arange(batch, device=device)[:, None]
    h = torch.arange(heads, device=device)
    found: Any = mask.kv_range(b, h, column(first), column(last), column(lengths))
    size = (len(first), 1 if layout.packed else batch, heads)
    low, high = (torch.as_tensor(end, device=device).broadcast_to(size) for end in found)
    return low.amin((1, 2)).cpu(), high.amax((1, 2)).cpu()
