"""Tiles of a matrix of conditions, by counting: the kinds that an analysis of tiles must find."""

from __future__ import annotations

import torch
from torch import Tensor

from tileattn.variant.intervals.tiles import Kind


def exact_kinds(allowed: Tensor, q: tuple[Tensor, Tensor], k: tuple[Tensor, Tensor]) -> Tensor:
    """Of tiles with the first and last rows q and columns k of `allowed` (rows, columns), the kinds, int8."""
    sums = torch.nn.functional.pad(allowed.long().cumsum(0).cumsum(1), (1, 0, 1, 0))
    (top, bottom), (left, right) = (q[0], q[1] + 1), (k[0], k[1] + 1)
    count = sums[bottom, right] - sums[top, right] - sums[bottom, left] + sums[top, left]
    size = (bottom - top) * (right - left)
    return torch.where(count == 0, Kind.HIDDEN, torch.where(count == size, Kind.WHOLE, Kind.MIXED)).to(torch.int8)


def random_tiles(count: int, size: int, generator: torch.Generator) -> tuple[tuple[Tensor, Tensor], ...]:
    """First and last indices of `count` tiles below `size`, of any length, for rows and for columns."""
    lengths = torch.tensor([1, 2, 4, 8, 16, 3, 7])
    sides = []
    for _ in range(2):
        first = torch.randint(size, (count,), generator=generator)
        length = lengths[torch.randint(len(lengths), (count,), generator=generator)]
        sides.append((first, (first + length - 1).clamp(max=size - 1)))
    return tuple(sides)
