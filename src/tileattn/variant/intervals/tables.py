"""The least and the greatest element of a tensor over ranges of its indices, for many ranges at once.

Windows of 2^n elements are reduced by doubling; two that overlap cover a range of up to twice as many. So a range takes
two reads for each dimension in which it is longer than one element, and the answer is exact. Source: the sparse table
of Bender and Farach-Colton, The LCA problem revisited (2000); here a table is made for the lengths that occur only.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

Range = tuple[Tensor, Tensor]  # first and last index, int64, clamped to the tensor


def over_ranges(tensor: Tensor, ranges: Sequence[Range]) -> tuple[Tensor, Tensor, Tensor]:
    """(least, greatest, nan) of the elements in each box of indices.

    Args:
        tensor: bool, integers or floats, with elements.
        ranges: of each dimension, broadcastable tensors.

    Returns:
        Of the dtype of the tensor, uint8 for bool, in the common shape of the ranges. `nan`, bool: whether an element
        is NaN; the bounds are those of the others, -inf and inf if there are none.
    """
    table = tensor.detach().to(torch.uint8) if tensor.dtype == torch.bool else tensor.detach()
    missing = table.isnan() if table.dtype.is_floating_point else None
    if missing is None or not bool(missing.any()):
        least, greatest = _reduced([table, table], ("amin", "amax"), ranges)
        return least, greatest, torch.zeros((), dtype=torch.bool, device=table.device)
    filled = [table.masked_fill(missing, math.inf), table.masked_fill(missing, -math.inf), missing.to(torch.uint8)]
    least, greatest, nan = _reduced(filled, ("amin", "amax", "amax"), ranges)
    none = least > greatest
    return least.masked_fill(none, -math.inf), greatest.masked_fill(none, math.inf), nan.bool()


def _reduced(tables: list[Tensor], kinds: Sequence[str], ranges: Sequence[Range]) -> list[Tensor]:
    """Each table, reduced over each box."""
    lengths = [last - first + 1 for first, last in ranges]
    # The exponent of a double is the integer part of its logarithm, exactly.
    levels = [torch.frexp(length.double()).exponent.long() - 1 for length in lengths]
    limits = [size.bit_length() for size in tables[0].shape]
    code = torch.zeros((), dtype=torch.int64, device=tables[0].device)
    for level, limit in zip(levels, limits):
        code = code * limit + level
    results: list[Tensor | None] = [None] * len(tables)
    for value in code.unique().tolist():
        rest, of_dims = value, list[int]()
        for limit in reversed(limits):
            rest, level = divmod(rest, limit)
            of_dims.insert(0, level)
        for index, (table, kind) in enumerate(zip(tables, kinds)):
            found = _read(_windows(table, of_dims, kind), ranges, of_dims, kind)
            known = results[index]
            results[index] = found if known is None else torch.where(code == value, found, known)
    return [result for result in results if result is not None]


def _combine(kind: str, x: Tensor, y: Tensor) -> Tensor:
    return torch.minimum(x, y) if kind == "amin" else torch.maximum(x, y)


def _windows(table: Tensor, levels: Sequence[int], kind: str) -> Tensor:
    """At each index, the reduction over the 2^level elements that begin there, in each dimension."""
    for dim, level in enumerate(levels):
        for step in range(level):
            shift, size = 2**step, table.shape[dim]
            table = _combine(kind, table.narrow(dim, 0, size - shift), table.narrow(dim, shift, size - shift))
    return table


def _read(windows: Tensor, ranges: Sequence[Range], levels: Sequence[int], kind: str) -> Tensor:
    """The reduction over each box, from the windows at its corners. Boxes of other sizes get any value."""
    starts = [
        (first,) if level == 0 else (first, last - (2**level - 1)) for (first, last), level in zip(ranges, levels)
    ]
    result = None
    for corner in itertools.product(*starts):
        index = tuple(start.clamp(0, size - 1) for start, size in zip(corner, windows.shape))
        found = windows[index]
        result = found if result is None else _combine(kind, result, found)
    assert result is not None
    return result
