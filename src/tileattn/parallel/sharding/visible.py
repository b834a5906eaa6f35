"""The keys that a run of queries sees, where a mask's ranges do not tell: read off its expression.

A user's function has no range of keys, and of masks joined by `|` the range is a hull. The interval analysis
(:mod:`tileattn.variant.intervals`) says of blocks of keys that a run of queries sees nothing of them; those at the ends
of the range need not be fetched. Tensors are read on their device, and the host waits for the answer.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...variant.evaluated import knows_ranges, values_of
from ...variant.expression import TensorSymbol, has_symbol, nodes
from ...variant.intervals.tiles import Kind, numbers, tile_kinds
from ...variant.intervals.values import Ends
from ...variant.key import encode
from ...variant.masks import Mask
from ...variant.program import program

BLOCK = 128  # keys that are fetched or left out together, at the ends of a range
# Of all runs, batch elements and heads; the ranges of more are left as they are. So many elements may a table have that
# is read by query and key together: its bounds take several passes over it.
MOST_BLOCKS = 2**21


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


def seen(mask: Mask, asked: Asked, reading: bool) -> tuple[Tensor, Tensor] | None:
    """The first block of keys that each run may see, and the end of the last one, in keys, each (runs,) on the host.

    Where a run sees nothing the end is 0. None where the mask's own ranges are all that is known.

    reading: whether the mask's tensors may be read.
    """
    if knows_ranges(mask):
        return None
    key, operands = encode(mask, ())
    allows = program(key).allows
    by_b, by_h = has_symbol(allows, "b"), has_symbol(allows, "h")
    count = -(-int(asked.lengths.max()) // BLOCK)
    planes = (asked.batch if by_b and asked.b is None else 1) * (asked.heads if by_h else 1)
    if planes * len(asked.first) * count > MOST_BLOCKS:
        return None
    values = values_of(operands)
    if operands.tensors and (not reading or _reads_large_matrix(allows, values)):
        return None
    device = operands.tensors[0].device if operands.tensors else torch.device("cpu")
    key_lo = torch.arange(0, count * BLOCK, BLOCK, device=device)
    span = int(asked.first.min()), int(asked.last.max())
    first, last = (each[:, None].to(device) for each in (asked.first, asked.last))
    q = Ends(first, last, span, int((asked.last - asked.first).max()))
    k = Ends(key_lo, key_lo + (BLOCK - 1), (0, count * BLOCK - 1), BLOCK - 1)
    b: Any = 0
    if by_b:
        b = numbers(asked.batch, 4, device) if asked.b is None else asked.b[:, None].to(device)
    kinds = tile_kinds(allows, values, q, k, b, numbers(asked.heads, 3, device) if by_h else 0)
    visible = (kinds != Kind.HIDDEN).reshape(-1, len(asked.first), count).any(0)
    ends = torch.where(visible, key_lo + BLOCK, 0).amax(1)
    found = torch.stack([torch.where(visible, key_lo, count * BLOCK).amin(1), ends]).cpu()
    return found[0], found[1]


def _reads_large_matrix(allows: Any, values: dict[str, Any]) -> bool:
    for node in nodes(allows):
        if node.op == "load":
            symbol, *index = node.args
            by_pair = sum(has_symbol(each, "q") or has_symbol(each, "k") for each in index) > 1
            name = symbol.name if isinstance(symbol, TensorSymbol) else symbol
            if by_pair and values[name].numel() > MOST_BLOCKS:
                return True
    return False
