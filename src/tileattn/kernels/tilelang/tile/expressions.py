"""Emits traced expressions as TileLang expressions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import tilelang.language as T

from ....variant.expression import Expr, dtype_of
from ....variant.int32_range import leaves_int32
from .steady import MAX_STEP, is_uniform, slope_of, step_of

_TIR_DTYPE = {"float": "float32", "int": "int32", "bool": "bool"}


class Key(NamedTuple):
    """The key of a score within a loop over a tile: ``value == start + offset``.

    ``start`` is the same for all scores that a thread holds, ``offset`` a constant once the loop is unrolled.
    """

    value: Any
    start: Any
    offset: Any


def key_in_tile(k_lo: Any, j: Any) -> Key:
    """Column j of a tile that begins at key k_lo, where a thread holds columns 2t and 2t + 1 of each eight.

    This is the layout of scores in NVIDIA's matrix units (see ``softmax.own_columns_layout``). On others the result is
    correct too, but ``start`` has several values in a thread.
    """
    return Key(k_lo + j, k_lo + j % 8 // 2 * 2, j // 8 * 8 + j % 2)


class Emitter:
    """Emits expressions of one program; `values` maps operands (``i0``, ``f0``) to scalars and ``t0`` to buffers.

    `tiles` maps the text of a load to a fragment that holds its value for each score of a tile; the symbols ``i`` and
    ``j`` then say which score.

    With `clamps`, a load by position reads the nearest element where the position lies beyond the tensor. Otherwise
    TileLang puts a branch around each load, which gives 0 there.
    """

    columns: tuple[str, ...] = ("k",)  # the positions that may run along a tile's columns

    def __init__(self, values: dict[str, Any], tiles: dict[str, Any] | None = None, clamps: bool = False) -> None:
        self.values = values
        self.clamps = clamps
        self.tiles = tiles or {}

    def __call__(self, expr: Any, /, **symbols: Any) -> Any:
        """The TileLang expression of `expr`, with the given values of its symbols (``q=...``, ``k=...``).

        Integers are int32; one computed in int64 is clamped.
        """
        value = self.exact(expr, **symbols)
        if dtype_of(expr) != "int" or str(getattr(value, "dtype", "")) != "int64":
            return value
        return T.cast(T.max(T.min(value, T.int64(2**31 - 1)), T.int64(-(2**31))), "int32")

    def exact(self, expr: Any, /, **symbols: Any) -> Any:
        """The same, of which an integer may be int64."""
        return self._emit(expr, {**self.values, **symbols})

    def _emit(self, expr: Any, values: dict[str, Any], rounds: bool = True) -> Any:
        """`rounds`: whether a rounding of the value changes the result by as little; see :meth:`_steady`."""
        if not isinstance(expr, Expr):
            return T.bool(expr) if isinstance(expr, bool) else T.cast(expr, _dtype_of_number(expr))
        if expr.op == "symbol":
            value = values[expr.args[0]]
            return value.value if isinstance(value, Key) else value
        if expr.op == "size":
            return values[expr.args[0]].shape[expr.args[1]]
        if expr.op == "load":
            tile = self.tiles.get(str(expr))
            if tile is not None:
                return T.cast(tile[values["i"], values["j"]], "float32")
            buffer = values[expr.args[0]]
            indices = [self._emit(arg, values) for arg in expr.args[1:]]
            if self.clamps:
                indices = [_clamped(*each) for each in zip(indices, expr.args[1:], buffer.shape, strict=True)]
            element = buffer[tuple(indices)]
            if expr.dtype == "bool":
                return element != T.cast(0, "uint8")
            return T.cast(element, "int64" if str(buffer.dtype) == "int64" else _TIR_DTYPE[expr.dtype])
        if rounds and expr.dtype == "float" and (steady := self._steady(expr, values)) is not None:
            return steady
        numbers = expr.args[1:] if expr.op == "where" else expr.args
        kinds = [dtype_of(arg) for arg in numbers]
        is_float = expr.op in ("div", *_FLOAT_FUNCTIONS) or "float" in map(dtype_of, expr.args)
        emit = self._float if is_float and "bool" not in kinds else self._emit
        args = [emit(arg, values, rounds and expr.op in _SMOOTH) for arg in numbers]
        if leaves_int32(expr):
            args[0] = T.cast(args[0], "int64")
        return _OPS[expr.op](*([self._emit(expr.args[0], values, False), *args] if expr.op == "where" else args))

    def _float(self, expr: Any, values: dict[str, Any], rounds: bool = True) -> Any:
        """`expr` as float32.

        Converting an integer takes as long as four additions. One that grows steadily with k is converted at the
        thread's first key, and a constant is added in float32: exact where both are below 2^24, and beyond that within
        one rounding more than converting it. Other integers are converted as they are.
        """
        if dtype_of(expr) != "int" or not isinstance(expr, Expr):
            return T.cast(self._emit(expr, values, rounds), "float32")
        name, key = self._column(values)
        if key is None:
            return T.cast(self._emit(expr, values), "float32")
        step = step_of(expr, name)
        if step is not None and 0 < abs(step) <= MAX_STEP:
            start = self._emit(expr, {**values, name: key.start})
            return T.cast(start, "float32") + T.cast(step * key.offset, "float32")
        if step is None and expr.op in ("abs", "min", "max"):  # rounding keeps order and sign
            return _OPS[expr.op](*(self._float(arg, values) for arg in expr.args))
        if step is None and expr.op == "where":
            condition, *branches = expr.args
            return T.if_then_else(self._emit(condition, values, False), *(self._float(arg, values) for arg in branches))
        return T.cast(self._emit(expr, values), "float32")

    def _steady(self, expr: Any, values: dict[str, Any]) -> Any:
        """A float that grows by the same for each column, as its value at the thread's first one and what follows.

        The former is computed once for each row that a thread holds, the latter is a constant or one more factor. So
        a column costs one operation, however long the expression is. None for other expressions.

        It is rounded otherwise than the expression: 0 may become -1e-9, of which a root is NaN and the floor -1, and
        the two passes take different positions apart. So it is for terms and factors of the score alone, and not for
        what conditions, roots, logarithms, divisors, `//` and `%` are made of.
        """
        name, key = self._column(values)
        slope = slope_of(expr, name) if key is not None else None
        if slope is None or (isinstance(slope, float) and slope == 0.0):
            return None
        first = self._emit(expr, {**values, name: key.start})
        return first + self._emit(slope, values) * T.cast(key.offset, "float32")

    def _column(self, values: dict[str, Any]) -> tuple[str, Any]:
        """The position that runs along a tile's columns, and its key; None if it is not taken apart."""
        for name in self.columns:
            if isinstance(values.get(name), Key):
                return name, values[name]
        return "k", None


def _dtype_of_number(number: Any) -> str:
    kind = dtype_of(number)
    return "int64" if kind == "int" and not -(2**31) <= number < 2**31 else _TIR_DTYPE[kind]


def _clamped(index: Any, expr: Any, size: Any) -> Any:
    """Within the tensor, if it depends on the position."""
    return index if is_uniform(expr) else T.max(T.min(index, size - 1), 0)


_FLOAT_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "tanh": T.tanh,  # under fast math the hardware's; simplify.py says where that is exact enough
    "sigmoid": lambda x: 1.0 / (1.0 + T.exp(0.0 - x)),
    "exp": T.exp,
    "exp2": T.exp2,
    "log": T.log,
    "log2": T.log2,
    "sqrt": T.sqrt,
    "sin": T.sin,
    "cos": T.cos,
    "float": lambda x: x,
}

# A small change of an operand changes these by as little. A branch of `where` is one, its condition is not; `div` is
# left out for its divisor, and a uniform one is a factor by then (simplify.py).
_SMOOTH = frozenset(("add", "sub", "mul", "min", "max", "abs", "where", "float", "tanh", "sigmoid", "exp", "exp2"))

_OPS: dict[str, Callable[..., Any]] = {
    **_FLOAT_FUNCTIONS,
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y,
    "floordiv": lambda x, y: T.floordiv(x, y) if "int" in str(x.dtype) else T.floor(x / y),
    "mod": lambda x, y: T.floormod(x, y) if "int" in str(x.dtype) else x - y * T.floor(x / y),
    "lt": lambda x, y: x < y,
    "le": lambda x, y: x <= y,
    "gt": lambda x, y: x > y,
    "ge": lambda x, y: x >= y,
    "eq": lambda x, y: x == y,
    "ne": lambda x, y: x != y,
    "and": lambda x, y: x & y,
    "or": lambda x, y: x | y,
    "not": lambda x: T.Not(x),
    "min": lambda x, y: T.min(x, y),
    "max": lambda x, y: T.max(x, y),
    "where": lambda c, x, y: T.if_then_else(c, x, y),
    "int": lambda x: T.cast(x, "int32"),
    "abs": lambda x: T.abs(x) if "float" in str(x.dtype) else T.if_then_else(x < 0, 0 - x, x),
}
