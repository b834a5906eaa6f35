"""Neighborhoods: windows in sequences, images and videos whose tokens are in raster order."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ..mask_bounds import MAX_SIZE, Range
from ..masks import Mask
from ..math import maximum, minimum
from .patterns import checked_step


@dataclass(frozen=True, eq=False, init=False, repr=False)
class Neighborhood(Mask):
    """A query sees a window around its own place in a grid of one to three dimensions, as in NATTEN.

    In each dimension a query at coordinate ``i`` of ``n`` sees the ``w`` coordinates from ``start`` on, with ``start =
    min(max(i - w // 2, 0), n - w)``: at a border the window is shifted, so that it always has its full size. An even
    window has one coordinate more before ``i`` than behind it.

    The grid is the first ``n`` positions of a sequence (the product of its sizes) in raster order: position ``p`` of a
    grid (height, width) is row ``p // width``, column ``p % width``. Positions beyond the grid, and queries before the
    first key, see nothing and are seen by none. So a packed call has one grid in each sequence.

    Args:
        shape: the grid: an int, or a tuple of one to three ints (depth, height, width), outermost first.
        window: the window's size in each dimension: an int for all, or a tuple of as many ints as shape has; at most
            the grid's size.

    Raises:
        TypeError, ValueError: a size is no integer of at least 1, the numbers of dimensions differ, or a window is
            larger than the grid.

    Source: neighborhood attention (Hassani et al. 2023, arXiv 2204.07143); NATTEN's ``kernel_size`` without dilation,
    stride and causal dimensions, even sizes as in its version 0.20.
    """

    size_0: int
    size_1: int | None
    size_2: int | None
    window_0: int
    window_1: int | None
    window_2: int | None
    plane: int | None  # size_1 * size_2

    def __init__(self, shape: int | tuple[int, ...], window: int | tuple[int, ...]) -> None:
        sizes = _sizes("shape", shape, 0)
        windows = _sizes("window", window, len(sizes))
        if len(windows) != len(sizes):
            raise ValueError(
                f"Neighborhood: window must have {len(sizes)} sizes, one for each of shape, got {window!r}"
            )
        for size, of_window in zip(sizes, windows):
            if of_window > size:
                raise ValueError(f"Neighborhood: window must not exceed shape = {shape!r}, got {window!r}")
        if math.prod(sizes) > MAX_SIZE:
            raise ValueError(f"Neighborhood: shape must have at most 2**30 - 1 positions, got {shape!r}")
        for name, given in (("size", sizes), ("window", windows)):
            for axis in range(3):
                object.__setattr__(self, f"{name}_{axis}", given[axis] if axis < len(given) else None)
        object.__setattr__(self, "plane", sizes[1] * sizes[2] if len(sizes) == 3 else None)

    def __repr__(self) -> str:
        sizes, windows = (
            tuple(getattr(self, f"{name}_{axis}") for axis in range(3) if getattr(self, f"{name}_{axis}") is not None)
            for name in ("size", "window")
        )
        return f"Neighborhood({sizes}, {windows})"

    def _coordinates(self, p: Any) -> list[Any]:
        if self.size_1 is None:
            return [p]
        if self.size_2 is None:
            return [p // self.size_1, p % self.size_1]
        return [p // self.plane, p // self.size_2 % self.size_1, p % self.size_2]

    def allows(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        of_q, of_k = self._coordinates(q), self._coordinates(k)
        seen = (of_q[0] >= 0) & (of_q[0] < self.size_0)
        sizes, windows = (self.size_0, self.size_1, self.size_2), (self.window_0, self.window_1, self.window_2)
        for i, j, size, window in zip(of_q, of_k, sizes, windows):
            start = _start(i, size, window)
            seen = seen & (j >= start) & (j < start + window)
        return seen

    def kv_range(self, b: Any, h: Any, q_lo: Any, q_hi: Any, seqlen_k: Any) -> Range:
        first, last = (_start(self._coordinates(q)[0], self.size_0, self.window_0) for q in (q_lo, q_hi))
        return self._positions(first), self._positions(last + self.window_0)

    def q_range(self, b: Any, h: Any, k_lo: Any, k_hi: Any, seqlen_k: Any) -> Range:
        # Both are in one window of the outermost dimension, and so less than its size apart.
        first, last = self._coordinates(k_lo)[0] - self.window_0 + 1, self._coordinates(k_hi)[0] + self.window_0
        return self._positions(maximum(first, 0)), self._positions(minimum(last, self.size_0))

    def _positions(self, coordinate: Any) -> Any:
        """The first position with this coordinate of the outermost dimension, 0 to its size."""
        if self.size_1 is None:
            return coordinate
        return coordinate * (self.size_1 if self.size_2 is None else self.plane)


def _start(i: Any, size: Any, window: Any) -> Any:
    return minimum(maximum(i - window // 2, 0), size - window)


def _sizes(name: str, given: Any, repeated: int) -> tuple[int, ...]:
    """One to three sizes of at least 1. One int is repeated, if a number of times is given."""
    accepted = "an int of at least 1 or a tuple of one to three"
    sizes = given if isinstance(given, (tuple, list)) else (given,) * max(repeated, 1)
    if not 1 <= len(sizes) <= 3:
        raise ValueError(f"Neighborhood: {name} must be {accepted}, got {given!r}")
    return tuple(checked_step(f"Neighborhood: {name}", size, accepted) for size in sizes)
