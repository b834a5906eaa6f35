"""The least and the greatest element of a tensor over ranges of its indices, for many ranges at once.

Both answers are exact, and nothing is read on the host. If the ranges have few elements in all, these are read. Else
windows of 2^n elements are reduced by doubling, for every n that may occur; two that overlap cover a range, so a range
takes two reads for each dimension. Source: the sparse table of Bender and Farach-Colton, The LCA problem revisited
(2000).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

Range = tuple[Tensor, Tensor]  # first and last index, int64, clamped to the tensor

# So many elements are read at a time.
MOST_ELEMENTS = 2**24


def over_ranges(
    tensor: Tensor, ranges: Sequence[Range], widths: Sequence[int] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(least, greatest, nan) of the elements in each box of indices.

    Args:
        tensor: bool, integers or floats, with elements.
        ranges: of each dimension, broadcastable tensors.
        widths: of each dimension, a number that last - first never exceeds; None: nothing is known.

    Returns:
        Of the dtype of the tensor, uint8 for bool, in the common shape of the ranges. `nan`, bool: whether an element
        is NaN; the bounds are those of the others, -inf and inf if there are none.
    """
    table = tensor.detach()
    table = table.view(torch.uint8) if table.dtype == torch.bool else table
    widths = table.shape if widths is None else widths
    lengths = [min(width + 1, size) for width, size in zip(widths, table.shape)]
    shape = torch.broadcast_shapes(*(first.shape for first, _ in ranges))
    elements = math.prod(shape) * math.prod(lengths)
    wide = sum(length > 1 for length in lengths)
    of_windows = table.numel() * math.prod(length.bit_length() for length in lengths) + math.prod(shape) * 2**wide
    if elements > of_windows:
        return _by_windows(table, ranges, lengths)
    return _by_elements(table, ranges, lengths, shape)


def _elements(table: Tensor, index: Sequence[Tensor]) -> Tensor:
    # table[index] reads an index without dimensions on the host.
    return torch.ops.aten.index(table, list(index)) if index else table


# --- All elements ---


def _by_elements(
    table: Tensor, ranges: Sequence[Range], lengths: Sequence[int], shape: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Reads all elements of all boxes, at most `lengths` in each dimension."""
    if math.prod(shape) * math.prod(lengths) > MOST_ELEMENTS and max(shape, default=1) > 1:
        axis = max(range(len(shape)), key=shape.__getitem__) - len(shape)
        size, half = shape[axis], shape[axis] // 2
        parts = [
            _by_elements(table, _narrowed(ranges, axis, start, count), lengths, _with_size(shape, axis, count))
            for start, count in ((0, half), (half, size - half))
        ]
        least, greatest, nan = (torch.cat(both, axis) if both[0].dim() else both[0] for both in zip(*parts))
        return least, greatest, nan
    wide = sum(length > 1 for length in lengths)
    index, axis = [], -wide  # each dimension that is wide has an axis of its own, the last ones
    for (first, last), length in zip(ranges, lengths):
        each = first.reshape((*first.shape, *[1] * wide))
        if length > 1:
            step = torch.arange(length, device=table.device).view(-1, *[1] * (-axis - 1))
            each, axis = torch.minimum(each + step, last.reshape((*last.shape, *[1] * wide))), axis + 1
        index.append(each)
    values = _elements(table, index)
    return _extremes(values.flatten(-wide) if wide else values[..., None])


def _narrowed(ranges: Sequence[Range], axis: int, start: int, count: int) -> list[Range]:
    """A part of the boxes along an axis, counted from the last."""
    return [
        (first, last)
        if first.dim() < -axis or first.shape[axis] == 1
        else (first.narrow(axis, start, count), last.narrow(axis, start, count))
        for first, last in ranges
    ]


def _with_size(shape: Sequence[int], axis: int, size: int) -> list[int]:
    sizes = list(shape)
    sizes[axis] = size
    return sizes


def _extremes(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Over the last dimension."""
    if not values.dtype.is_floating_point:
        least, greatest = torch.aminmax(values, dim=-1)
        return least, greatest, _no_nan(values)
    missing = values.isnan()
    least, greatest = values.masked_fill(missing, math.inf).amin(-1), values.masked_fill(missing, -math.inf).amax(-1)
    return *_unbounded(least, greatest), missing.any(-1)


def _no_nan(table: Tensor) -> Tensor:
    return torch.zeros((), dtype=torch.bool, device=table.device)


def _unbounded(least: Tensor, greatest: Tensor) -> tuple[Tensor, Tensor]:
    """-inf and inf where there are no numbers."""
    none = least > greatest
    return least.masked_fill(none, -math.inf), greatest.masked_fill(none, math.inf)


# --- Windows ---


def _by_windows(table: Tensor, ranges: Sequence[Range], lengths: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    index = _corners(table.shape, ranges, lengths)
    if not table.dtype.is_floating_point:
        return _reduced(table, "amin", index, lengths), _reduced(table, "amax", index, lengths), _no_nan(table)
    missing = table.isnan()
    least = _reduced(table.masked_fill(missing, math.inf), "amin", index, lengths)
    greatest = _reduced(table.masked_fill(missing, -math.inf), "amax", index, lengths)
    return *_unbounded(least, greatest), _reduced(missing.to(torch.uint8), "amax", index, lengths).bool()


def _corners(shape: Sequence[int], ranges: Sequence[Range], lengths: Sequence[int]) -> list[tuple[Tensor, ...]]:
    """The indices in the table of windows of those that cover each box."""
    levels: list[Tensor] = []
    starts: list[tuple[Tensor, ...]] = []
    for (first, last), length in zip(ranges, lengths):
        if length == 1:
            starts.append((first,))
            continue
        # The exponent of a double is the integer part of its logarithm, exactly.
        level = torch.frexp((last - first + 1).double()).exponent.long() - 1
        levels.append(level)
        starts.append((first, last + 1 - (torch.ones_like(level) << level)))
    return [(*levels, *corner) for corner in itertools.product(*starts)]


def _reduced(table: Tensor, kind: str, index: list[tuple[Tensor, ...]], lengths: Sequence[int]) -> Tensor:
    """The table reduced over each box."""
    windows = _windows(table, kind, lengths)
    result = _elements(windows, index[0])
    for corner in index[1:]:
        result = _combine(kind, result, _elements(windows, corner))
    return result


def _combine(kind: str, x: Tensor, y: Tensor, out: Tensor | None = None) -> Tensor:
    return torch.minimum(x, y, out=out) if kind == "amin" else torch.maximum(x, y, out=out)


def _windows(table: Tensor, kind: str, lengths: Sequence[int]) -> Tensor:
    """(levels of each wide dimension..., the table's sizes): at [level, i] the reduction of the 2^level elements from i
    on, where there are so many."""
    for dim in reversed(range(len(lengths))):
        levels = lengths[dim].bit_length()
        if levels == 1:
            continue
        axis, table = table.dim() - len(lengths) + dim, table.expand(levels, *table.shape).clone()
        for level in range(1, levels):
            shift = 2 ** (level - 1)
            count = table.shape[axis + 1] - 2 * shift + 1
            shorter = table[level - 1]
            both = shorter.narrow(axis, 0, count), shorter.narrow(axis, shift, count)
            _combine(kind, *both, out=table[level].narrow(axis, 0, count))
    return table
