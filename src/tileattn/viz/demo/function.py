"""Functions that a user types into the page: from text to an expression of `tileattn.variant.expression`.

The text is never executed as Python. `ast.parse` only reads it. Each node of the tree must be on the list below, and is
computed with the symbols that kernels are generated from. So a text can name positions, the score, numbers, operators
and the functions of `tileattn.math`, and nothing else: no attribute, no index, no other name.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any

from tileattn.variant import math as functions
from tileattn.variant.expression import Expr, dtype_of, nodes, symbol
from tileattn.variant.reading import evaluate

MASK, SCORE = ("b", "h", "q", "k"), ("score", "b", "h", "q", "k")
LONGEST_TEXT, DEEPEST, MOST_NODES = 300, 40, 300
# Positions are int32 in kernels, and no power of a number below may take long to compute.
LARGEST, LARGEST_EXPONENT = 2**31 - 1, 8

_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.USub: operator.neg,
    ast.UAdd: lambda x: x,
    ast.Invert: operator.invert,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
# The functions of tileattn.math, with the number of their arguments.
FUNCTIONS = {name: 1 for name in functions.__all__ if name != "load"}
FUNCTIONS |= {"where": 3, "clamp": 3, "minimum": 2, "maximum": 2}
# What Python has and a traced function has not, and what to write instead.
_INSTEAD: dict[type[ast.AST], str] = {
    ast.And: "write `&` instead of `and`, with each comparison in parentheses",
    ast.Or: "write `|` instead of `or`, with each comparison in parentheses",
    ast.Not: "write `~` instead of `not`",
    ast.IfExp: "write where(condition, x, y) instead of `x if condition else y`",
}


@dataclass(frozen=True)
class Typed:
    """A function that was typed in.

    fn: takes `arguments`, as `tileattn.attention` passes them. text: its result as Python. names: the functions of
    `tileattn.math` that the text uses.
    """

    fn: Callable[..., Any]
    text: str
    names: tuple[str, ...]


def read_mask(text: str) -> Typed:
    """A mask: a condition on the positions b, h, q, k, such as "(q - k) % 64 == 0".

    Raises:
        ValueError: the text is no such condition.
    """
    return _read("mask function", text, MASK)


def read_score(text: str) -> Typed:
    """A score modification: a number computed from score, b, h, q, k, such as "score - 0.1 * abs(q - k)".

    Raises:
        ValueError: the text is no such number.
    """
    return _read("score function", text, SCORE)


def _read(name: str, text: Any, arguments: tuple[str, ...]) -> Typed:
    if not isinstance(text, str) or len(text) > LONGEST_TEXT:
        raise ValueError(f"{name}: give one expression of at most {LONGEST_TEXT} characters")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        value = _Reader(arguments).read(tree)
    except SyntaxError as error:
        raise ValueError(f"{name}: {text!r} is no expression of Python ({error.msg})") from error
    except (TypeError, ValueError, ArithmeticError, RecursionError, MemoryError) as error:
        raise ValueError(f"{name}: {error}") from error
    wanted = "bool" if arguments == MASK else "number"
    if not isinstance(value, Expr) or (value.dtype == "bool") != (wanted == "bool"):
        got = "a condition" if dtype_of(value) == "bool" else "a number"
        asked = "a condition on b, h, q, k, such as q >= k" if wanted == "bool" else "a number computed from the score"
        raise ValueError(f"{name}: {text!r} must be {asked}, got {got}{'' if isinstance(value, Expr) else ' alone'}")
    if wanted == "number" and not any(node.op == "symbol" and node.args[0] == "score" for node in nodes(value)):
        raise ValueError(f"{name}: {text!r} must use `score`, else the product of q and k would not matter")
    called = {each.func.id for each in ast.walk(tree) if isinstance(each, ast.Call) and isinstance(each.func, ast.Name)}
    return Typed(_function(value, arguments), ast.unparse(tree), tuple(sorted(called)))


def _function(expr: Expr, arguments: tuple[str, ...]) -> Callable[..., Any]:
    def typed(*values: Any) -> Any:
        return evaluate(expr, dict(zip(arguments, values, strict=True)))

    return typed


class _Reader:
    """Computes a tree on symbols, node by node."""

    def __init__(self, arguments: tuple[str, ...]) -> None:
        self.arguments = arguments

    def read(self, node: ast.AST, depth: int = 0) -> Any:
        if depth > DEEPEST:
            raise ValueError(f"an expression is nested at most {DEEPEST} deep")
        value = self._value(node, depth + 1)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            if not math.isfinite(value) or abs(value) > LARGEST:
                raise ValueError(f"{ast.unparse(node)} is no number from -{LARGEST} to {LARGEST}")
        # square(square(...)) doubles with each call.
        elif len(list(islice(nodes(value), MOST_NODES + 1))) > MOST_NODES:
            raise ValueError(f"an expression has at most {MOST_NODES} operations")
        return value

    def _value(self, node: ast.AST, depth: int) -> Any:
        if isinstance(node, ast.Constant) and type(node.value) in (int, float, bool):
            return node.value
        if isinstance(node, ast.Name) and node.id in self.arguments:
            return symbol(node.id)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
            return self.read(node.left, depth) ** _exponent(node.right)
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            left, right = self.read(node.left, depth), self.read(node.right, depth)
            if isinstance(node.op, (ast.Div, ast.FloorDiv, ast.Mod)) and not isinstance(right, Expr) and right == 0:
                raise ValueError(f"`{ast.unparse(node)}` divides by zero")
            return _OPERATORS[type(node.op)](left, right)
        if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](self.read(node.operand, depth))
        if isinstance(node, ast.Compare) and all(type(op) in _OPERATORS for op in node.ops):
            if len(node.ops) > 1:
                raise ValueError(
                    f"`{ast.unparse(node)}` compares more than two values; write (a < b) & (b < c), with parentheses"
                )
            return _OPERATORS[type(node.ops[0])](self.read(node.left, depth), self.read(node.comparators[0], depth))
        if isinstance(node, ast.Call):
            return self._call(node, depth)
        raise ValueError(self._refusal(node))

    def _call(self, node: ast.Call, depth: int) -> Any:
        if not isinstance(node.func, ast.Name) or node.func.id not in FUNCTIONS:
            raise ValueError(f"`{ast.unparse(node.func)}` cannot be called; accepted: {', '.join(sorted(FUNCTIONS))}")
        name, count = node.func.id, FUNCTIONS[node.func.id]
        if node.keywords or len(node.args) != count or any(isinstance(arg, ast.Starred) for arg in node.args):
            raise ValueError(f"{name} takes {count} argument{'s' * (count > 1)} without names")
        values = [self.read(arg, depth) for arg in node.args]
        if name == "where" and dtype_of(values[0]) != "bool":
            raise ValueError(f"where takes a condition first, such as q > k, got `{ast.unparse(node.args[0])}`")
        return getattr(functions, name)(*values)

    def _refusal(self, node: ast.AST) -> str:
        kind = type(getattr(node, "op", node))
        if kind in _INSTEAD:
            return _INSTEAD[kind]
        accepted = f"{', '.join(self.arguments)}, numbers, operators and {', '.join(sorted(FUNCTIONS))}"
        return f"`{ast.unparse(node)}` cannot be used here; accepted: {accepted}"


def _exponent(node: ast.AST) -> int:
    value = node.value if isinstance(node, ast.Constant) else None
    if type(value) is not int or not 0 <= value <= LARGEST_EXPONENT:
        raise ValueError(f"an exponent is a whole number from 0 to {LARGEST_EXPONENT}, got `{ast.unparse(node)}`")
    return value
