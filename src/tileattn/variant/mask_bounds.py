"""Bounds for masks: checks of sizes, operations on ranges, and bounds computed from tensors.

A mask that holds a tensor computes bounds from it once, at construction. Its range methods then read these bounds (see
:mod:`tileattn.masks`). No function here waits for the device.
"""

from __future__ import annotations

from typing import Any

import torch

from ..call.scalars import as_int
from .math import maximum, minimum, where

Range = tuple[Any, Any]
MAX_SIZE = 2**30 - 1  # the largest window or prefix; sums with positions stay within int32


def checked_size(name: str, size: Any, accepted: str) -> Any:
    """The size as an int from 0 to MAX_SIZE. Raises TypeError or ValueError for any other value."""
    size = as_int(size)
    if not isinstance(size, (int, torch.SymInt)) or isinstance(size, bool):
        raise TypeError(f"{name} must be {accepted}, got {size!r}")
    if not 0 <= size <= MAX_SIZE:
        raise ValueError(f"{name} must lie in 0 .. 2**30 - 1, got {size}")
    return size


def intersection(x: Range, y: Range) -> Range:
    return maximum(x[0], y[0]), minimum(x[1], y[1])


def hull(x: Range, y: Range) -> Range:
    return minimum(x[0], y[0]), maximum(x[1], y[1])


def joined(within: Range, x: Range, y: Range) -> Range:
    """A range that lies in the union of x and y and within a third range."""
    (x_lo, x_hi), (y_lo, y_hi) = (intersection(each, within) for each in (x, y))
    # Two ranges that touch are joined. Otherwise the longer range is taken, and the mask is evaluated in the other.
    touching = (maximum(x_lo, y_lo) <= minimum(x_hi, y_hi)) & (x_lo < x_hi) & (y_lo < y_hi)
    x_longer = x_hi - x_lo >= y_hi - y_lo
    lo = where(touching, minimum(x_lo, y_lo), where(x_longer, x_lo, y_lo))
    hi = where(touching, maximum(x_hi, y_hi), where(x_longer, x_hi, y_hi))
    return lo, hi


def padding_bounds(keep: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """begin, end, run_begin and run_end of `KeyPadding`, int32 (batch,). Does not wait for the device.

    Each operation is a launch, in every step of a model that generates, so there are few of them.
    """
    batch, seqlen = keep.shape
    if seqlen == 0:
        nothing = torch.zeros(batch, dtype=torch.int32, device=keep.device)
        return nothing, nothing, nothing, nothing
    number = torch.arange(1, seqlen + 1, dtype=torch.int32, device=keep.device)
    from_end = torch.arange(seqlen, 0, -1, dtype=torch.int32, device=keep.device)
    end = (number * keep).amax(1)
    begin = torch.minimum(seqlen - (from_end * keep).amax(1), end)
    # For each key, the length of the run of kept keys that ends with it: its distance from the last hidden key.
    length, last = (number - (number * ~keep).cummax(1).values).max(1)
    run_end = last.to(torch.int32) + 1
    return begin, end, run_end - length, run_end


def document_bounds(ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """(numbers, first, last, run_start, run_end) of `Documents` for ids (batch, seqlen). Does not wait for the device.

    `numbers` renumbers the ids: each id becomes the first position that has it, which `Documents` can compare instead.
    """
    batch, seqlen = ids.shape
    position = torch.arange(seqlen, device=ids.device).expand(batch, seqlen)
    if seqlen == 0:
        return position, position, position, position, position
    run_start, run_end = _runs(ids, position)
    # Sort equal ids together. The sort is stable, so positions ascend within an id: a run of the sorted ids begins at
    # the id's first position and ends at its last one.
    order = torch.sort(ids, dim=1, stable=True).indices
    start, end = _runs(ids.gather(1, order), position)
    first = torch.empty_like(order).scatter_(1, order, order.gather(1, start))
    last = torch.empty_like(order).scatter_(1, order, order.gather(1, end))
    # The smallest `first` at or after a position, the largest `last` at or before it: bounds for any tile.
    return first, first.flip(1).cummin(1).values.flip(1), last.cummax(1).values, run_start, run_end


def _runs(ids: torch.Tensor, position: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Start and end (included) of the run of adjacent equal values around each position."""
    seqlen = ids.shape[1]
    begins = torch.ones_like(ids, dtype=torch.bool)
    begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
    ends = torch.ones_like(begins)
    ends[:, :-1] = begins[:, 1:]
    start = torch.where(begins, position, 0).cummax(1).values
    end = torch.where(ends, position, seqlen - 1).flip(1).cummin(1).values.flip(1)
    return start, end
