"""Comparisons on bounds: where they hold at all positions of a tile, and where at none."""

from __future__ import annotations

import torch
from torch import Tensor

from .integers import Integers
from .linear import never_zero, plus, share
from .values import Floats, Ints

Decided = tuple[Tensor | bool, Tensor | bool]  # (holds everywhere, holds somewhere)

# x > y is y < x.
_MIRRORED = {"gt": "lt", "ge": "le"}


def of_integers(op: str, x: Ints, y: Ints, integers: Integers) -> Decided:
    """Exact for one comparison of linear forms in q and k."""
    if op in _MIRRORED:
        return of_integers(_MIRRORED[op], y, x, integers)
    if op == "ne":
        always, sometimes = of_integers("eq", x, y, integers)
        return _not(sometimes), _not(always)
    difference = plus(x.form, y.form, -1)
    exact = integers.bounds_of(difference) if op == "eq" or share(x.form, y.form) else None
    if op == "eq":
        always = (x.lo == x.hi) & (y.lo == y.hi) & (x.lo == y.lo)
        sometimes = (x.lo <= y.hi) & (y.lo <= x.hi)
        if exact is not None:
            always = always | ((exact[0] == 0) & (exact[1] == 0))
            sometimes = sometimes & (exact[0] <= 0) & (exact[1] >= 0)
            never = never_zero(difference, integers.atoms)
            sometimes = sometimes & _not(never)
        return always, sometimes
    strict = op == "lt"
    always, sometimes = _less(x.lo, x.hi, y.lo, y.hi, strict)
    if exact is not None:
        zero = torch.zeros_like(exact[0])
        by_form = _less(*exact, zero, zero, strict)
        always, sometimes = always | by_form[0], sometimes & by_form[1]
    return always, sometimes


def of_floats(op: str, x: Floats, y: Floats) -> Decided:
    """NaN is not equal to anything, and neither less nor more."""
    if op in _MIRRORED:
        return of_floats(_MIRRORED[op], y, x)
    if op == "ne":
        always, sometimes = of_floats("eq", x, y)
        return _not(sometimes), _not(always)
    numbers = ~(x.nan | y.nan)
    if op == "eq":
        always = (x.lo == x.hi) & (y.lo == y.hi) & (x.lo == y.lo)
        return always & numbers, (x.lo <= y.hi) & (y.lo <= x.hi)
    always, sometimes = _less(x.lo, x.hi, y.lo, y.hi, op == "lt")
    return always & numbers, sometimes


def _less(x_lo: Tensor, x_hi: Tensor, y_lo: Tensor, y_hi: Tensor, strict: bool) -> tuple[Tensor, Tensor]:
    return (x_hi < y_lo, x_lo < y_hi) if strict else (x_hi <= y_lo, x_lo <= y_hi)


def _not(condition: Tensor | bool) -> Tensor | bool:
    return not condition if isinstance(condition, bool) else ~condition
