"""Rewrites score modifications, so that the inner loop has few operations for each score.

A program's text is what the user wrote; it is part of the kernel's key. The emitted expression computes the same with
fewer operations in the inner loop:

- ``score`` is written out, as ``raw * scale``, so that the scale joins other factors.
- What is the same for all scores of a head, having no ``score``, ``q`` or ``k`` in it, is *uniform*, and computed once
  per tile of queries: loads (``slopes[h]``), quotients, products.
- Dividing by something uniform is multiplying by its reciprocal; uniform factors that follow each other become one.
- ``tanh`` is the hardware's, or written out in exp2, whose constants join the factors.
- The last factor of a soft cap, ``cap * tanh(..)``, is left to the softmax, which multiplies scores by log2(e) anyway.

Factors are therefore multiplied in another order: results differ by roundings of float32, also in conditions and in
`//` and `%` of quotients. Two varying factors stay as they are: `(x * u) * (y * u)` is not made `(x * y) * (u * u)`,
which may leave the range of float32 where the former does not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ....variant.expression import Expr, apply, dtype_of, has_symbol, symbol
from .steady import is_uniform, slope_of

RAW = Expr("symbol", ("raw",), "float")  # the product of q and k as the matrix units leave it
SCALE = Expr("symbol", ("scale",), "float")
Q, K = symbol("q"), symbol("k")
LOG2E = math.log2(math.e)
TWO_LOG2E = 2 * LOG2E
TINY = 1e-30


@dataclass(frozen=True)
class ScoreProgram:
    """A modification as it is emitted.

    Attributes:
        score: the modified score, of ``raw``, ``scale``, positions, operands and ``uniform0``, ``uniform1``, ...
        uniforms: what these stand for, in order: expressions of ``scale``, ``b``, ``h`` and operands.
        log2_unit: ``score`` times this, which is positive, is the modified score in powers of two.
    """

    score: Any
    uniforms: tuple[Expr, ...]
    log2_unit: Any


def score_program(score: Any, hardware_tanh: bool, causal: bool = False) -> ScoreProgram:
    """Rewrites a traced modification.

    Args:
        score: the expression.
        hardware_tanh: whether tanh may err by 2^-11 of itself; otherwise it is exact to some 2^-22 of 1.
        causal: whether scores of keys after the query's position are hidden afterwards; they may have any value.
    """
    rewritten, unit = _without_cap(rewrite(where_seen(score) if causal else score))
    if not hardware_tanh:
        rewritten, unit = tanh_by_exp2(rewritten), tanh_by_exp2(unit)
    uniforms: dict[str, Expr] = {}
    score, unit = hoist(rewritten, uniforms), hoist(_times(unit, LOG2E), uniforms)
    return ScoreProgram(score, tuple(uniforms.values()), unit)


def where_seen(expr: Any) -> Any:
    """What the expression is where no key comes after the query: there ``|q - k|`` is ``q - k``."""
    if not isinstance(expr, Expr) or expr.op in ("symbol", "size", "load"):
        return expr
    args = tuple(map(where_seen, expr.args))
    if expr.op == "abs" and str(args[0]) in ("(sub q k)", "(sub k q)"):
        return Q - K
    return Expr(expr.op, args, expr.dtype)


# --- Factors ---


def rewrite(expr: Any) -> Any:
    if not isinstance(expr, Expr) or expr.op in ("size", "load"):
        return expr
    if expr.op == "symbol":
        return apply("mul", RAW, SCALE) if expr.args[0] == "score" else expr
    args = [rewrite(arg) for arg in expr.args]
    if expr.op == "div" and is_uniform(args[1]) and not is_uniform(args[0]) and args[1] is not False:
        return product(args[0], _reciprocal(args[1]))
    if expr.dtype != "float" or "bool" in map(dtype_of, args):
        return apply(expr.op, *args)
    return (
        product(*args)
        if expr.op == "mul"
        else _sum(expr.op, *args)
        if expr.op in ("add", "sub")
        else apply(expr.op, *args)
    )


def _sum(op: str, x: Any, y: Any) -> Any:
    """x + y or x - y; terms that grow steadily are added up before the score joins them."""
    if not (isinstance(x, Expr) and x.op in ("add", "sub") and has_symbol(x.args[0], "raw")):
        return apply(op, x, y)
    score, term = x.args
    terms = apply("add" if x.op == op else "sub", term, y)
    if dtype_of(term) != "float" or dtype_of(y) != "float" or not _is_steady(terms):
        return apply(op, x, y)
    return apply(x.op, score, terms)


def _is_steady(expr: Any) -> bool:
    """Whether it has no score, and grows by the same for each key or query."""
    return slope_of(expr, "k") is not None or slope_of(expr, "q") is not None


def _reciprocal(x: Any) -> Any:
    if isinstance(x, Expr):
        return apply("div", 1.0, x)
    return 1.0 / x if x != 0 else math.copysign(math.inf, x)


def product(x: Any, y: Any) -> Any:
    """x * y; if one of them is uniform, as (the varying factor) * (the uniform factors)."""
    if not is_uniform(x) and not is_uniform(y):
        return _varying_product(x, y)
    (varying_x, uniform_x), (varying_y, uniform_y) = _factors(x), _factors(y)
    varying, uniform = _times(varying_x, varying_y), _times(uniform_x, uniform_y)
    if varying is None or uniform is None:
        return uniform if varying is None else varying
    return apply("mul", varying, uniform)


def _varying_product(x: Any, y: Any) -> Any:
    """x * y of two that vary: what grows steadily takes the uniform factors of a score, such as the scale."""
    if has_symbol(y, "raw") and not has_symbol(x, "raw"):
        x, y = y, x
    varying, uniform = _factors(x)
    if uniform is None or not has_symbol(x, "raw") or not _is_steady(y):
        return _times(x, y)
    return _times(varying, _times(y, uniform))


def _factors(x: Any) -> tuple[Any, Any]:
    """The varying and the uniform factor of x; None: there is none."""
    if is_uniform(x):
        return None, x
    if x.op == "mul" and x.dtype == "float" and is_uniform(x.args[1]):
        return x.args[0], x.args[1]
    return x, None


def _times(x: Any, y: Any) -> Any:
    if x is None or y is None:
        return y if x is None else x
    # Integers would overflow where the product of floats that they were part of did not.
    return apply("mul", *(arg if dtype_of(arg) == "float" else apply("float", arg) for arg in (x, y)))


# --- tanh ---


def _is_capped(expr: Any) -> bool:
    """Whether it is ``tanh(x) * cap`` with a uniform cap."""
    if not isinstance(expr, Expr) or expr.op != "mul":
        return False
    tanh, cap = expr.args
    return isinstance(tanh, Expr) and tanh.op == "tanh" and is_uniform(cap) and dtype_of(cap) != "bool"


def _without_cap(expr: Any) -> tuple[Any, Any]:
    """``cap * tanh(x)`` as ``tanh(sign(cap) * x)`` and the unit ``|cap|``, which a cap of 0 leaves positive.

    A cap that is NaN stays so. One beyond 2^127 gives NaN, where the product gave infinities.
    """
    if not _is_capped(expr):
        return expr, 1.0
    tanh, cap = expr.args
    sign = apply("where", cap < 0.0, -1.0, 1.0) if isinstance(cap, Expr) else math.copysign(1.0, cap)
    size = apply("where", abs(cap) < TINY, TINY, abs(cap)) if isinstance(cap, Expr) else max(abs(cap), TINY)
    return apply("tanh", product(tanh.args[0], sign)), size


def tanh_by_exp2(expr: Any) -> Any:
    """Without tanh: u * tanh x = u - 2u / (exp2(2 log2(e) x) + 1). It saturates at both ends."""
    if not isinstance(expr, Expr) or expr.op in ("symbol", "size", "load"):
        return expr
    factor: Any = 1.0
    if _is_capped(expr):
        expr, factor = expr.args[0], tanh_by_exp2(expr.args[1])
    if expr.op != "tanh":
        return apply(expr.op, *map(tanh_by_exp2, expr.args))
    power = apply("exp2", product(tanh_by_exp2(expr.args[0]), TWO_LOG2E))
    weight = apply("div", 1.0, apply("add", power, 1.0))
    return apply("sub", factor, apply("mul", weight, _times(factor, 2.0)))


# --- Uniform values ---


def hoist(expr: Any, uniforms: dict[str, Expr]) -> Any:
    """`expr` with symbols in place of what is uniform and takes more than one instruction to have."""
    if not isinstance(expr, Expr) or expr.op in ("symbol", "size"):
        return expr
    if is_uniform(expr) and (expr.dtype == "float" or (expr.op == "load" and expr.dtype == "int")):
        text = str(expr)
        names = list(uniforms)
        if text not in uniforms:
            uniforms[text] = expr
            names.append(text)
        return Expr("symbol", (f"uniform{names.index(text)}",), expr.dtype)
    return Expr(expr.op, tuple(hoist(arg, uniforms) for arg in expr.args), expr.dtype)
