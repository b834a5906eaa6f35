"""Registers: what takes the place of tensors of bounds when the rules of the interval analysis make a kernel.

The rules (:mod:`tileattn.variant.intervals`) are written for tensors with one element a tile. Evaluated on registers,
the same code returns the nodes of a computation for one tile. Operators and functions of torch build nodes; equal ones
exist once, and what is known without a tile is computed at once.

Of an integer the *span* is known: Python numbers that bound it in every call for which the kernel is made. So a node
knows whether int32 holds it, and comparisons that always hold become constants.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable
from typing import Any

import torch

from ....variant.intervals.values import INT32, INT64, Span, within

BOOL, INT, FLOAT = "bool", "int", "float"


class Unknown(Exception):
    """The kernel cannot make this: PyTorch's operations do."""


class Register:
    """A node: an operation and its operands, which are registers, or numbers and names of an input.

    Attributes:
        kind: BOOL, INT (int64 in meaning) or FLOAT (float64).
        span: of an integer or a condition.
    """

    __slots__ = ("args", "graph", "kind", "op", "span")

    def __init__(self, graph: Graph, op: str, args: tuple[Any, ...], kind: str, span: Span | None) -> None:
        self.graph, self.op, self.args, self.kind, self.span = graph, op, args, kind, span

    def __hash__(self) -> int:
        return id(self)

    def __bool__(self) -> bool:
        raise TypeError("a register has no value while a kernel is made")

    @property
    def number(self) -> Any:
        """The number that it is in every tile, or None."""
        return self.args[0] if self.op == "number" else None

    # --- What the rules do with tensors ---

    def __add__(self, other: Any) -> Register:
        return self.graph.binary("add", self, other)

    def __radd__(self, other: Any) -> Register:
        return self.graph.binary("add", other, self)

    def __sub__(self, other: Any) -> Register:
        return self.graph.binary("sub", self, other)

    def __rsub__(self, other: Any) -> Register:
        return self.graph.binary("sub", other, self)

    def __mul__(self, other: Any) -> Register:
        return self.graph.binary("mul", self, other)

    def __rmul__(self, other: Any) -> Register:
        return self.graph.binary("mul", other, self)

    def __floordiv__(self, other: Any) -> Register:
        return self.graph.binary("floordiv", self, other)

    def __rfloordiv__(self, other: Any) -> Register:
        return self.graph.binary("floordiv", other, self)

    def __mod__(self, other: Any) -> Register:
        return self - self // other * other

    def __neg__(self) -> Register:
        return 0 - self

    def __lt__(self, other: Any) -> Register:
        return self.graph.binary("lt", self, other)

    def __le__(self, other: Any) -> Register:
        return self.graph.binary("le", self, other)

    def __gt__(self, other: Any) -> Register:
        return self.graph.binary("lt", other, self)

    def __ge__(self, other: Any) -> Register:
        return self.graph.binary("le", other, self)

    def __eq__(self, other: Any) -> Register:  # type: ignore[override]
        return self.graph.binary("eq", self, other)

    def __ne__(self, other: Any) -> Register:  # type: ignore[override]
        return ~(self == other)

    def __and__(self, other: Any) -> Register:
        return self.graph.binary("and", self, other)

    def __or__(self, other: Any) -> Register:
        return self.graph.binary("or", self, other)

    def __xor__(self, other: Any) -> Register:
        return self.graph.binary("xor", self, other)

    def __rshift__(self, bits: int) -> Register:
        return self.graph.binary("shift", self, bits)

    def __invert__(self) -> Register:
        return self.graph.inverted(self)

    __rand__, __ror__, __rxor__ = __and__, __or__, __xor__

    def clamp(self, min: Any = None, max: Any = None) -> Register:
        """At least min, and then at most max."""
        least = self if min is None else self.graph.binary("max", self, min)
        return least if max is None else self.graph.binary("min", least, max)

    def long(self) -> Register:
        """A condition as 0 or 1."""
        return self if self.kind == INT else self.graph.where(self, 1, 0)

    def double(self) -> Register:
        """An integer in float64."""
        return self.graph.node("double", (self,), FLOAT, None)

    def abs(self) -> Register:
        """Of a float."""
        if self.kind != FLOAT:
            raise Unknown("the magnitude of an integer register")
        return self.graph.node("abs", (self,), FLOAT, None)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Functions of torch that the rules call."""
        kwargs = kwargs or {}
        graph: Graph = next(arg.graph for arg in args if isinstance(arg, Register))
        if function is torch.where and not kwargs:
            return graph.where(*args)
        if function is torch.zeros_like:
            return graph.filled(0)
        name = _FUNCTIONS.get(function)
        if name is None or kwargs not in ({}, {"rounding_mode": "floor"}) or (name == "floordiv") != bool(kwargs):
            raise Unknown(f"{function} of registers")
        return graph.binary(name, *args)


_FUNCTIONS: dict[Any, str] = {
    torch.minimum: "min",
    torch.maximum: "max",
    torch.mul: "mul",
    torch.div: "floordiv",
}
_COMPARISONS = {"lt": operator.lt, "le": operator.le, "eq": operator.eq}
_NUMBERS: dict[str, Callable[[Any, Any], Any]] = {
    **_COMPARISONS,
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "floordiv": operator.floordiv,
    "min": min,
    "max": max,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "shift": operator.rshift,
}


class Graph:
    """Makes registers, each once. A place (:class:`tileattn.variant.intervals.values.Elsewhere`) for the rules."""

    def __init__(self) -> None:
        self.known: dict[Hashable, Register] = {}

    def node(self, op: str, args: tuple[Any, ...], kind: str, span: Span | None) -> Register:
        """A node, whose span may go beyond int64: then it is that of all integers, as its value wraps."""
        if kind == INT:
            assert span is not None
            span = span if within(span, INT64) else INT64
            if span[0] == span[1] and op != "number":
                return self.filled(span[0])  # type: ignore[no-any-return]
        key = (op, *(id(arg) if isinstance(arg, Register) else (type(arg), arg) for arg in args))
        if key not in self.known:
            self.known[key] = Register(self, op, args, kind, span)
        return self.known[key]

    def filled(self, value: float) -> Any:
        """A number."""
        if isinstance(value, bool):
            return self.node("number", (value,), BOOL, (value, value))
        if isinstance(value, int):
            return self.node("number", (value,), INT, (value, value))
        return self.node("number", (value,), FLOAT, None)

    def input(self, *name: Hashable, span: Span) -> Register:
        """An integer that the kernel is given, or has of a tile."""
        return self.node("input", name, INT, span)

    def as_register(self, value: Any) -> Register:
        return value if isinstance(value, Register) else self.filled(value)

    # --- Operations ---

    def binary(self, op: str, x: Any, y: Any) -> Register:
        x, y = self.as_register(x), self.as_register(y)
        if FLOAT in (x.kind, y.kind) and x.kind != y.kind:
            x, y = (each if each.kind == FLOAT else _as_float(self, each) for each in (x, y))
        if x.kind == y.kind == BOOL and op not in ("and", "or", "xor"):
            x, y = x.long(), y.long()
        if x.number is not None and y.number is not None:
            return self._of_numbers(op, x, y)
        simple = self._simple(op, x, y)
        if simple is not None:
            return simple
        if op in _COMPARISONS:
            return self.node(op, (x, y), BOOL, (0, 1))
        if x.kind == BOOL:
            return self.node(op, (x, y), BOOL, (0, 1))
        if x.kind == FLOAT:
            return self.node(op, (x, y), FLOAT, None)
        if op == "shift" and within(x.span, INT32):  # type: ignore[arg-type]
            y = self.filled(min(y.number, 31))  # which an int32 shifted by more is equal to
        return self.node(op, (x, y), INT, _span(op, x, y))

    def _of_numbers(self, op: str, x: Register, y: Register) -> Register:
        value = _NUMBERS[op](x.number, y.number)
        if x.kind == INT and op not in _COMPARISONS and not within((value, value), INT64):
            return self.node(op, (x, y), INT, INT64)  # it wraps
        return self.filled(value)

    def _simple(self, op: str, x: Register, y: Register) -> Register | None:
        """What the operation is in every tile, by spans and by equal operands."""
        if op in ("and", "or") and x.kind == BOOL:
            for one, other in ((x, y), (y, x)):
                if one.number is not None:
                    return other if one.number == (op == "and") else one
            return x if x is y else None
        if x.kind != INT:
            return None
        assert x.span is not None
        assert y.span is not None
        if op in _COMPARISONS:
            always, sometimes = _decided(op, x, y)
            return self.filled(always) if always == sometimes else None
        if op in ("min", "max"):
            low, high = (x, y) if x.span[1] <= y.span[0] else (y, x) if y.span[1] <= x.span[0] else (None, None)
            return x if x is y else low if op == "min" else high
        if y.number == 0 and op in ("add", "sub", "shift", "or", "xor"):
            return x
        if x.number == 0 and op in ("add", "or", "xor"):
            return y
        if op in ("mul", "floordiv") and y.number == 1:
            return x
        if op == "mul" and x.number == 1:
            return y
        return None

    def inverted(self, x: Register) -> Register:
        """`~`: of a condition its opposite."""
        if x.number is not None:
            return self.filled(not x.number if x.kind == BOOL else ~x.number)
        if x.op == "not":
            return x.args[0]  # type: ignore[no-any-return]
        if x.kind == BOOL:
            return self.node("not", (x,), BOOL, (0, 1))
        assert x.span is not None
        return self.node("not", (x,), INT, (~x.span[1], ~x.span[0]))

    def where(self, condition: Register, x: Any, y: Any) -> Register:
        condition, x, y = self.as_register(condition), self.as_register(x), self.as_register(y)
        if FLOAT in (x.kind, y.kind) and x.kind != y.kind:
            x, y = (each if each.kind == FLOAT else _as_float(self, each) for each in (x, y))
        if condition.number is not None or x is y:
            return x if condition.number or x is y else y
        if x.kind == BOOL:
            if x.number is not None:
                return condition | y if x.number else ~condition & y
            if y.number is not None:
                return ~condition | x if y.number else condition & x
            return self.node("where", (condition, x, y), BOOL, (0, 1))
        if x.kind == FLOAT:
            return self.node("where", (condition, x, y), FLOAT, None)
        assert x.span is not None
        assert y.span is not None
        span = min(x.span[0], y.span[0]), max(x.span[1], y.span[1])
        return self.node("where", (condition, x, y), INT, span)


def nodes_of(root: Register) -> set[Register]:
    """All nodes that a node needs, itself included."""
    found: set[Register] = set()
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += [arg for arg in node.args if isinstance(arg, Register)]
    return found


def _as_float(graph: Graph, x: Register) -> Register:
    return graph.filled(float(x.number)) if x.number is not None else x.double()


def _decided(op: str, x: Register, y: Register) -> tuple[bool, bool]:
    """Whether a comparison of integers always holds, and whether it ever may."""
    (a, b), (c, d) = x.span, y.span  # type: ignore[misc]
    if x is y:
        return op != "lt", op != "lt"
    if op == "eq":
        return a == b == c == d, a <= d and c <= b
    return (b < c, a < d) if op == "lt" else (b <= c, a <= d)


def _span(op: str, x: Register, y: Register) -> Span:
    """Of an operation on integers, by its ends."""
    (a, b), (c, d) = x.span, y.span  # type: ignore[misc]
    if op == "add":
        return a + c, b + d
    if op == "sub":
        return a - d, b - c
    if op == "min":
        return min(a, c), min(b, d)
    if op == "max":
        return max(a, c), max(b, d)
    if op == "mul":
        ends = [u * v for u in (a, b) for v in (c, d)]
        return min(ends), max(ends)
    if op == "floordiv":
        if c <= 0 <= d:
            most = max(abs(a), abs(b))
            return -most - 1, most + 1
        ends = [u // v for u in (a, b) for v in (c, d)]
        return min(ends), max(ends)
    if op == "shift":  # by a number
        return a >> c, b >> c
    bits = max((~each if each < 0 else each).bit_length() for each in (a, b, c, d))
    return (0 if min(a, c) >= 0 else -(2**bits)), 2**bits - 1
