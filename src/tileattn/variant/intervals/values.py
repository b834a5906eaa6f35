"""Bounds: what is known of an expression's value in each of many tiles.

A bound holds for every position of its tile. Tensors of bounds have one element for each tile, or broadcast to that:
what depends on `q` alone has one for each row of tiles.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

Span = tuple[int, int]


class Ends(NamedTuple):
    """The first and the last position of each tile, both included: int64 tensors that broadcast with those of others.

    What is known of them on the host, where nothing waits for a device. A tuple of two tensors knows neither.

    span: numbers that bound the positions of all tiles; None: read from tensors on a CPU, -2^24 to 2^24 for others.
    width: the most by which the last position of a tile exceeds the first; None: as the span says.
    """

    first: Tensor
    last: Tensor
    span: Span | None = None
    width: int | None = None


INT32: Span = (-(2**31), 2**31 - 1)
INT64: Span = (-(2**63), 2**63 - 1)
SAFE = 2**62  # sums and differences of two integers below it fit in int64


class Form(NamedTuple):
    """A linear form: the sum of `constant` and, for each (atom, factor) of `terms`, factor * atom.

    Atoms are the numbers of expressions that are not linear, and of `q` and `k`. Terms are sorted, without zeros. So
    two equal forms have equal values, and forms are the keys of integers.
    """

    terms: tuple[tuple[int, int], ...]
    constant: int


class Ints(NamedTuple):
    """An integer: int64 bounds, both included.

    span: Python integers that bound the value in all tiles. They tell without looking at tensors that nothing
    overflows. form: whose value the integer has. width: the most by which `hi` exceeds `lo` in a tile, for an atom.
    """

    lo: Tensor
    hi: Tensor
    span: Span
    form: Form
    width: int | None = None

    @property
    def key(self) -> Form:
        return self.form

    @property
    def is_point(self) -> bool:
        """Whether the integer is known to be the same at all positions of a tile, so that its bounds are equal."""
        return self.lo is self.hi


class Floats(NamedTuple):
    """A float: float64 bounds, both included, of what is not NaN; where `nan`, the value may be NaN."""

    lo: Tensor
    hi: Tensor
    nan: Tensor
    key: int


class Bools(NamedTuple):
    """A condition: where `lo`, it holds at all positions of the tile; where not `hi`, at none."""

    lo: Tensor
    hi: Tensor
    key: int


Bounds = Ints | Floats | Bools


def hull(x: Span, y: Span) -> Span:
    return min(x[0], y[0]), max(x[1], y[1])


def within(inner: Span, outer: Span) -> bool:
    return outer[0] <= inner[0] and inner[1] <= outer[1]


class Elsewhere(Protocol):
    """Where values of another kind than tensors are made: expressions of a kernel, on which the same rules work."""

    def filled(self, value: float) -> Tensor: ...


Place = torch.device | Elsewhere


def filled(value: float, place: Place) -> Tensor:
    """A number, int64, float64 or bool by its type, as a tensor without dimensions."""
    if not isinstance(place, torch.device):
        return place.filled(value)
    dtype = torch.bool if isinstance(value, bool) else torch.int64 if isinstance(value, int) else torch.float64
    return torch.full((), value, dtype=dtype, device=place)
