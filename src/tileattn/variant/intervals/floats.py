"""Float operations on bounds.

Kernels compute in float32, calls in float64 in float64, and functions such as tanh are the hardware's approximations.
So every result is widened by more than all of them err, and a bound beyond float32 counts as infinite. A value below
float32's normal numbers may be flushed to 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .values import Floats

ROUNDING = 2.0**-22  # two units in the last place of float32
FUNCTION = 2.0**-9  # the hardware's tanh errs by 2^-11
TINY = 2.0**-120
LARGEST = float(torch.finfo(torch.float32).max)

Numbers = tuple[Tensor, Tensor, Tensor]  # lo, hi, nan


def widened(lo: Tensor, hi: Tensor, nan: Tensor, relative: float = ROUNDING, absolute: float = TINY) -> Numbers:
    """Bounds of what a kernel may have for a value within lo and hi. NaN counts as no bound."""
    lo, hi = lo.nan_to_num(-math.inf, math.inf, -math.inf), hi.nan_to_num(math.inf, math.inf, -math.inf)
    lo = torch.where(lo > 0, lo * (1 - relative), lo * (1 + relative)) - absolute
    hi = torch.where(hi > 0, hi * (1 + relative), hi * (1 - relative)) + absolute
    return torch.where(lo < -LARGEST, -math.inf, lo), torch.where(hi > LARGEST, math.inf, hi), nan


def flushed(lo: Tensor, hi: Tensor) -> tuple[Tensor, Tensor]:
    """Bounds of numbers that are given, of which those close to 0 may be flushed to 0."""
    return torch.where((lo > 0) & (lo <= TINY), 0.0, lo), torch.where((hi < 0) & (hi >= -TINY), 0.0, hi)


def add(x: Floats, y: Floats) -> Numbers:
    opposite = ((x.hi == math.inf) & (y.lo == -math.inf)) | ((x.lo == -math.inf) & (y.hi == math.inf))
    return widened(x.lo + y.lo, x.hi + y.hi, x.nan | y.nan | opposite)


def negative(x: Floats) -> Floats:
    return x._replace(lo=-x.hi, hi=-x.lo)


def sub(x: Floats, y: Floats) -> Numbers:
    return add(x, negative(y))


def mul(x: Floats, y: Floats) -> Numbers:
    lo, hi = _corners(x, y, torch.mul)
    if x.key == y.key:
        lo = lo.clamp(min=0)
        lo = torch.where((x.lo <= 0) & (x.hi >= 0), 0.0, lo)
    # 0 * inf is NaN; a small number may be flushed to 0.
    return widened(lo, hi, x.nan | y.nan | (_near_zero(x) & _infinite(y)) | (_near_zero(y) & _infinite(x)))


def div(x: Floats, y: Floats) -> Numbers:
    by_zero = _near_zero(y)
    divisor = y._replace(lo=torch.where(by_zero, 1.0, y.lo), hi=torch.where(by_zero, 1.0, y.hi))
    lo, hi = _corners(x, divisor, torch.div)
    nan = x.nan | y.nan | by_zero | (_infinite(x) & _infinite(y))
    return widened(torch.where(by_zero, -math.inf, lo), torch.where(by_zero, math.inf, hi), nan)


def floordiv(x: Floats, y: Floats) -> Numbers:
    lo, hi, nan = div(x, y)
    return lo.floor(), hi.floor(), nan


def mod(x: Floats, y: Floats) -> Numbers:
    """Between 0 and the divisor, but for the rounding of the quotient times the divisor."""
    error = torch.maximum(_size(x), _size(y)) * (4 * ROUNDING)
    nan = x.nan | y.nan | _infinite(x) | _infinite(y) | _near_zero(y)
    lo, hi = torch.minimum(y.lo, torch.zeros_like(y.lo)) - error, torch.maximum(y.hi, torch.zeros_like(y.hi)) + error
    return widened(torch.where(nan, -math.inf, lo), torch.where(nan, math.inf, hi), nan)


def minimum(x: Floats, y: Floats) -> Numbers:
    return _extremum(torch.minimum, x, y)


def maximum(x: Floats, y: Floats) -> Numbers:
    return _extremum(torch.maximum, x, y)


def _extremum(of: Callable[[Tensor, Tensor], Tensor], x: Floats, y: Floats) -> Numbers:
    # PyTorch's result is NaN if an operand is, a GPU's is the other operand.
    nan = x.nan | y.nan
    lo = torch.where(nan, torch.minimum(x.lo, y.lo), of(x.lo, y.lo))
    return lo, torch.where(nan, torch.maximum(x.hi, y.hi), of(x.hi, y.hi)), nan


def magnitude(x: Floats) -> Numbers:
    return torch.maximum(x.lo, -x.hi).clamp(min=0), torch.maximum(-x.lo, x.hi), x.nan


def _increasing(of: Callable[[Tensor], Tensor]) -> Callable[[Floats], Numbers]:
    return lambda x: widened(of(x.lo), of(x.hi), x.nan, FUNCTION, FUNCTION)


def _logarithm(of: Callable[[Tensor], Tensor]) -> Callable[[Floats], Numbers]:
    def computed(x: Floats) -> Numbers:
        # A small number may be flushed to 0, whose logarithm is -inf.
        lo = torch.where(x.lo <= TINY, -math.inf, of(x.lo.clamp(min=TINY)))
        return widened(lo, of(x.hi.clamp(min=TINY)), x.nan | (x.lo < 0), FUNCTION, FUNCTION)

    return computed


def sqrt(x: Floats) -> Numbers:
    return widened(x.lo.clamp(min=0).sqrt(), x.hi.clamp(min=0).sqrt(), x.nan | (x.lo < 0), FUNCTION)


def _periodic(x: Floats) -> Numbers:
    one = torch.ones_like(x.lo + x.hi)
    return widened(-one, one, x.nan | _infinite(x), FUNCTION)


BINARY: dict[str, Callable[[Floats, Floats], Numbers]] = {
    "add": add, "sub": sub, "mul": mul, "div": div, "floordiv": floordiv, "mod": mod, "min": minimum, "max": maximum,
}  # fmt: skip

UNARY: dict[str, Callable[[Floats], Numbers]] = {
    "abs": magnitude,
    "tanh": _increasing(torch.tanh),
    "sigmoid": _increasing(torch.sigmoid),
    "exp": _increasing(torch.exp),
    "exp2": _increasing(torch.exp2),
    "log": _logarithm(torch.log),
    "log2": _logarithm(torch.log2),
    "sqrt": sqrt,
    "sin": _periodic,
    "cos": _periodic,
}


def _corners(x: Floats, y: Floats, of: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    values = [of(a, b) for a in (x.lo, x.hi) for b in (y.lo, y.hi)]
    # At an end 0 * inf is NaN, but 0 times what is near the end is 0; inf / inf is NaN, and may be anything.
    if of is torch.mul:
        values = [value.nan_to_num(0.0, math.inf, -math.inf) for value in values]
    lo = hi = values[0]
    for value in values[1:]:
        lo, hi = torch.minimum(lo, value), torch.maximum(hi, value)
    return lo, hi


def _near_zero(x: Floats) -> Tensor:
    return (x.lo <= TINY) & (x.hi >= -TINY)


def _infinite(x: Floats) -> Tensor:
    return (x.hi == math.inf) | (x.lo == -math.inf)


def _size(x: Floats) -> Tensor:
    return torch.maximum(x.lo.abs(), x.hi.abs())
