"""torch's methods and functions for traced values, such as ``(q - k).abs()`` and ``torch.clamp(score, max=9)``.

Both call the functions of :mod:`tileattn.variant.torch_functions` by name. The methods are written out one by one, so
that torch.compile can trace them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

# Filled by torch_functions.py: the functions by their names, and the names under which torch calls them.
FUNCTIONS: dict[str, Callable[..., Any]] = {}
TORCH_NAMES: dict[str, str] = {}


def call_of_torch(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of torch's function `name` if some of its arguments are traced values.

    Raises:
        TypeError: the function cannot be traced; the message says what to write instead.
    """
    plain = name.strip("_")
    if plain != name and plain not in TORCH_NAMES and plain[1:] in TORCH_NAMES:  # __rsub__
        plain, args = plain[1:], args[::-1]
    if kwargs.get("inplace") is False:
        kwargs = {key: value for key, value in kwargs.items() if key != "inplace"}
    known = plain in TORCH_NAMES
    if known and kwargs:
        try:
            inspect.signature(FUNCTIONS[TORCH_NAMES[plain]]).bind(*args, **kwargs)
        except TypeError:
            known = False
    if not known:
        options = f" with {', '.join(kwargs)}" if kwargs else ""
        instead = _INSTEAD.get(plain, "use operators and the functions of tileattn.math")
        raise TypeError(f"torch.{plain} cannot be traced in a mask or score modification{options}; {instead}")
    return FUNCTIONS[TORCH_NAMES[plain]](*args, **kwargs)


_INSTEAD = {
    "erf": "approximate it with tileattn.math.tanh or sigmoid",
    "gelu": "write 0.5 * x * (1 + tileattn.math.tanh(0.79788456 * (x + 0.044715 * x**3))), its approximation",
    "isnan": "write x != x",
    "isinf": "write abs(x) == float('inf')",
    "isfinite": "write abs(x) < float('inf')",
    "round": "write (x + 0.5) // 1",
    "atan2": "read the angle from a captured table, `angles[q - k]`",
    "any": "a traced condition is one value: join conditions with `|`",
    "all": "a traced condition is one value: join conditions with `&`",
    "stack": "a traced value is one number, not a tensor: write the formula for one score",
    "arange": "positions are the arguments: write the formula for one score",
}


class TensorMethods:
    """Base class of :class:`tileattn.variant.expression.Expr`: torch's methods of one traced value."""

    __slots__ = ()

    def _call(self, name: str, *others: Any) -> Any:
        """The result of the function `name` on this value and `others`."""
        raise NotImplementedError

    # --- Of one value ---

    def abs(self) -> Any:
        return self._call("abs")

    def neg(self) -> Any:
        return self._call("neg")

    def sign(self) -> Any:
        return self._call("sign")

    def square(self) -> Any:
        return self._call("square")

    def sqrt(self) -> Any:
        return self._call("sqrt")

    def rsqrt(self) -> Any:
        return self._call("rsqrt")

    def reciprocal(self) -> Any:
        return self._call("reciprocal")

    def exp(self) -> Any:
        return self._call("exp")

    def exp2(self) -> Any:
        return self._call("exp2")

    def expm1(self) -> Any:
        return self._call("expm1")

    def log(self) -> Any:
        return self._call("log")

    def log2(self) -> Any:
        return self._call("log2")

    def log1p(self) -> Any:
        return self._call("log1p")

    def sin(self) -> Any:
        return self._call("sin")

    def cos(self) -> Any:
        return self._call("cos")

    def tanh(self) -> Any:
        return self._call("tanh")

    def sigmoid(self) -> Any:
        return self._call("sigmoid")

    def relu(self) -> Any:
        return self._call("relu")

    def floor(self) -> Any:
        return self._call("floor")

    def ceil(self) -> Any:
        return self._call("ceil")

    def trunc(self) -> Any:
        return self._call("trunc")

    def logical_not(self) -> Any:
        return self._call("logical_not")

    # --- Of several values ---

    def add(self, other: Any) -> Any:
        return self._call("add", other)

    def sub(self, other: Any) -> Any:
        return self._call("sub", other)

    def mul(self, other: Any) -> Any:
        return self._call("mul", other)

    def div(self, other: Any, *, rounding_mode: str | None = None) -> Any:
        return self._call("div", other, rounding_mode)

    def floor_divide(self, other: Any) -> Any:
        return self._call("floor_divide", other)

    def remainder(self, other: Any) -> Any:
        return self._call("remainder", other)

    def fmod(self, other: Any) -> Any:
        return self._call("fmod", other)

    def pow(self, exponent: Any) -> Any:
        return self._call("pow", exponent)

    def minimum(self, other: Any) -> Any:
        return self._call("minimum", other)

    def maximum(self, other: Any) -> Any:
        return self._call("maximum", other)

    def clamp(self, min: Any = None, max: Any = None) -> Any:
        return self._call("clamp", min, max)

    def clip(self, min: Any = None, max: Any = None) -> Any:
        return self._call("clamp", min, max)

    def clamp_min(self, min: Any) -> Any:
        return self._call("clamp", min, None)

    def clamp_max(self, max: Any) -> Any:
        return self._call("clamp", None, max)

    def where(self, condition: Any, other: Any) -> Any:
        return self._call("select", condition, other)

    def masked_fill(self, mask: Any, value: Any) -> Any:
        return self._call("masked_fill", mask, value)

    def lt(self, other: Any) -> Any:
        return self._call("lt", other)

    def le(self, other: Any) -> Any:
        return self._call("le", other)

    def gt(self, other: Any) -> Any:
        return self._call("gt", other)

    def ge(self, other: Any) -> Any:
        return self._call("ge", other)

    def eq(self, other: Any) -> Any:
        return self._call("eq", other)

    def ne(self, other: Any) -> Any:
        return self._call("ne", other)

    def logical_and(self, other: Any) -> Any:
        return self._call("logical_and", other)

    def logical_or(self, other: Any) -> Any:
        return self._call("logical_or", other)

    def logical_xor(self, other: Any) -> Any:
        return self._call("logical_xor", other)

    # --- Conversions: floats are computed in float32 at least, and never rounded to less ---

    def float(self) -> Any:
        return self._call("convert", "float")

    def double(self) -> Any:
        return self._call("convert", "float")

    def half(self) -> Any:
        return self._call("convert", "float")

    def bfloat16(self) -> Any:
        return self._call("convert", "float")

    def int(self) -> Any:
        return self._call("convert", "int")

    def long(self) -> Any:
        return self._call("convert", "int")

    def bool(self) -> Any:
        return self._call("convert", "bool")

    def to(self, dtype: Any) -> Any:
        return self._call("convert", dtype)

    def type(self, dtype: Any) -> Any:
        return self._call("convert", dtype)

    def type_as(self, other: Any) -> Any:
        return self._call("convert", other)

    def item(self) -> Any:
        """Returns the value itself: a captured 0-dim tensor is already one number."""
        return self
