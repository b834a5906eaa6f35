"""Emits registers (registers.py) as TileLang statements: each node is a variable that is assigned once.

Integers are int32 where spans say that they and their operands fit, else int64. Indices are variables, too: with sums
of products in their place TileLang took 20 s for a kernel instead of 3.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import tilelang.language as T

from ....variant.intervals.values import INT32, Span, within
from .analysis import WideLoad
from .registers import BOOL, FLOAT, INT, Register

Names = tuple[Any, ...]
WARP = 32


class Emitter:
    """Emits nodes in the current scope.

    Args:
        inputs: int32 expressions by the names of inputs (``("q", "first")``).
        tensors: flat buffers by the tensors' numbers.
        wide: returns the two bounds of a wide load, of a side ("row", "column") and of a number.
    """

    def __init__(
        self, inputs: Mapping[Names, Any], tensors: Mapping[int, Any], wide: Callable[[Emitter, str, int], Any]
    ) -> None:
        self.inputs, self.tensors, self.wide = inputs, tensors, wide
        self.values: dict[Register, Any] = {}

    def __call__(self, root: Register) -> Any:
        """The value of a node, after all nodes that it needs."""
        waiting = [root]
        while waiting:
            node = waiting[-1]
            missing = [arg for arg in node.args if isinstance(arg, Register) and arg not in self.values]
            if missing:
                waiting += missing
                continue
            waiting.pop()
            if node not in self.values:
                self.values[node] = self._emitted(node)
        return self.values[root]

    def _emitted(self, node: Register) -> Any:
        if node.op == "number":
            return _number(node)
        if node.op == "input":
            return self.inputs[node.args]
        value = self._computed(node)
        return T.alloc_var(dtype_of(node), init=T.cast(value, dtype_of(node)))[0]

    def _computed(self, node: Register) -> Any:
        if node.op == "wide":
            side, load, end = node.args
            return self.wide(self, side, load)[end]
        if node.op in ("element", "least", "greatest"):
            return self._loaded(node)
        if node.op == "double":
            return T.cast(self.values[node.args[0]], "float64")
        numbers = node.args[1:] if node.op == "where" else node.args
        kinds = [dtype_of(each) for each in (*numbers, *([] if node.kind == BOOL else [node]))]
        kind = next((each for each in ("float64", "int64", "int32") if each in kinds), "bool")
        args = [_cast(self.values[each], each, kind) for each in numbers]
        if node.op == "where":
            return T.if_then_else(self.values[node.args[0]], *args)
        if node.op == "not":
            return T.Not(args[0]) if kind == "bool" else T.bitwise_not(args[0])
        return _OPS[node.op](*args)

    def _loaded(self, node: Register) -> Any:
        number, rank, *rest = node.args
        firsts, lasts, sizes = ([self.values[each] for each in rest[i * rank : (i + 1) * rank]] for i in range(3))
        if node.op == "element":
            return self.tensors[number][T.alloc_var("int64", init=_flat(firsts, sizes))[0]]
        assert node.span is not None
        return _ends(self.tensors[number], node.span, firsts, lasts, sizes)[node.op == "greatest"]

    def ends_by_warp(self, load: WideLoad, lane: Any) -> Any:
        """The bounds of a wide load, whose elements a warp's lanes share."""
        firsts, lasts, sizes = ([self(each) for each in ends] for ends in (load.firsts, load.lasts, load.sizes))
        return _ends(self.tensors[load.number], load.span, firsts, lasts, sizes, lane, WARP)


@T.macro
def _ends(buffer, span, firsts, lasts, sizes, lane=0, lanes=1):
    """The least and the greatest element of a box, of which a lane reads one in `lanes`. span: of the elements."""
    dtype = dtype_of_span(span)
    least, greatest = T.alloc_var(dtype, init=T.cast(span[1], dtype)), T.alloc_var(dtype, init=T.cast(span[0], dtype))
    counts = [T.alloc_var("int32", init=T.cast(last - first + 1, "int32"))[0] for first, last in zip(firsts, lasts)]
    elements = T.alloc_var("int32", init=_product(counts))
    for step in T.serial(T.truncdiv(elements + (lanes - 1), lanes)):
        i = T.alloc_var("int32", init=T.min(step * lanes + lane, elements - 1))
        place = T.alloc_var("int64", init=_flat(_place(firsts, counts, i), sizes))
        element = T.alloc_var(dtype, init=T.cast(buffer[place], dtype))
        least = T.min(least, element)
        greatest = T.max(greatest, element)
    if lanes > 1:
        for i in T.unroll(5):
            other = T.alloc_var(dtype, init=T.shfl_xor(least, 1 << i))
            least = T.min(least, other)
            other = T.shfl_xor(greatest, 1 << i)
            greatest = T.max(greatest, other)
    return least, greatest


def _place(firsts: list[Any], counts: list[Any], number: Any) -> list[Any]:
    """The indices of the number-th element of a box."""
    place = []
    for first, count in zip(firsts[:0:-1], counts[:0:-1]):
        place.append(first + T.truncmod(number, count))
        number = T.truncdiv(number, count)
    return [firsts[0] + number, *place[::-1]]


def _product(counts: list[Any]) -> Any:
    product = counts[0]
    for count in counts[1:]:
        product = product * count
    return product


def _flat(indices: list[Any], sizes: list[Any]) -> Any:
    """The index in a contiguous tensor of these sizes, as one dimension."""
    if not indices:
        return T.int64(0)
    place = T.cast(indices[0], "int64")
    for index, size in zip(indices[1:], sizes[1:]):
        place = place * T.cast(size, "int64") + T.cast(index, "int64")
    return place


def dtype_of(node: Register) -> str:
    """The type of a node's variable."""
    if node.kind == FLOAT:
        return "float64"
    if node.kind == BOOL:
        return "bool"
    assert node.span is not None
    return dtype_of_span(node.span)


def dtype_of_span(span: Span) -> str:
    """The type of integers within a span."""
    return "int32" if within(span, INT32) else "int64"


def _cast(value: Any, node: Register, dtype: str) -> Any:
    if node.op == "number" and node.kind == INT:
        return T.cast(node.number, dtype)
    return value if dtype_of(node) == dtype else T.cast(value, dtype)


def _number(node: Register) -> Any:
    if node.kind == BOOL:
        return T.bool(node.number)
    return T.cast(node.number, dtype_of(node))


_OPS: dict[str, Callable[..., Any]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "floordiv": T.floordiv,
    "min": T.min,
    "max": T.max,
    "lt": lambda x, y: x < y,
    "le": lambda x, y: x <= y,
    "eq": lambda x, y: x == y,
    "and": lambda x, y: x & y,
    "or": lambda x, y: x | y,
    "xor": lambda x, y: x ^ y,
    "shift": T.shift_right,
    "abs": T.abs,
}
