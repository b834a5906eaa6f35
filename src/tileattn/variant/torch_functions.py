"""torch's functions on traced values, composed of the few operations that kernels implement.

``torch.clamp(score, max=30.0)``, ``score.clamp(max=30.0)`` and ``tileattn.math.clamp(score, max=30.0)`` all call the
same function of this module. The functions take traced values and numbers. Backends only implement
:data:`tileattn.variant.operations.OPS`, from which derivatives are computed too. The derivatives are those of torch,
also where a function has a kink: 0 for ``relu`` at 0, 1 for ``clamp`` at its bounds.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from .expression import Expr, apply, dtype_of
from .operations import OPS
from .torch_methods import FUNCTIONS, TORCH_NAMES

_TRACED = "a mask or score modification"


def floated(x: Any) -> Any:
    """The value converted to a float."""
    kind = dtype_of(x)
    if not isinstance(x, Expr):
        return float(x)
    return x if kind == "float" else apply("float", x) if kind == "int" else apply("where", x, 1.0, 0.0)


def neg(x: Any) -> Any:
    return apply("sub", 0, x)


def sign(x: Any) -> Any:
    one = 1.0 if dtype_of(x) == "float" else 1
    return apply("where", apply("gt", x, 0), one, apply("where", apply("lt", x, 0), -one, 0 * one))


def square(x: Any) -> Any:
    return apply("mul", x, x)


def rsqrt(x: Any) -> Any:
    return apply("div", 1.0, apply("sqrt", x))


def reciprocal(x: Any) -> Any:
    return apply("div", 1.0, x)


def expm1(x: Any) -> Any:
    """Exact to a rounding of 1, not of itself."""
    return apply("sub", apply("exp", x), 1.0)


def log1p(x: Any) -> Any:
    """Exact to a rounding of 1, not of itself."""
    return apply("log", apply("add", 1.0, x))


def relu(x: Any) -> Any:
    return apply("where", apply("le", x, 0), 0.0 if dtype_of(x) == "float" else 0, x)


def relu6(x: Any) -> Any:
    return clamp(x, 0, 6)


def leaky_relu(x: Any, negative_slope: float = 0.01) -> Any:
    return apply("where", apply("gt", x, 0), x, apply("mul", floated(x), negative_slope))


def elu(x: Any, alpha: float = 1.0) -> Any:
    above = apply("gt", x, 0)
    # For large x, exp(x) would be infinite, and its derivative times 0 would be NaN.
    return apply("where", above, x, apply("mul", alpha, expm1(apply("where", above, 0.0, x))))


def softplus(x: Any, beta: float = 1.0, threshold: float = 20.0) -> Any:
    """``log(1 + exp(beta x)) / beta``, without overflow; torch's threshold is not needed."""
    scaled = floated(x) if beta == 1 else apply("mul", x, beta)
    rest = apply("log", apply("add", 1.0, apply("exp", neg(apply("abs", scaled)))))
    result = apply("add", apply("max", scaled, 0.0), rest)
    return result if beta == 1 else apply("mul", result, 1.0 / beta)


def logsigmoid(x: Any) -> Any:
    return neg(softplus(neg(floated(x))))


def silu(x: Any) -> Any:
    return apply("mul", x, apply("sigmoid", x))


def floor(x: Any) -> Any:
    return x if dtype_of(x) == "int" else apply("floordiv", x, 1.0)


def ceil(x: Any) -> Any:
    return x if dtype_of(x) == "int" else neg(floor(neg(x)))


def trunc(x: Any) -> Any:
    return x if dtype_of(x) == "int" else apply("where", apply("lt", x, 0.0), ceil(x), floor(x))


def clamp(x: Any, min: Any = None, max: Any = None) -> Any:
    if min is None and max is None:
        raise ValueError("clamp: at least one of min and max must be given")
    floats = "float" in (dtype_of(x), *(dtype_of(bound) for bound in (min, max) if bound is not None))
    if not floats:
        x = x if min is None else apply("max", x, min)
        return x if max is None else apply("min", x, max)
    # Not min and max, whose derivative at a bound would be 1/2.
    x = floated(x)
    x = x if min is None else apply("where", apply("lt", x, min), floated(min), x)
    return x if max is None else apply("where", apply("gt", x, max), floated(max), x)


def hardtanh(x: Any, min_val: float = -1.0, max_val: float = 1.0) -> Any:
    return clamp(x, min_val, max_val)


def div(x: Any, y: Any, rounding_mode: str | None = None) -> Any:
    if rounding_mode == "floor":
        return apply("floordiv", x, y)
    if rounding_mode == "trunc":
        return _truncated(x, y)
    if rounding_mode is not None:
        raise ValueError(f'div: rounding_mode must be None, "floor" or "trunc", got {rounding_mode!r}')
    return apply("div", x, y)


def _truncated(x: Any, y: Any) -> Any:
    """The quotient, rounded towards 0."""
    if "float" in (dtype_of(x), dtype_of(y)):
        return trunc(apply("div", x, y))
    size = apply("floordiv", apply("abs", x), apply("abs", y))
    differ = apply("ne", apply("lt", x, 0), apply("lt", y, 0))
    return apply("where", differ, neg(size), size)


def fmod(x: Any, y: Any) -> Any:
    """The remainder that has the sign of x; ``%`` has that of y."""
    return apply("sub", x, apply("mul", _truncated(x, y), y))


def pow(x: Any, y: Any) -> Any:
    if not isinstance(x, Expr):
        return _power_of_number(x, y)
    if isinstance(y, Expr):
        raise TypeError(
            f"{_TRACED} cannot raise a traced value to a traced power; for a positive base write "
            f"tileattn.math.exp(y * tileattn.math.log(x))"
        )
    if isinstance(y, float) and y in (0.5, -0.5):
        return apply("sqrt", x) if y > 0 else rsqrt(x)
    if y != int(y) or abs(y) > 8 or (y < 0 and "float" not in (dtype_of(x), dtype_of(y))):
        raise TypeError(
            f"a traced value can be raised to an integer power from -8 to 8 (an integer value from 0 to 8), to 0.5 and "
            f"-0.5, not to {y!r}; for a positive x write tileattn.math.exp({y!r} * tileattn.math.log(x))"
        )
    x = floated(x) if isinstance(y, float) else x
    if y == 0:
        return 1.0 if dtype_of(x) == "float" else 1
    power = functools.reduce(lambda product, factor: apply("mul", product, factor), [x] * abs(int(y)))
    return power if y > 0 else apply("div", 1.0, power)


def _power_of_number(base: Any, y: Any) -> Any:
    if not isinstance(y, Expr):
        return base**y
    if dtype_of(y) != "float" and not isinstance(base, float):
        raise TypeError(
            f"{_TRACED} cannot raise the integer {base!r} to a traced integer; write {float(base)!r} ** x, in floats"
        )
    if not base > 0:
        raise TypeError(f"{_TRACED} can raise a positive number to a traced value, not {base!r}")
    return apply("exp2", floated(y) if base == 2 else apply("mul", y, math.log2(base)))


def select(x: Any, condition: Any, y: Any) -> Any:
    """``x.where(condition, y)``."""
    return apply("where", condition, x, y)


def masked_fill(x: Any, mask: Any, value: Any) -> Any:
    return apply("where", mask, value, x)


def logical_not(x: Any) -> Any:
    return apply("not", convert(x, "bool"))


def logical_and(x: Any, y: Any) -> Any:
    return apply("and", convert(x, "bool"), convert(y, "bool"))


def logical_or(x: Any, y: Any) -> Any:
    return apply("or", convert(x, "bool"), convert(y, "bool"))


def logical_xor(x: Any, y: Any) -> Any:
    return apply("ne", convert(x, "bool"), convert(y, "bool"))


def xor(x: Any, y: Any) -> Any:
    """``x ^ y`` of two conditions, or of the bits of two integers."""
    kinds = {dtype_of(x), dtype_of(y)}
    if kinds == {"bool"}:
        return apply("ne", x, y)
    return apply("sub", apply("or", x, y), apply("and", x, y))


def shift_left(x: Any, y: Any) -> Any:
    return apply("mul", x, 2 ** _bits("<<", x, y))


def shift_right(x: Any, y: Any) -> Any:
    return apply("floordiv", x, 2 ** _bits(">>", x, y))


def _bits(sign: str, x: Any, y: Any) -> int:
    if dtype_of(x) != "int" or isinstance(y, (Expr, bool)) or not isinstance(y, int) or not 0 <= y < 31:
        raise TypeError(f"`{sign}` in {_TRACED} shifts a traced integer by a number from 0 to 30, got {x} {sign} {y}")
    return y


def zeros_like(x: Any) -> Any:
    return full_like(x, 0)


def ones_like(x: Any) -> Any:
    return full_like(x, 1)


def full_like(x: Any, fill_value: Any) -> Any:
    return convert(fill_value, dtype_of(x))


_KINDS = {
    torch.float16: "float", torch.bfloat16: "float", torch.float32: "float", torch.float64: "float",
    torch.int32: "int", torch.int64: "int", torch.bool: "bool",
}  # fmt: skip


def convert(x: Any, dtype: Any) -> Any:
    """``x.to(dtype)``: a dtype of torch, "float", "int" or "bool", or a traced value that has one."""
    kind = dtype_of(dtype) if isinstance(dtype, Expr) else _KINDS.get(dtype, dtype)
    if kind not in ("float", "int", "bool"):
        raise TypeError(
            f"{_TRACED} cannot convert a traced value to {dtype}: it is a float (computed in float32 at least), an "
            f"integer or a condition; use .float(), .int() or .bool()"
        )
    if kind == "float":
        return floated(x)
    if kind == "bool":
        return x if dtype_of(x) == "bool" else apply("ne", x, 0)
    if dtype_of(x) == "int":
        return x
    return apply("int", x) if dtype_of(x) == "float" else apply("where", x, 1, 0)


def _operation(op: str) -> Callable[..., Any]:
    return lambda *operands: apply(op, *operands)


# The functions by torch's names. The methods of traced values, torch's functions and tileattn.math call them. The
# dictionary is defined in torch_methods.py, because expression.py cannot import this module.
FUNCTIONS.update({op: _operation(op) for op in OPS})
FUNCTIONS.update({
    "minimum": _operation("min"), "maximum": _operation("max"), "floor_divide": _operation("floordiv"),
    "remainder": _operation("mod"), "neg": neg, "sign": sign, "square": square, "rsqrt": rsqrt,
    "reciprocal": reciprocal, "expm1": expm1, "log1p": log1p, "relu": relu, "relu6": relu6, "leaky_relu": leaky_relu,
    "elu": elu, "softplus": softplus, "logsigmoid": logsigmoid, "silu": silu, "floor": floor, "ceil": ceil,
    "trunc": trunc, "clamp": clamp, "hardtanh": hardtanh, "div": div, "fmod": fmod, "pow": pow, "select": select,
    "masked_fill": masked_fill, "logical_not": logical_not, "logical_and": logical_and, "logical_or": logical_or,
    "logical_xor": logical_xor, "xor": xor, "shift_left": shift_left, "shift_right": shift_right,
    "zeros_like": zeros_like, "ones_like": ones_like, "full_like": full_like, "convert": convert,
})  # fmt: skip

# Other names under which torch calls them, as in `torch.absolute(x)` and in `tensor & x`, where the tensor is first.
TORCH_NAMES.update(
    {name: name for name in FUNCTIONS if name not in ("select", "convert", "floordiv", "mod", "float", "int")}
)
TORCH_NAMES.update({
    "absolute": "abs", "negative": "neg", "subtract": "sub", "multiply": "mul", "divide": "div", "true_divide": "div",
    "less": "lt", "less_equal": "le", "greater": "gt", "greater_equal": "ge", "not_equal": "ne",
    "bitwise_and": "and", "bitwise_or": "or", "bitwise_not": "not", "bitwise_xor": "xor",
    "bitwise_left_shift": "shift_left", "bitwise_right_shift": "shift_right", "clip": "clamp", "fix": "trunc",
    "log_sigmoid": "logsigmoid", "truediv": "div", "floordiv": "floor_divide", "mod": "remainder", "invert": "not",
    "lshift": "shift_left", "rshift": "shift_right",
})  # fmt: skip
