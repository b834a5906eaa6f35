"""Which products of integers may leave int32: kernels compute these in int64, as PyTorch does.

Positions, and what grows with them, are int32 in kernels, where int64 takes several instructions. Lengths are taken
to be below 2^24 here, sizes of windows below 2^30. Sums stay within int32 (see ``masks.FIRST_POSITION``).
"""

from __future__ import annotations

from typing import Any

from .expression import Expr, dtype_of

POSITION_BITS = 24
_OPERAND = "i"  # a run-time number of a mask: a window, a prefix
_OPERAND_BITS = 30
_ANY_BITS = 31


def leaves_int32(expr: Expr) -> bool:
    """Whether it is a product of integers that may be 2^31 or more."""
    return expr.op == "mul" and expr.dtype == "int" and sum(map(_bits, expr.args)) > _ANY_BITS


def _bits(value: Any) -> int:
    """The magnitude of an integer is at most two to this power."""
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
