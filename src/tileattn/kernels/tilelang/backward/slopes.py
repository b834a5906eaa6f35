"""Score modifications and their derivatives, rewritten for the inner loop as the forward pass rewrites them.

The backward kernel computes a tile's modified scores once more, and the derivative of each with respect to the score
(its *slope*) and to the elements that it reads of tensors whose gradients are wanted. What both have in common, such as
the tanh of a soft cap, is written the same way in both, so that the compiler computes it once.

A derivative that depends on the score is *kept*: it is evaluated beside the modified score, before the tile of scores
is overwritten. One that does not, such as ``-|q - k|`` or 1, is *recomputed* where it is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ....variant.derivative import derivative
from ....variant.expression import Expr, nodes, symbol
from ..tile.simplify import hoist, rewrite, tanh_by_exp2, where_seen


@dataclass(frozen=True)
class Factor:
    """A derivative as the product of a kept one (its index) and a recomputed one; None stands for 1."""

    kept: int | None
    recomputed: Any


@dataclass(frozen=True)
class SlopeProgram:
    """A modification and its derivatives as they are emitted, over ``raw``, ``scale``, positions, operands, uniforms.

    Attributes:
        score: the modified score.
        kept: derivatives that depend on the score.
        slope: the derivative of the modified score with respect to the (scaled) score.
        loads: the same with respect to each of the loads that were asked for.
        uniforms: what ``uniform0``, ``uniform1``, ... stand for (see simplify.py).
    """

    score: Any
    kept: tuple[Any, ...]
    slope: Factor
    loads: tuple[Factor, ...]
    uniforms: tuple[Expr, ...]


def slope_program(score: Any, loads: tuple[Expr, ...], hardware_tanh: bool, causal: bool = False) -> SlopeProgram:
    """Rewrites a traced modification and its derivatives.

    Args:
        score: the modification's expression.
        loads: of tensors' elements, with respect to which derivatives are wanted.
        hardware_tanh, causal: as of :func:`tileattn.kernels.tilelang.tile.simplify.score_program`.
    """
    if causal:
        score = where_seen(score)
    uniforms: dict[str, Expr] = {}
    kept: dict[str, Any] = {}

    def emitted(expr: Any) -> Any:
        rewritten = rewrite(expr)
        return hoist(rewritten if hardware_tanh else tanh_by_exp2(rewritten), uniforms)

    def split(expr: Any) -> Factor:
        if not any(node.op == "symbol" and node.args[0] == "score" for node in nodes(expr)):
            return Factor(None, None if isinstance(expr, float) and expr == 1.0 else emitted(expr))
        text = str(expr)
        if text not in kept:
            kept[text] = emitted(expr)
        return Factor(list(kept).index(text), None)

    value = emitted(score)
    slope = split(derivative(score, symbol("score")))
    factors = tuple(split(derivative(score, load)) for load in loads)
    return SlopeProgram(value, tuple(kept.values()), slope, factors, tuple(uniforms.values()))
