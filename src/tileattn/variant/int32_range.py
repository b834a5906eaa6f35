"""The range of integer expressions: which products may leave int32.

Kernels compute with int32 positions, because int64 arithmetic takes several instructions. Products that may leave int32
are computed in int64, as in PyTorch. The bounds assume lengths below 2^24 and window sizes below 2^30. Sums stay within
int32 (see ``masks.FIRST_POSITION``).
"""

from __future__ import annotations

from typing import Any

from .expression import Expr, dtype_of

POSITION_BITS = 24
_OPERAND = "i"  # a run-time number of a mask: a window, a prefix
_OPERAND_BITS = 30
_ANY_BITS = 31


def leaves_int32(expr: Expr) -> bool:
    """Whether the expression is a product of integers that may be 2^31 or more."""
    return expr.op == "mul" and expr.dtype == "int" and sum(map(_bits, expr.args)) > _ANY_BITS


def _bits(value: Any) -> int:
    """A number of bits such that the integer's magnitude is at most two to this power."""
    if not isinstance(value, Expr):
        return max(abs(int(value)) - 1, 0).bit_length()
    if value.dtype == "bool":
        return 0
    if value.op == "symbol":
        name = str(value.args[0])
        if name.startswith("uniform"):
            return _ANY_BITS
        return _OPERAND_BITS if name.startswith(_OPERAND) else POSITION_BITS
    if value.op in ("load", "size", "int"):
        return _ANY_BITS
    bits = [_bits(arg) for arg in (value.args[1:] if value.op == "where" else value.args) if dtype_of(arg) != "float"]
    if value.op == "mul":
        return sum(bits)
    if value.op in ("floordiv", "mod") and type(value.args[1]) is int and value.args[1] > 0:
        divisor = value.args[1]
        return max(bits[0] - (divisor.bit_length() - 1), 0) if value.op == "floordiv" else (divisor - 1).bit_length()
    return max(bits, default=_ANY_BITS) + (value.op in ("add", "sub"))
