"""Sums of gradients that several calls and ranks have computed, each for some rows and heads of a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ..sharding.layout import Span


class Addend(NamedTuple):
    """What is added to some rows and heads of a tensor (batch, rows, heads, dim).

    Attributes:
        rows, heads: which, (start, stop).
        values: (batch, stop - start of the rows, stop - start of the heads, dim).
    """

    rows: Span
    heads: Span
    values: Tensor

    def covers(self, rows: Span, heads: Span) -> bool:
        """Whether it gives values for all of these."""
        return _contains(self.rows, rows) and _contains(self.heads, heads)

    def part(self, rows: Span, heads: Span) -> Tensor:
        """Its values for these."""
        of_rows, of_heads = (slice(start - first, stop - first) for (start, stop), first in (
            (rows, self.rows[0]), (heads, self.heads[0]),
        ))  # fmt: skip
        return self.values[:, of_rows, of_heads]


def write_sums(out: Tensor, heads: Span, addends: Sequence[Addend], dtype: torch.dtype) -> None:
    """Writes sums into some heads of a tensor (batch, rows, heads, dim): zeros where nothing is added.

    They are computed in `dtype`, in the order of the addends, and rounded once.
    """
    row_ends = _ends((0, out.shape[1]), [each.rows for each in addends])
    head_ends = _ends(heads, [each.heads for each in addends])
    for rows in pairwise(row_ends):
        for some in pairwise(head_ends):
            place = out[:, slice(*rows), slice(*some)]
            _write_sum(place, [each.part(rows, some) for each in addends if each.covers(rows, some)], dtype)


def _ends(whole: Span, spans: Sequence[Span]) -> list[int]:
    """Where any span begins or ends, inside of the whole, and the whole's own ends."""
    inside = {end for span in spans for end in span if whole[0] < end < whole[1]}
    return sorted({*whole, *inside})


def _write_sum(place: Tensor, parts: Sequence[Tensor], dtype: torch.dtype) -> None:
    if not parts:
        place.zero_()
        return
    *before, last = parts
    if not before:
        place.copy_(last)
        return
    total = before[0] if len(before) == 1 else before[0].to(dtype)  # of two, PyTorch rounds the sum only
    for part in before[1:]:
        total = total + part
    torch.add(total, last, out=place)


def _contains(outer: Span, inner: Span) -> bool:
    return outer[0] <= inner[0] and inner[1] <= outer[1]
