"""Tracing: a user's mask or score function runs once on symbols and becomes an expression.

The expression is written as one line of text. A captured tensor in it becomes an operand (``t0``, ``t1``, ... in the
order of the text). A captured number becomes a constant of the text.

    >>> slopes = torch.ones(4)
    >>> trace(lambda score, b, h, q, k: score + 2 * slopes[h], ("score", "b", "h", "q", "k")).text
    '(add score (mul 2 (load t0 h)))'

Under torch.compile, Dynamo traces the function together with the code around it, and its guards cover everything that
the function captures (:mod:`tileattn.variant.tracing.compiled`). A number that Dynamo does not treat as a constant
becomes an operand (``i0``, ``f0``, ...).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ..expression import Expr, TensorSymbol, dtype_of, text_of
from .eager import run_eagerly


@dataclass
class Traced:
    """A function's text, and the values of its operands ``t0 ...``, ``i0 ...`` and ``f0 ...``."""

    text: str = ""
    tensors: list[torch.Tensor] = field(default_factory=list)
    ints: list[int] = field(default_factory=list)
    floats: list[float] = field(default_factory=list)

    def write(self, value: Any) -> str:
        """The text of an expression. Operands are numbered in the order in which they occur."""
        if not isinstance(value, Expr):
            return text_of(value)
        if value.op == "symbol":
            return value.args[0]
        if value.op == "number":
            return self._number(value.args[0], value.dtype)
        words = [self._tensor(arg.tensor) if isinstance(arg, TensorSymbol) else self.write(arg) for arg in value.args]
        return f"({value.op} {' '.join(words)})"

    def _tensor(self, tensor: Any) -> str:
        for index, known in enumerate(self.tensors):
            if known is tensor:
                return f"t{index}"
        self.tensors.append(tensor)
        return f"t{len(self.tensors) - 1}"

    def _number(self, number: Any, dtype: str) -> str:
        if dtype == "int":
            self.ints.append(number)
            return f"i{len(self.ints) - 1}"
        self.floats.append(number)
        return f"f{len(self.floats) - 1}"


def trace(fn: Callable[..., Any], arguments: tuple[str, ...]) -> Traced:
    """Runs `fn` on the symbols called `arguments`: ``b h q k`` for a mask, ``score b h q k`` for a modification.

    Raises:
        TypeError: the function uses an operation that cannot be traced, or returns a value of the wrong kind. The
            message says what to write instead.
    """
    if torch.compiler.is_dynamo_compiling():
        from .compiled import run

        result = run(fn, arguments)
    else:
        result = run_eagerly(fn, arguments)
    _check(fn, arguments, result)
    traced = Traced()
    traced.text = traced.write(result)
    return traced


def _check(fn: Callable[..., Any], arguments: tuple[str, ...], result: Any) -> None:
    if not isinstance(result, (Expr, bool, int, float)):
        name = getattr(fn, "__name__", type(fn).__name__)
        raise TypeError(
            f"{name} must return a value computed from ({', '.join(arguments)}), got {type(result).__name__}"
        )
    is_mask, is_condition = arguments[0] != "score", dtype_of(result) == "bool"
    if is_mask != is_condition:
        raise TypeError(
            f"{'a mask must return a condition, such as (q >= k)' if is_mask else 'a score_mod must return a number'}, "
            f"got {'a condition' if is_condition else 'the number'} {text_of(result)}"
        )
