"""Random mask expressions, and what they allow at every pair of positions: as PyTorch and as kernels compute.

The kinds say which operations an expression may have; `anything` has all of them.
"""

from __future__ import annotations

import dataclasses
import math
from random import Random
from typing import Any

import torch
from torch import Tensor

from tileattn.variant.expression import Expr, TensorSymbol, apply, dtype_of, symbol
from tileattn.variant.int32_range import leaves_int32
from tileattn.variant.reading import element, evaluate, on_tensors, widened

_INTEGERS = ("add", "sub", "scale")
# Of each kind: the operations on integers, the sources of conditions, and how conditions are joined.
KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    "one affine comparison": (_INTEGERS, ("ints",), ()),
    "affine comparisons, joined": (_INTEGERS, ("ints",), ("and", "or", "not", "where")),
    "quotients and remainders": ((*_INTEGERS, "floordiv", "mod"), ("ints",), ("and", "or")),
    "choices": ((*_INTEGERS, "min", "max", "abs", "where"), ("ints",), ("and", "or")),
    "loaded integers": ((*_INTEGERS, "load", "max"), ("ints", "table"), ("and", "or")),
    "bits": ((*_INTEGERS, "and", "or", "xor"), ("ints",), ("and", "or")),
    "floats": ((*_INTEGERS,), ("floats",), ("and", "or", "not")),
    "anything": (
        (*_INTEGERS, "mul", "floordiv", "mod", "divide", "remainder", "min", "max", "abs", "where", "load", "and", "or",
         "xor", "int", "count"),
        ("ints", "floats", "table", "bools"),
        ("and", "or", "not", "where"),
    ),
}  # fmt: skip
_LARGE = (2**31 - 1, -(2**31), 2**30, 3_000_000_000, 70_000, 2**24 + 1)
_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_SPECIAL = (float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-42, 3e38, 1.0)


@dataclasses.dataclass
class RandomMask:
    """An expression with the values of its operands, and a rectangle of positions.

    q, k: the first position and the number of positions.
    """

    expr: Any
    values: dict[str, Any]
    q: tuple[int, int]
    k: tuple[int, int]

    def symbols(self) -> dict[str, Any]:
        q, k = (torch.arange(first, first + count) for first, count in (self.q, self.k))
        # Tensors of one number: Python's own numbers raise errors that tensors do not, as in 1 // 0.
        values = {name: torch.as_tensor(value) for name, value in self.values.items()}
        return {**values, "q": q[:, None], "k": k[None]}

    def allowed(self) -> Tensor:
        """By PyTorch, (queries, keys)."""
        return self._full(evaluate(self.expr, self.symbols()))

    def allowed_in_kernels(self) -> Tensor:
        """By int32 that wraps, a GPU's minimum of NaN, and anything where an integer is divided by 0."""
        return self._full(_in_kernels(self.expr, self.symbols())[0])

    def _full(self, value: Any) -> Tensor:
        return torch.as_tensor(value).expand(self.q[1], self.k[1])


class Generator:
    """Draws masks of one kind. `size` is the number of queries and keys."""

    def __init__(self, random: Random, kind: str, size: int) -> None:
        self.random, self.size = random, size
        self.ops, self.sources, self.joins = KINDS[kind]
        self.values: dict[str, Any] = {"b": random.randrange(3), "h": random.randrange(4)}
        self.tensors: dict[str, TensorSymbol] = {}
        self.large = kind == "anything"

    def mask(self) -> RandomMask:
        expr = self.condition(self.random.randint(1, 3) if self.joins else 0)
        first = self.random.choice((0, 0, -self.size // 2, -2 * self.size, 1000))
        return RandomMask(expr, self.values, (first, self.size), (0, self.size))

    def condition(self, depth: int) -> Any:
        if depth == 0 or not self.joins:
            return self._comparison(self.random.choice(self.sources))
        parts = [self.condition(depth - 1) for _ in range(3)]
        join = self.random.choice(self.joins)
        if join == "not":
            return apply("not", parts[0]) if isinstance(parts[0], Expr) else not parts[0]
        if join == "where":
            return apply("where", *parts) if isinstance(parts[0], Expr) else parts[1]
        return apply(join, *parts[:2])

    def _comparison(self, source: str) -> Any:
        op = self.random.choice(("lt", "le", "gt", "ge", "eq", "ne"))
        if source == "table":
            return self._load(torch.bool, 1)
        if source == "bools":
            return apply("ne", self._comparison("ints"), self._comparison("ints"))
        draw = self.integer if source == "ints" else self.float
        return self._applied(op, draw(3), draw(self.random.randint(0, 2)))

    def _applied(self, op: str, *args: Any) -> Any:
        """The operation, or another value of its kind where plain numbers have none (1 // 0)."""
        try:
            value = apply(op, *args)
        except (ZeroDivisionError, ValueError, OverflowError, TypeError):
            return args[-1]
        largest = 3e38 if isinstance(value, float) else 2**62
        return value if isinstance(value, (Expr, bool)) or not largest < abs(value) < math.inf else 1

    # --- Integers ---

    def _constant(self) -> int:
        if self.large and self.random.random() < 0.1:
            return self.random.choice(_LARGE)
        return self.random.randint(-self.size, self.size) if self.random.random() < 0.6 else self.random.randint(-3, 9)

    def _leaf(self) -> Any:
        name = self.random.choice(("q", "q", "k", "k", "b", "h", "number", "operand"))
        if name == "operand":
            self.values["i0"] = self.values.get("i0", min(abs(self._constant()), 2**30))
            return symbol("i0")
        return self._constant() if name == "number" else symbol(name)

    def integer(self, depth: int) -> Any:
        value = self._integer(depth)
        return value if dtype_of(value) == "int" else self._leaf()

    def _integer(self, depth: int) -> Any:
        if depth == 0 or self.random.random() < 0.15:
            return self._leaf()
        op = self.random.choice(self.ops)
        x = self.integer(depth - 1)
        if op in ("floordiv", "mod"):
            return self._applied(op, x, self.random.choice((2, 3, 4, 8, 16, 7, -2, -5, self.size)))
        if op == "scale":
            return self._applied("mul", x, self.random.choice((2, 3, -1, 5, -4, 16, self._constant())))
        if op == "abs":
            return self._applied("abs", x)
        if op == "load":
            return self._load(self.random.choice(_DTYPES), self.random.randint(1, 2))
        if op == "int":
            return self._applied("int", self._applied("float", self.float(depth - 1)))
        if op == "count":
            return self._applied("add", self._comparison("ints"), x)
        y = self.integer(depth - 1)
        if op == "xor":
            return self._applied("sub", self._applied("or", x, y), self._applied("and", x, y))
        if op == "where":
            condition = self._comparison("ints")
            return self._applied("where", condition, x, y)
        if op in ("divide", "remainder"):  # by numbers that may be 0 at some positions; PyTorch refuses a constant 0
            return self._applied({"divide": "floordiv", "remainder": "mod"}[op], x, 1 if type(y) is int else y)
        return self._applied(op, x, y)

    def _load(self, dtype: torch.dtype, dims: int) -> Any:
        shape = tuple(self.random.choice((1, 5, self.size, 3 * self.size)) for _ in range(dims))
        name = f"t{len(self.tensors)}"
        self.values[name] = self._table(dtype, shape)
        self.tensors[name] = TensorSymbol(name, dtype, tuple(size == 1 for size in shape))
        return self.tensors[name][tuple(self._index(size) for size in shape)]

    def _index(self, size: int) -> Any:
        index = self.integer(self.random.randint(0, 1))
        if self.random.random() < 0.3:
            index = self._applied("min", self._applied("max", index, 0), size - 1)
        return index

    def _table(self, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        random = torch.Generator().manual_seed(self.random.randrange(2**32))
        if dtype == torch.bool:
            return torch.rand(shape, generator=random) < self.random.choice((0.1, 0.5, 0.95))
        if dtype.is_floating_point:
            table = torch.randn(shape, generator=random) * self.random.choice((1.0, 30.0))
            share = self.random.choice((0.0, 0.2))
            special = torch.tensor(_SPECIAL)[torch.randint(len(_SPECIAL), shape, generator=random)]
            return torch.where(torch.rand(shape, generator=random) < share, special, table).to(dtype)
        reach = self.random.choice((3, self.size, 2**40 if dtype == torch.int64 and self.large else 100))
        table = torch.randint(-reach, reach + 1, shape, generator=random)
        if self.random.random() < 0.5:  # ids ascend, as documents do
            table = table.sort().values
        info = torch.iinfo(dtype)
        return table.clamp(info.min, info.max).to(dtype)

    # --- Floats ---

    def float(self, depth: int) -> Any:
        if depth == 0 or self.random.random() < 0.2:
            if self.random.random() < 0.3:
                return self.random.choice((0.1, 1.0, -2.5, 1e-3, 30.0, 0.0))
            return self._load(self.random.choice(_FLOATS), 1)
        x = self.float(depth - 1) if self.random.random() < 0.5 else self.integer(depth - 1)
        op = self.random.choice((
            "add", "sub", "mul", "div", "min", "max", "abs", "floordiv", "mod", "where", "tanh", "sigmoid", "exp",
            "exp2", "log", "log2", "sqrt", "sin", "cos", "float",
        ))  # fmt: skip
        if op in ("add", "sub", "mul", "div", "min", "max", "floordiv", "mod"):
            return self._applied(op, self._applied("float", x), self.float(depth - 1))
        if op == "where":
            return self._applied("where", self._comparison("ints"), self._applied("float", x), self.float(depth - 1))
        return self._applied(op, self._applied("float", x))


# --- Kernels ---


def _in_kernels(expr: Any, values: dict[str, Any]) -> tuple[Any, bool]:
    """The value, and whether it is computed in int64. Shares with the package the operations on tensors alone."""
    if not isinstance(expr, Expr):
        return expr, type(expr) is int and not -(2**31) <= expr < 2**31
    if expr.op == "symbol":
        return values[expr.args[0]], False
    if expr.op == "load":
        tensor = values[expr.args[0]]
        value = widened(element(tensor, [_in_kernels(arg, values)[0] for arg in expr.args[1:]]), torch.float32)
        return value.float() if value.dtype == torch.float64 else value, tensor.dtype == torch.int64
    parts = [_in_kernels(arg, values) for arg in expr.args]
    args, wide = [value for value, _ in parts], any(w for _, w in parts) or leaves_int32(expr)
    value = _operation(expr, args)
    if expr.dtype != "int":
        return value, False
    return (value if wide else (value + 2**31) % 2**32 - 2**31), wide


def _operation(expr: Expr, args: list[Any]) -> Any:
    if not any(isinstance(arg, Tensor) for arg in args):
        args = [torch.as_tensor(arg) for arg in args]
    if expr.op in ("min", "max") and expr.dtype == "float":
        args = [torch.as_tensor(arg, dtype=torch.float32) for arg in args]
        return torch.fmin(*args) if expr.op == "min" else torch.fmax(*args)
    if expr.op == "int" and dtype_of(expr.args[0]) == "float":
        return torch.as_tensor(args[0]).nan_to_num(0.0).double().clamp(-(2**31), 2**31 - 1).long()
    value = on_tensors(expr.op, args, torch.float32)
    if expr.op in ("floordiv", "mod") and expr.dtype == "int":
        value = torch.where(torch.as_tensor(args[1]) == 0, -1 if expr.op == "mod" else 12345, value)
    return value
