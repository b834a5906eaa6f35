"""The keys that a run of queries sees, where a mask's ranges do not tell: read off its expression.

A user's function has no range of keys, and of masks joined by `|` the range is a hull. The interval analysis
(:mod:`tileattn.variant.intervals`) says of blocks of keys that a run of queries sees nothing of them; those at the ends
of the range need not be fetched. For masks without tensors only: what a tensor holds may change from call to call,
while ranges are kept.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...variant.evaluated import knows_ranges, values_of
from ...variant.expression import has_symbol
from ...variant.intervals.tiles import Kind, numbers, tile_kinds
from ...variant.intervals.values import Ends
from ...variant.key import encode
from ...variant.masks import Mask
from ...variant.program import program

BLOCK = 128  # keys that are fetched or left out together, at the ends of a range
MOST_BLOCKS = 2**21  # of all runs, batch elements and heads; the ranges of more are left as they are


class Asked(NamedTuple):
    """Runs of queries: int64 tensors (runs,).

    Attributes:
        b: the batch element of each run's positions, where batch elements are sequences; None where there are `batch`.
        first, last: positions of the first and the last query.
        lengths: keys of the sequence.
        batch, heads: how many the mask is asked for.
    """

    b: Tensor | None
    first: Tensor
    last: Tensor
    lengths: Tensor
    batch: int
    heads: int


def seen(mask: Mask, asked: Asked) -> tuple[Tensor, Tensor] | None:
    """The first block of keys that each run may see, and the end of the last one, in keys, each (runs,) on the host.

    Where a run sees nothing the end is 0. None where the mask's own ranges are all that is known.
    """
    if knows_ranges(mask):
        return None
    key, operands = encode(mask, ())
    allows = program(key).allows
    by_b, by_h = has_symbol(allows, "b"), has_symbol(allows, "h")
    count = -(-int(asked.lengths.max()) // BLOCK)
    planes = (asked.batch if by_b and asked.b is None else 1) * (asked.heads if by_h else 1)
    if operands.tensors or planes * len(asked.first) * count > MOST_BLOCKS:
        return None
    key_lo = torch.arange(0, count * BLOCK, BLOCK)
    span = int(asked.first.min()), int(asked.last.max())
    q = Ends(asked.first[:, None], asked.last[:, None], span, int((asked.last - asked.first).max()))
    k = Ends(key_lo, key_lo + (BLOCK - 1), (0, count * BLOCK - 1), BLOCK - 1)
    b: Any = 0
    if by_b:
        b = numbers(asked.batch, 4) if asked.b is None else asked.b[:, None]
    kinds = tile_kinds(allows, values_of(operands), q, k, b, numbers(asked.heads, 3) if by_h else 0)
    visible = (kinds != Kind.HIDDEN).reshape(-1, len(asked.first), count).any(0)
    ends = torch.where(visible, key_lo + BLOCK, 0).amax(1)
    return torch.where(visible, key_lo, count * BLOCK).amin(1), ends
