"""What a kernel computes for a tile: the rules of the interval analysis, evaluated on registers.

A kernel is made for a mask, not for lengths, numbers or tiles. So the rules know less on the host than where PyTorch's
operations make the lists: only that sizes and numbers are below the bounds of this module, which the host looks at
before each launch. Forms in which a run-time number is a factor are no linear forms. The bounds of a tile may be wider
for that, and never wrong.

Tensors are read in two ways. Where few elements are at the indices of a tile, a thread reads them. A load that depends
on the row of tiles alone, or on the column alone, is *wide*: a launch before reads it once for each row.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from ....variant.expression import Expr, TensorSymbol, has_symbol, nodes
from ....variant.intervals.evaluator import Evaluator
from ....variant.intervals.tiles import Kind
from ....variant.intervals.values import Bools, Bounds, Ends, Floats, Ints, Span
from ....variant.program import Program, program
from .registers import INT, Graph, Register, Unknown, nodes_of

# What kernels assume of a call.
MOST_POSITIONS = 2**24
MOST_HEADS, MOST_BATCH = 2**12, 2**16
MOST_BLOCK = 2**9  # positions in a tile
MOST_NUMBER = 2**30 - 2**26  # of a mask's integers, and sizes of its tensors; the sum of two is an int32
MOST_READ = 96  # elements that a thread reads of a tensor for a tile, at most: 81 blocks of 64 x 64 in the largest
MOST_COPIED = 2**22  # elements of a tensor that is copied first, since it is not contiguous
MOST_WIDE = 2**13  # the same of a warp for a row of tiles
MOST_NODES = 4096
Widths = tuple[int, int]
WIDEST: Widths = (MOST_BLOCK - 1, MOST_BLOCK - 1)


@dataclass(frozen=True, eq=False)
class WideLoad:
    """A load over many elements: those within a box of indices.

    Attributes:
        number: of the tensor.
        firsts, lasts: of each dimension the first and the last index, within the tensor.
        sizes: of the tensor.
        widths: of each dimension a number that last - first never exceeds.
        span: of the elements.
        by_plane: whether it depends on the batch element or the head.
    """

    number: int
    firsts: tuple[Register, ...]
    lasts: tuple[Register, ...]
    sizes: tuple[Register, ...]
    widths: tuple[int, ...]
    span: Span
    by_plane: bool


@dataclass(frozen=True, eq=False)
class Analysis:
    """The nodes of a mask.

    Attributes:
        kind: the kind of a tile, before its ends are looked at (:class:`tileattn.variant.intervals.tiles.Kind`).
        row_loads, column_loads: wide loads, by row of tiles and by column. One comes after those that its indices need.
        tensors: the numbers of the tensors that the kernel reads itself.
        sizes: (number of a tensor, axis) of the sizes that it takes.
        ints: the numbers of the integers that it takes.
        divisors: those among them that are divisors, which must be at least 1.
        by_batch, by_head: whether the mask depends on them.
    """

    kind: Register
    row_loads: tuple[WideLoad, ...]
    column_loads: tuple[WideLoad, ...]
    tensors: tuple[int, ...]
    sizes: tuple[tuple[int, int], ...]
    ints: tuple[int, ...]
    divisors: tuple[int, ...]
    by_batch: bool
    by_head: bool


@functools.lru_cache(maxsize=1024)
def analysis(variant: str, widths: Widths = WIDEST) -> Analysis | None:
    """The nodes of the mask of a variant key; None if the kernel does not know something in it."""
    try:
        return analysed(program(variant), widths)
    except Unknown:
        return None


def mask_text(variant: str) -> str:
    """The canonical text of what lists depend on: equal texts mean equal kernels."""
    traced = program(variant)
    loads = (node.args[0] for each in _expressions(traced) for node in nodes(each) if node.op in ("load", "size"))
    names = {each.name if isinstance(each, TensorSymbol) else str(each) for each in loads}
    tensors = " ".join(f"{each.name}:{each.dtype}:{each.ones}" for each in traced.tensors if each.name in names)
    return f"{traced.allows} | {traced.kv_range} | {traced.full_range} | {tensors}"


def analysed(traced: Program, widths: Widths = WIDEST) -> Analysis:
    """The nodes of a traced mask.

    Args:
        widths: by how much the last query of a tile exceeds the first, at most, and the last key. Of one query, 0, the
            kernel has no other input than ("q", "first").

    Raises:
        Unknown: the kernel does not know something in it.
    """
    expressions = _expressions(traced)
    symbols = {str(node.args[0]) for each in expressions for node in nodes(each) if node.op == "symbol"}
    ints = tuple(number for number in range(traced.ints) if f"i{number}" in symbols)
    graph, used = Graph(), _Used()
    spans = {"q": (-MOST_POSITIONS, MOST_POSITIONS), "k": (0, MOST_POSITIONS)}
    (q_first, q_last), (k_first, k_last) = (
        (graph.input(name, "first", span=span), graph.input(name, "last", span=span)) for name, span in spans.items()
    )
    numbers = {"b": (0, MOST_BATCH), "h": (0, MOST_HEADS), "seqlen_k": (1, MOST_POSITIONS)}
    divisors = tuple(number for number in ints if any(_divides(f"i{number}", each) for each in expressions))
    numbers |= {f"i{number}": (1 if number in divisors else -MOST_NUMBER, MOST_NUMBER) for number in ints}
    points = {name: _point(graph.input(name, span=span)) for name, span in numbers.items()}
    q_last = q_last if widths[0] > 0 else q_first
    of_tile = {
        "q": Ends(_tensor(q_first), _tensor(q_last), spans["q"], widths[0]),
        "k": Ends(_tensor(k_first), _tensor(k_last), spans["k"], widths[1]),
    }
    found = _Bounds(graph, traced, points | of_tile, used)(traced.allows)
    if not isinstance(found, Bools):
        raise Unknown("a mask that is not a condition")
    kind: Any = found.lo.long() + found.hi.long()
    at_ends = _Bounds(graph, traced, points | {"q_lo": _point(q_first), "q_hi": _point(q_last)}, used)
    # As in tile_lists.py, but that bounds which may have left int32 are not exact.
    if any(isinstance(bound, Expr) and str(bound) != "seqlen_k" for bound in traced.kv_range):
        lo, hi = (at_ends.integer(bound) for bound in traced.kv_range)
        kind = graph.where((k_last >= lo.lo) & (k_first < hi.hi), kind, Kind.HIDDEN.value)
    if any(isinstance(bound, Expr) for bound in traced.full_range):
        lo, hi = (at_ends.integer(bound) for bound in traced.full_range)
        kind = graph.where((k_first < lo.hi) | (k_last >= hi.lo), kind, Kind.WHOLE.value)
    if len(graph.known) > MOST_NODES:
        raise Unknown("a mask of very many operations")
    return Analysis(
        kind, tuple(used.row_loads), tuple(used.column_loads), tuple(sorted(used.tensors)), tuple(used.sizes), ints,
        divisors, "b" in symbols, "h" in symbols,
    )  # fmt: skip


def _expressions(traced: Program) -> tuple[Any, ...]:
    """What lists depend on."""
    return (traced.allows, *traced.kv_range, *traced.full_range)


def _divides(name: str, expr: Any) -> bool:
    """Whether a number is a divisor in an expression."""
    divisors = (node.args[1] for node in nodes(expr) if node.op in ("floordiv", "mod"))
    return any(isinstance(each, Expr) and each.op == "symbol" and each.args[0] == name for each in divisors)


def _tensor(register: Register) -> Tensor:
    return cast(Tensor, register)


def _point(number: Register) -> Ends:
    return Ends(_tensor(number), _tensor(number), number.span, 0)


@dataclass
class _Used:
    """What the kernel takes of a call, in the order in which the rules ask for it."""

    row_loads: list[WideLoad] = field(default_factory=list)
    column_loads: list[WideLoad] = field(default_factory=list)
    tensors: set[int] = field(default_factory=set)
    sizes: list[tuple[int, int]] = field(default_factory=list)


class _Numbers(Mapping[str, Any]):
    """The values of operands, of which none is known."""

    def __getitem__(self, name: str) -> Any:
        raise Unknown(f"the value of {name}")

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


class _Bounds(Evaluator):
    """The rules on registers."""

    def __init__(self, graph: Graph, traced: Program, positions: Mapping[str, Ends], used: _Used) -> None:
        super().__init__(_Numbers(), positions, graph)
        self.graph, self.used = graph, used
        self.tensors = {each.name: each for each in traced.tensors}

    def integer(self, expr: Any) -> Ints:
        """The bounds of an integer expression."""
        return self._as_int(self(expr))

    def _number(self, number: Any) -> Bounds:
        if not isinstance(number, int):
            raise Unknown("a float")
        return super()._number(number)

    def _as_float(self, x: Bounds) -> Floats:
        raise Unknown("a float")

    def _size(self, name: str, axis: int) -> Bounds:
        of = int(name[1:]), axis
        if of not in self.used.sizes:
            self.used.sizes.append(of)
        size = self.graph.input("size", *of, span=(1, MOST_NUMBER))
        return self.integers.atom(("size", *of), _tensor(size), _tensor(size), (1, MOST_NUMBER), 0)

    def _elements(self, expr: Expr, name: str, index: list[Ints], key: Hashable) -> Bounds:
        tensor = self.tensors[name]
        if tensor.dtype.is_floating_point:
            raise Unknown("a tensor of floats")
        is_bool = tensor.dtype is torch.bool
        span = (0, 1) if is_bool else (torch.iinfo(tensor.dtype).min, torch.iinfo(tensor.dtype).max)
        point = all(each.is_point for each in index)
        number = int(name[1:])
        self.used.tensors.add(number)
        sizes = tuple(self._as_int(self._size(name, axis)).lo for axis in range(len(index)))
        firsts, lasts = (
            tuple(end.clamp(min=0).clamp(max=size - 1) for end, size in zip(ends, sizes))
            for ends in ([each.lo for each in index], [each.hi for each in index])
        )
        widths = tuple(self.integers.width_of(each) for each in index)
        load = WideLoad(number, *map(_registers, (firsts, lasts, sizes)), widths, span, _by_plane(expr))
        few = math.prod(width + 1 for width in widths) <= MOST_READ
        lo, hi = self._read(load) if few else self._read_before(expr, load)
        hi = lo if point else hi
        if is_bool:
            conditions = tuple(_tensor(each != 0) for each in (lo, hi))
            return Bools(conditions[0], conditions[0] if point else conditions[1], self._key(key))
        return self.integers.atom(key, _tensor(lo), _tensor(hi), span)

    def _read(self, load: WideLoad) -> tuple[Register, Register]:
        """The least and the greatest of few elements, which a thread reads for its tile."""
        args = (load.number, len(load.sizes), *load.firsts, *load.lasts, *load.sizes)
        if all(first is last for first, last in zip(load.firsts, load.lasts)):
            element = self.graph.node("element", args, INT, load.span)
            return element, element
        return self.graph.node("least", args, INT, load.span), self.graph.node("greatest", args, INT, load.span)

    def _read_before(self, expr: Expr, load: WideLoad) -> tuple[Register, Register]:
        """The least and the greatest element that a row or a column of tiles reads."""
        if any(has_symbol(expr, name) for name in ("q_lo", "q_hi", "seqlen_k")):
            raise Unknown("a load over many elements in the ranges of a mask")
        # Not by the expression: the bounds of an index may be those of another expression of the same value.
        sides = {side for index in (*load.firsts, *load.lasts) for side in _sides(index)}
        if len(sides) > 1:
            raise Unknown("a load over many elements by query and key")
        side, loads = ("column", self.used.column_loads) if "column" in sides else ("row", self.used.row_loads)
        loads.append(load)
        lo, hi = (self.graph.node("wide", (side, len(loads) - 1, end), INT, load.span) for end in range(2))
        return lo, hi


def _sides(index: Register) -> set[str]:
    """Of what an index depends on: the row of tiles, its column, or both."""
    inputs = {node.args[0] for node in nodes_of(index) if node.op == "input"}
    of_loads = {node.args[0] for node in nodes_of(index) if node.op == "wide"}
    return {side for name, side in (("q", "row"), ("k", "column")) if name in inputs} | of_loads


def _registers(tensors: tuple[Tensor, ...]) -> tuple[Register, ...]:
    return cast("tuple[Register, ...]", tensors)


def _by_plane(expr: Expr) -> bool:
    return has_symbol(expr, "b") or has_symbol(expr, "h")
