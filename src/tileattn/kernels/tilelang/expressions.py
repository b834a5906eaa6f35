"""Traced expressions, turned into TileLang's."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import tilelang.language as T

from ...expr import Expr, dtype_of

_TIR_DTYPE = {"float": "float32", "int": "int32", "bool": "bool"}


class Emitter:
    """Emits expressions of one program; `values` maps operands (``i0``, ``f0``) to scalars and ``t0`` to buffers.

    `tiles` maps the text of a load to a fragment that holds its value for each score of a tile; the symbols ``i`` and
    ``j`` then say which score.
    """

    def __init__(self, values: dict[str, Any], tiles: dict[str, Any] | None = None) -> None:
        self.values = values
        self.tiles = tiles or {}

    def __call__(self, expr: Any, /, **symbols: Any) -> Any:
        """The TileLang expression of `expr`, with the given values of its symbols (``q=...``, ``k=...``)."""
        return self._emit(expr, {**self.values, **symbols})

    def _emit(self, expr: Any, values: dict[str, Any]) -> Any:
        if not isinstance(expr, Expr):
            return T.bool(expr) if isinstance(expr, bool) else T.cast(expr, _TIR_DTYPE[dtype_of(expr)])
        if expr.op == "symbol":
            return values[expr.args[0]]
        if expr.op == "size":
            return values[expr.args[0]].shape[expr.args[1]]
        if expr.op == "load":
            tile = self.tiles.get(str(expr))
            if tile is not None:
                return T.cast(tile[values["i"], values["j"]], "float32")
            buffer = values[expr.args[0]]
            element = buffer[tuple(self._emit(arg, values) for arg in expr.args[1:])]
            return element != T.cast(0, "uint8") if expr.dtype == "bool" else T.cast(element, _TIR_DTYPE[expr.dtype])
        args = [self._emit(arg, values) for arg in expr.args]
        numbers = args[1:] if expr.op == "where" else args
        if expr.op in ("div", *_FLOAT_FUNCTIONS) or any(dtype_of(arg) == "float" for arg in expr.args):
            kinds = [dtype_of(arg) for arg in (expr.args[1:] if expr.op == "where" else expr.args)]
            if "bool" not in kinds:
                numbers = [T.cast(arg, "float32") for arg in numbers]
        return _OPS[expr.op](*([args[0], *numbers] if expr.op == "where" else numbers))


def _tanh(x: Any) -> Any:
    # 1 - 2 / (e^2x + 1): the hardware's exp2 is exact to 2^-22, its tanh only to 2^-11. Saturates at both ends.
    return T.cast(1, "float32") - T.cast(2, "float32") / (T.exp2(x * T.cast(2 * math.log2(math.e), "float32")) + 1.0)


_FLOAT_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "tanh": _tanh,
    "exp": T.exp,
    "exp2": T.exp2,
    "log": T.log,
    "log2": T.log2,
    "sqrt": T.sqrt,
    "sin": T.sin,
    "cos": T.cos,
    "float": lambda x: x,
}

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
    "abs": lambda x: T.if_then_else(x < T.cast(0, x.dtype), T.cast(0, x.dtype) - x, x),
}
