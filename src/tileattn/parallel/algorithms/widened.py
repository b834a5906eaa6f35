"""Parts of a call with dropout: they begin at multiples of 16, so that they cut no group of the pattern.

Kernels draw the random bits of four elements at once, at rows and keys that are 8 apart (`tileattn.call.dropout`). They
can count rows and keys from anywhere in the whole call, but by whole groups. Where a part begins within one, up to 15
rows of zeros stand before its queries; their outputs are left out, and their gradients are zero. So do rows of zeros
before its keys; these are hidden by the mask. Only a ring has keys that begin anywhere.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from torch.nn.functional import pad

from ...call.dropout import GROUP
from .shifted import Part


class Widened(NamedTuple):
    """A part with rows of zeros before its queries and before its keys."""

    part: Part
    rows: int = 0
    keys: int = 0


def widened(part: Part) -> Widened:
    """The part from the multiples of 16 on before its first query and its first key."""
    rows, keys = part.queries[0] % GROUP, part.keys[0] % GROUP
    if not rows and not keys:
        return Widened(part)
    queries = part.queries[0] - rows, part.queries[1]
    return Widened(part._replace(queries=queries, keys=(part.keys[0] - keys, part.keys[1])), rows, keys)


def padded(x: Tensor, rows: int, dim: int = 1, value: float = 0.0) -> Tensor:
    """A tensor with as many rows of a value before its own."""
    return pad(x, [0, 0] * (x.ndim - 1 - dim) + [rows, 0], value=value) if rows else x
