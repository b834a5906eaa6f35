"""The evaluation of a traced expression on bounds instead of numbers."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..expression import Expr, TensorSymbol
from ..operations import COMPARISONS
from . import comparisons, floats, tables
from .bits import bitwise
from .integers import Integers
from .values import INT32, INT64, Bools, Bounds, Ends, Floats, Ints, Place, Span, filled, hull, within

_EXACT = 2**24  # integers up to this size are float32 numbers
_POSITIONS = (-(2**24), 2**24)  # of sequences that kernels take, see variant/int32_range.py
_SELECTIONS = ("where", "and", "or", "not")


class Evaluator:
    """Computes the bounds of expressions in many tiles. Nothing is read from a device, so no call waits for one.

    Args:
        values: numbers, and tensors, by the names of symbols and tensors.
        positions: ``q``, ``k``, ``b`` and ``h`` in each tile by their names: numbers or `Ends`.
    """

    def __init__(self, values: Mapping[str, Any], positions: Mapping[str, int | Ends], device: Place) -> None:
        self.values, self.device = values, device
        self.integers = Integers(device)
        self.known: dict[int, Bounds] = {}
        self.by_key: dict[Hashable, Bounds] = {}
        self.keys: dict[Hashable, int] = {}
        self.symbols: dict[str, Ints] = {}
        for name, ends in positions.items():
            span = _span(ends) if isinstance(ends, Ends) else (ends, ends)
            if isinstance(ends, Ends) and span[0] < span[1]:
                self.symbols[name] = self.integers.atom(name, ends.first, ends.last, span, ends.width)
            else:
                self.symbols[name] = self.integers.constant(span[0])

    def __call__(self, expr: Any) -> Bounds:
        """The bounds of an expression or a number; equal subexpressions are computed once."""
        if not isinstance(expr, Expr):
            return self._number(expr)
        if id(expr) not in self.known:
            self.known[id(expr)] = self._of(expr)
        return self.known[id(expr)]

    def _key(self, *parts: Hashable) -> int:
        return self.keys.setdefault(parts, len(self.keys))

    def _number(self, number: Any) -> Bounds:
        if isinstance(number, bool):
            always = filled(number, self.device)
            return Bools(always, always, self._key("bool", number))
        if isinstance(number, int):
            return self.integers.constant(number)
        number = float(number)
        value = filled(number, self.device)
        lo, hi = floats.flushed(value, value)
        if ctypes.c_float(number).value != number:
            lo, hi, _ = floats.widened(value, value, value.isnan())
        if math.isnan(number):
            lo, hi = value.nan_to_num(-math.inf), value.nan_to_num(math.inf)
        return Floats(lo, hi, value.isnan(), self._key("float", str(number)))

    def _of(self, expr: Expr) -> Bounds:
        if expr.op == "symbol":
            name = expr.args[0]
            return self.symbols[name] if name in self.symbols else self._number(self.values[name])
        if expr.op == "number":
            return self._number(expr.args[0])
        if expr.op in ("load", "size"):
            symbol, *index = expr.args
            name = symbol.name if isinstance(symbol, TensorSymbol) else symbol
            if expr.op == "size":
                return self._size(name, index[0])
            return self._load(expr, name, [self._as_int(self(each)) for each in index])
        args = [self(arg) for arg in expr.args]
        if expr.op in COMPARISONS:
            return self._compared(expr.op, *args)
        key = (expr.op, *(arg.key for arg in args))
        if key not in self.by_key:
            self.by_key[key] = self._computed(expr.op, args, key)
        return self.by_key[key]

    def _computed(self, op: str, args: list[Bounds], key: Hashable) -> Bounds:
        if op in _SELECTIONS:
            return self._selected(op, args, key)
        if op == "int":
            return self._truncated(args[0], key)
        if op == "float":
            return self._as_float(args[0])
        is_float = (op in floats.UNARY and op != "abs") or op == "div" or any(isinstance(arg, Floats) for arg in args)
        if is_float:
            numbers = [self._as_float(arg) for arg in args]
            rules: Any = floats.UNARY if len(args) == 1 else floats.BINARY
            lo, hi, nan = rules[op](*numbers)
            return Floats(lo, hi, nan, self._key(key))
        ints = [self._as_int(arg) for arg in args]
        name = {"min": "minimum", "max": "maximum", "abs": "magnitude"}.get(op, op)
        return getattr(self.integers, name)(*ints)

    # --- Conversions ---

    def _as_int(self, x: Bounds) -> Ints:
        """An integer, or a condition as 0 or 1."""
        if isinstance(x, Ints):
            return x
        assert isinstance(x, Bools)
        lo = x.lo.long()
        return self.integers.atom(("bool", x.key), lo, lo if x.lo is x.hi else x.hi.long(), (0, 1))

    def _as_float(self, x: Bounds) -> Floats:
        if isinstance(x, Floats):
            return x
        x = self._as_int(x)
        no = filled(False, self.device)
        lo, hi = x.lo.double(), x.hi.double()
        if not within(x.span, (-_EXACT, _EXACT)):
            exact = (x.lo >= -_EXACT) & (x.hi <= _EXACT)
            rounded = floats.widened(lo, hi, no)
            lo, hi = torch.where(exact, lo, rounded[0]), torch.where(exact, hi, rounded[1])
        return Floats(lo, hi, no, self._key("float of", x.key))

    def _truncated(self, x: Bounds, key: Hashable) -> Ints:
        """A float as an integer. What is NaN or leaves int32 may become anything."""
        if not isinstance(x, Floats):
            return self._as_int(x)
        unknown = x.nan | (x.lo <= INT32[0]) | (x.hi >= INT32[1])
        lo, hi = (torch.where(unknown, 0.0, end).trunc().long() for end in (x.lo, x.hi))
        lo, hi = torch.where(unknown, INT64[0], lo), torch.where(unknown, INT64[1], hi)
        return self.integers.atom(key, lo, hi, INT64)

    # --- Operations on several kinds ---

    def _compared(self, op: str, x: Bounds, y: Bounds) -> Bools:
        if isinstance(x, Floats) or isinstance(y, Floats):
            decided = comparisons.of_floats(op, self._as_float(x), self._as_float(y))
        else:
            decided = comparisons.of_integers(op, self._as_int(x), self._as_int(y), self.integers)
        always, sometimes = (filled(each, self.device) if isinstance(each, bool) else each for each in decided)
        return Bools(always, sometimes, self._key(op, x.key, y.key))

    def _selected(self, op: str, args: list[Bounds], key: Hashable) -> Bounds:
        if op == "where":
            condition, x, y = args
            return self._where(condition, x, y, key)
        if any(isinstance(arg, Ints) for arg in args):
            i, j = (self._as_int(arg) for arg in args)
            return self.integers.atom((op, *sorted((i.form, j.form))), *bitwise(op, i, j))
        conditions = [arg for arg in args if isinstance(arg, Bools)]
        if op == "not":
            (x_,) = conditions
            return Bools(~x_.hi, ~x_.lo, self._key(key))
        a, b = conditions
        if op == "and":
            return Bools(a.lo & b.lo, a.hi & b.hi, self._key(key))
        return Bools(a.lo | b.lo, a.hi | b.hi, self._key(key))

    def _where(self, condition: Any, x: Bounds, y: Bounds, key: Hashable) -> Bounds:
        condition = condition if isinstance(condition, Bools) else self._compared("ne", condition, self._number(0))
        yes, no = condition.lo, ~condition.hi
        if isinstance(x, Bools) and isinstance(y, Bools):
            lo = torch.where(yes, x.lo, torch.where(no, y.lo, x.lo & y.lo))
            hi = torch.where(yes, x.hi, torch.where(no, y.hi, x.hi | y.hi))
            return Bools(lo, hi, self._key(key))
        if isinstance(x, Floats) or isinstance(y, Floats):
            f, g = self._as_float(x), self._as_float(y)
            lo, hi = _chosen(yes, no, f, g)
            return Floats(lo, hi, torch.where(yes, f.nan, torch.where(no, g.nan, f.nan | g.nan)), self._key(key))
        i, j = self._as_int(x), self._as_int(y)
        lo, hi = _chosen(yes, no, i, j)
        return self.integers.atom(key, lo, hi, hull(i.span, j.span))

    def _size(self, name: str, axis: int) -> Bounds:
        return self._number(int(self.values[name].shape[axis]))

    def _load(self, expr: Expr, name: str, index: list[Ints]) -> Bounds:
        """The range of the elements at these indices, which are clamped to the tensor as in evaluation."""
        key = ("load", name, *(each.form for each in index))
        if key not in self.by_key:
            self.by_key[key] = self._elements(expr, name, index, key)
        return self.by_key[key]

    def _elements(self, expr: Expr, name: str, index: list[Ints], key: Hashable) -> Bounds:
        tensor = self.values[name]
        if tensor.numel() == 0:
            return self._anything(tensor, key)
        clamped = [
            (lo := each.lo.clamp(0, size - 1), lo if each.is_point else each.hi.clamp(0, size - 1))
            for each, size in zip(index, tensor.shape)
        ]
        least, greatest, nan = tables.over_ranges(tensor, clamped, [self.integers.width_of(each) for each in index])
        point = all(each.is_point for each in index)
        if tensor.dtype == torch.bool:
            lo = least.bool()
            return Bools(lo, lo if point else greatest.bool(), self._key(key))
        if not tensor.dtype.is_floating_point:
            lo, hi = least.long(), greatest.long()
            info = torch.iinfo(tensor.dtype)
            return self.integers.atom(key, lo, lo if point else hi, (info.min, info.max))
        lo, hi = least.double(), greatest.double()
        if tensor.dtype == torch.float64:  # kernels read it in float32
            lo, hi, nan = floats.widened(lo, hi, nan)
        return Floats(*floats.flushed(lo, hi), nan, self._key(key))

    def _anything(self, tensor: Tensor, key: Hashable) -> Bounds:
        """An element of a tensor without elements."""
        no, yes = (filled(value, self.device) for value in (False, True))
        if tensor.dtype == torch.bool:
            return Bools(no, yes, self._key(key))
        if not tensor.dtype.is_floating_point:
            return self.integers.unknown(key)
        infinite = filled(math.inf, self.device)
        return Floats(-infinite, infinite, yes, self._key(key))


def _span(ends: Ends) -> Span:
    if ends.span is not None:
        return ends.span
    return (int(ends.first.min()), int(ends.last.max())) if ends.first.device.type == "cpu" else _POSITIONS


def _chosen(yes: Tensor, no: Tensor, x: Any, y: Any) -> tuple[Tensor, Tensor]:
    lo = torch.where(yes, x.lo, torch.where(no, y.lo, torch.minimum(x.lo, y.lo)))
    hi = torch.where(yes, x.hi, torch.where(no, y.hi, torch.maximum(x.hi, y.hi)))
    return lo, hi
