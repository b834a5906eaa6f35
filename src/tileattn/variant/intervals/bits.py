"""`&` and `|` of integers on bounds, by the bits that are the same at all positions of a tile."""

from __future__ import annotations

import torch
from torch import Tensor

from .values import INT64, Ints, Span, hull

_SIGN = INT64[0]


def bitwise(op: str, x: Ints, y: Ints) -> tuple[Tensor, Tensor, Span]:
    """lo, hi and span of x & y (`op` is "and") or x | y ("or"), in two's complement."""
    (x_ones, x_bits), (y_ones, y_bits) = _known(x), _known(y)
    # `ones` are set at all positions, bits outside of `bits` at none.
    both = op == "and"
    ones, bits = (x_ones & y_ones, x_bits & y_bits) if both else (x_ones | y_ones, x_bits | y_bits)
    lo = ones | (bits & _SIGN)
    hi = torch.where(ones < 0, bits, bits & ~_SIGN)
    # `&` does not exceed an operand that is not negative, `|` does not fall below one of two.
    if both:
        for each in (x, y):
            hi = torch.where(each.lo >= 0, torch.minimum(hi, each.hi), hi)
    else:
        lo = torch.where((x.lo >= 0) & (y.lo >= 0), torch.maximum(lo, torch.maximum(x.lo, y.lo)), lo)
    # Both have at most as many bits as the longer operand.
    most = _filled_below(_magnitude(x) | _magnitude(y))
    return torch.maximum(lo, ~most), torch.minimum(hi, most), _span(x.span, y.span)


def _filled_below(x: Tensor) -> Tensor:
    """All bits from the highest one of x on; all bits of a negative x."""
    for shift in (1, 2, 4, 8, 16, 32):
        x = x | (x >> shift)
    return x


def _magnitude(x: Ints) -> Tensor:
    """An integer with the bits of both bounds that are not copies of their signs."""
    return (x.lo ^ (x.lo >> 63)) | (x.hi ^ (x.hi >> 63))


def _known(x: Ints) -> tuple[Tensor, Tensor]:
    """The bits of an integer that are 1 at all positions of a tile, and those that are 1 at some."""
    # Below the highest bit in which the bounds differ, every bit may be either.
    either = _filled_below(x.lo ^ x.hi)
    return x.lo & ~either, x.lo | either


def _span(x: Span, y: Span) -> Span:
    least, most = hull(x, y)
    bits = max((~least if least < 0 else least).bit_length(), (~most if most < 0 else most).bit_length())
    return (-(2**bits) if least < 0 else 0), 2**bits - 1
