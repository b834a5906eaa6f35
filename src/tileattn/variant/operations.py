"""The operations of expressions, and their implementations for plain numbers."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

COMPARISONS = {"lt", "le", "gt", "ge", "eq", "ne"}
LOGIC_OPS = {"and": "&", "or": "|", "not": "~"}
KEEP_BOOL = {"where", *LOGIC_OPS}
FLOAT_OPS = {"div", "tanh", "sigmoid", "exp", "exp2", "log", "log2", "sqrt", "sin", "cos", "float"}


def _sigmoid(x: float) -> float:
    e = math.exp(-abs(x))
    return (1.0 if x >= 0 else e) / (1.0 + e)


def _to_power(power: Callable[[float], float]) -> Callable[[float], float]:
    """The function, with infinity as the result where Python raises OverflowError."""

    def computed(x: float) -> float:
        try:
            return power(x)
        except OverflowError:
            return math.inf

    return computed


# Operations with a Python operator, which works on numbers, tensors and expressions.
OPERATORS: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "eq": operator.eq,
    "ne": operator.ne,
    "and": operator.and_,
    "or": operator.or_,
}

# All operations that backends implement, with their implementations for plain numbers.
OPS: dict[str, Callable[..., Any]] = {
    **OPERATORS,
    "not": lambda x: not x,
    "min": min,
    "max": max,
    "where": lambda c, x, y: x if c else y,
    "abs": abs,
    "tanh": math.tanh,
    "sigmoid": _sigmoid,
    "exp": _to_power(math.exp),
    "exp2": _to_power(lambda x: 2.0**x),
    "log": lambda x: math.log(x) if x > 0 else -math.inf,
    "log2": lambda x: math.log2(x) if x > 0 else -math.inf,
    "sqrt": math.sqrt,
    "sin": math.sin,
    "cos": math.cos,
    "float": float,
    "int": int,
}
