"""Derivatives of traced score modifications. The backward pass multiplies the gradients of the scores by them.

Users do not write a backward pass. The derivative is computed by forward-mode differentiation with dual numbers: each
node of the expression has a value, which is the node itself, and a tangent, the derivative of that value (Griewank and
Walther 2008, chapter 3).

    >>> from tileattn.math import tanh
    >>> from tileattn.variant.expression import symbol
    >>> score, cap = symbol("score"), symbol("f0")
    >>> str(derivative(cap * tanh(score / cap), score))
    '(mul f0 (mul (sub 1.0 (mul (tanh (div score f0)) (tanh (div score f0)))) (div 1.0 f0)))'

Values within a tangent are the expression's own nodes, so that a compiler can reuse values that it has computed.
Tangents are float numbers or float expressions. Integer factors are converted to floats, because integer products may
leave int32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from .expression import Expr, apply, dtype_of, nodes


def derivative(expr: Any, wrt: Expr) -> Expr | float:
    """The derivative d expr / d wrt.

    Where a function is not differentiable, the result is that of PyTorch: 0 for ``abs`` at 0, and half of each tangent
    if the arguments of ``min`` or ``max`` are equal. Conditions, positions and ``//`` count as constants. A product
    with a zero tangent is 0, whatever the other factor is.

    Args:
        expr: a float expression, such as ``Program.score``, or a number.
        wrt: a float symbol, such as ``symbol("score")``, or the load of a float tensor's element. All loads with the
            same text are that element; other loads are constants.

    Returns:
        An expression over the same symbols and tensors, or a number: ``0.0`` where `expr` does not depend on `wrt`.

    Raises:
        TypeError: `wrt` is something else.
    """
    if getattr(wrt, "op", None) not in ("symbol", "load") or wrt.dtype != "float":
        raise TypeError(f"derivative: wrt must be a float symbol or the load of a float tensor's element, got {wrt!r}")
    return _Tangents(wrt)(expr)


def float_loads(expr: Any) -> tuple[Expr, ...]:
    """The loads of float tensors' elements for which `expr` has a nonzero derivative; each text once."""
    loads = {str(node): node for node in nodes(expr) if node.op == "load" and node.dtype == "float"}
    return tuple(load for load in loads.values() if not _is(derivative(expr, load), 0.0))


class _Tangents:
    """The tangents of nodes with respect to one node. The tangent of a shared node is computed once."""

    def __init__(self, wrt: Expr) -> None:
        self.op, self.text = wrt.op, str(wrt)
        self.known: dict[Expr, Expr | float] = {}  # by identity

    def __call__(self, node: Any) -> Expr | float:
        if not isinstance(node, Expr) or node.dtype != "float":
            return 0.0
        if node not in self.known:
            self.known[node] = self._of(node)
        return self.known[node]

    def _of(self, node: Expr) -> Expr | float:
        if node.op in ("symbol", "load"):
            return float(node.op == self.op and str(node) == self.text)
        tangents = [self(arg) for arg in node.args]
        return 0.0 if all(_is(dx, 0.0) for dx in tangents) else _RULES[node.op](node, *node.args, *tangents)


# --- Arithmetic of tangents: zero terms and factors of one are left out ---


def _is(x: Any, number: float) -> bool:
    return isinstance(x, float) and x == number


def _float(x: Any) -> Any:
    kind = dtype_of(x)
    if not isinstance(x, Expr):
        return float(x)
    return x if kind == "float" else apply("float", x) if kind == "int" else apply("where", x, 1.0, 0.0)


def _plus(dx: Any, dy: Any) -> Any:
    return dy if _is(dx, 0.0) else dx if _is(dy, 0.0) else apply("add", dx, dy)


def _minus(dx: Any, dy: Any) -> Any:
    if _is(dx, 0.0) and not isinstance(dy, Expr):
        return -dy
    return dx if _is(dy, 0.0) else apply("sub", 0 if _is(dx, 0.0) else dx, dy)


def _times(x: Any, dx: Any) -> Any:
    """A value times a tangent."""
    if _is(dx, 0.0):
        return 0.0
    x = _float(x)
    return x if _is(dx, 1.0) else dx if _is(x, 1.0) else apply("mul", x, dx)


def _over(dx: Any, x: Any) -> Any:
    """A tangent divided by a value."""
    if _is(dx, 0.0):
        return 0.0
    x = _float(x)
    if _is(x, 0.0):  # Python refuses; torch does not
        return _times(math.copysign(math.inf, x), dx)
    return dx if _is(x, 1.0) else apply("div", dx, x)


def _where(condition: Any, dx: Any, dy: Any) -> Any:
    return dx if str(dx) == str(dy) else apply("where", condition, dx, dy)


# --- Rules: z = op(x, ...), and the tangents of x, ... ---


def _extremum(first: Any, x: Any, y: Any, dx: Any, dy: Any) -> Any:
    """The tangent of min or max. The condition `first` holds where the result is x and x != y."""
    return _where(first, dx, _where(apply("eq", x, y), _times(0.5, _plus(dx, dy)), dy))


def _sign(x: Any) -> Any:
    return apply("where", x > 0, 1.0, apply("where", x < 0, -1.0, 0.0))


_RULES: dict[str, Callable[..., Any]] = {
    "add": lambda z, x, y, dx, dy: _plus(dx, dy),
    "sub": lambda z, x, y, dx, dy: _minus(dx, dy),
    "mul": lambda z, x, y, dx, dy: _plus(_times(y, dx), _times(x, dy)),
    "div": lambda z, x, y, dx, dy: _over(_minus(dx, _times(z, dy)), y),
    "floordiv": lambda z, x, y, dx, dy: 0.0,
    "mod": lambda z, x, y, dx, dy: dx if _is(dy, 0.0) else _minus(dx, _times(apply("floordiv", x, y), dy)),
    "min": lambda z, x, y, dx, dy: _extremum(apply("lt", x, y), x, y, dx, dy),
    "max": lambda z, x, y, dx, dy: _extremum(apply("gt", x, y), x, y, dx, dy),
    "where": lambda z, c, x, y, dc, dx, dy: _where(c, dx, dy),
    "abs": lambda z, x, dx: _times(_sign(x), dx),
    "tanh": lambda z, x, dx: _times(1.0 - z * z, dx),
    "sigmoid": lambda z, x, dx: _times(z * (1.0 - z), dx),
    "exp": lambda z, x, dx: _times(z, dx),
    "exp2": lambda z, x, dx: _times(z, _times(math.log(2), dx)),
    "log": lambda z, x, dx: _over(dx, x),
    "log2": lambda z, x, dx: _over(_times(1 / math.log(2), dx), x),
    "sqrt": lambda z, x, dx: _over(_times(0.5, dx), z),
    "sin": lambda z, x, dx: _times(apply("cos", x), dx),
    "cos": lambda z, x, dx: _minus(0.0, _times(apply("sin", x), dx)),
    "float": lambda z, x, dx: dx,
}
