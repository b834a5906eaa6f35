"""Which parts of an expression are the same for all scores, and which grow by the same for each key or query."""

from __future__ import annotations

import math
from typing import Any

from ....variant.expression import Expr, apply, dtype_of, has_symbol

_VARYING = {"raw", "score", "q", "k"}
MAX_STEP = 2**16  # of an integer per key, below which tile positions are taken apart

# Of a constant per key or query. The first value of a tile and what is added to it may have opposite signs: were both
# infinite, their sum would be NaN. What is added stays finite below 2^27 positions.
MAX_SLOPE = 2.0**100


def is_uniform(expr: Any) -> bool:
    """Whether all scores of a head share the value."""
    if not isinstance(expr, Expr):
        return True
    if expr.op == "symbol":
        return expr.args[0] not in _VARYING
    return all(is_uniform(arg) for arg in expr.args if not isinstance(arg, str))


def step_of(expr: Any, position: str = "k") -> int | None:
    """By how much an integer expression grows with each k (or q), if by the same everywhere; else None."""
    if not isinstance(expr, Expr):
        return 0
    if expr.op == "symbol":
        return int(expr.args[0] == position)
    steps = [step_of(arg, position) for arg in expr.args if not isinstance(arg, str)]
    if not any(step != 0 for step in steps):
        return 0
    if None in steps:
        return None
    x, y = (*steps, 0)[:2]
    if expr.op in ("add", "sub"):
        return x + y if expr.op == "add" else x - y  # type: ignore[operator]
    if expr.op == "mul" and any(type(arg) is int for arg in expr.args):
        return math.prod(arg if type(arg) is int else step for arg, step in zip(expr.args, steps))  # type: ignore[misc]
    return None


def slope_of(expr: Any, position: str) -> Any:
    """By how much an expression without the score grows with each k (or q): a number, something uniform, or None."""
    slope = _slope_of(expr, position)
    # A comparison that NaN fails as well.
    return slope if isinstance(slope, Expr) or slope is None or abs(slope) <= MAX_SLOPE else None


def _slope_of(expr: Any, position: str) -> Any:
    if has_symbol(expr, "raw") or has_symbol(expr, "score") or dtype_of(expr) == "bool":
        return None
    if not has_symbol(expr, position):
        return 0.0
    if expr.dtype == "int":
        step = step_of(expr, position)
        return None if step is None or abs(step) > MAX_STEP else float(step)
    if expr.op == "float":
        return slope_of(expr.args[0], position)
    if expr.op not in ("add", "sub", "mul"):
        return None
    slopes = [slope_of(arg, position) for arg in expr.args]
    if any(slope is None for slope in slopes):
        return None
    x, y = expr.args
    if expr.op != "mul":
        return _added(expr.op, *slopes)
    if is_uniform(x) or is_uniform(y):
        return _scaled(slopes[1], x) if is_uniform(x) else _scaled(slopes[0], y)
    return None


def _added(op: str, x: Any, y: Any) -> Any:
    if isinstance(y, float) and y == 0.0:
        return x
    return apply("sub", 0.0, y) if op == "sub" and isinstance(x, float) and x == 0.0 else apply(op, x, y)


def _scaled(slope: Any, factor: Any) -> Any:
    factor = apply("float", factor) if dtype_of(factor) != "float" else factor
    return factor if isinstance(slope, float) and slope == 1.0 else apply("mul", slope, factor)
