"""Expressions: the computation of a mask or a score modification as a tree.

A variant is written once, as Python code over ``b, h, q, k`` (and ``score``). The code runs directly on torch tensors.
For a kernel it runs once on the symbols of this module and returns an :class:`Expr`, the root of a small tree. A
backend generates code in its own language from the tree. The tree prints as one canonical line, which is a part of the
kernel cache's key. :mod:`tileattn.variant.reading` parses that line, so a ``torch.library`` operator can take it as a
string.

    >>> q, k = symbol("q"), symbol("k")
    >>> str((k <= q) & (q - k < 128))
    '(and (le k q) (lt (sub q k) 128))'
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, TypeAlias

import torch

from .operations import COMPARISONS, FLOAT_OPS, KEEP_BOOL, LOGIC_OPS, OPS
from .torch_methods import FUNCTIONS, TensorMethods, call_of_torch

Number = bool | int | float

Operand: TypeAlias = "Expr | Number"

_INT_SYMBOLS = re.compile(r"b|h|q|k|q_lo|q_hi|k_lo|k_hi|seqlen_k|i\d+")
_FLOAT_SYMBOLS = re.compile(r"score|f\d+")


class Expr(TensorMethods):
    """One node: an operation and its arguments (nodes, numbers, or the names of symbols and tensors).

    ``dtype`` is ``"float"``, ``"int"`` or ``"bool"``. Floats are computed in float32, or float64 in a float64 call,
    whatever the dtype of the tensors that they are read from. Integers are int64 on a CPU. Kernels use int32 for
    positions and for all values that fit (see ``int32_range.py``).
    """

    __slots__ = ("args", "dtype", "op")
    __array_ufunc__ = None  # numpy's numbers leave `np.float32(2) * score` to this class

    def __init__(self, op: str, args: tuple[Any, ...], dtype: str) -> None:
        self.op = op
        self.args = args
        self.dtype = dtype

    def __str__(self) -> str:
        if self.op in ("symbol", "number"):
            return str(self.args[-1])
        return f"({self.op} {' '.join(map(text_of, self.args))})"

    __repr__ = __str__

    def __bool__(self) -> bool:
        raise TypeError(
            "a mask or score modification cannot branch on its arguments with Python's `if`, `and`, `or`, `not`, "
            "`min`: they are traced once for all positions; use tileattn.math.where, `&`, `|`, `~` and "
            "tileattn.math.minimum"
        )

    def __index__(self) -> int:
        raise TypeError(
            "a traced position cannot index this object; a torch tensor captured by the function can be indexed "
            "(`tensor[b, q]`), as can any tensor through tileattn.math.load(tensor, b, q)"
        )

    def __iter__(self) -> Any:
        raise TypeError("a traced score or position is one number, not a sequence")

    def __hash__(self) -> int:
        return id(self)

    # Arithmetic. Each returns a new node; constants fold in `apply`.
    def __add__(self, other: Operand) -> Expr:
        return apply("add", self, other)

    def __radd__(self, other: Operand) -> Expr:
        return apply("add", other, self)

    def __sub__(self, other: Operand) -> Expr:
        return apply("sub", self, other)

    def __rsub__(self, other: Operand) -> Expr:
        return apply("sub", other, self)

    def __mul__(self, other: Operand) -> Expr:
        return apply("mul", self, other)

    def __rmul__(self, other: Operand) -> Expr:
        return apply("mul", other, self)

    def __truediv__(self, other: Operand) -> Expr:
        return apply("div", self, other)

    def __rtruediv__(self, other: Operand) -> Expr:
        return apply("div", other, self)

    def __floordiv__(self, other: Operand) -> Expr:
        return apply("floordiv", self, other)

    def __rfloordiv__(self, other: Operand) -> Expr:
        return apply("floordiv", other, self)

    def __mod__(self, other: Operand) -> Expr:
        return apply("mod", self, other)

    def __rmod__(self, other: Operand) -> Expr:
        return apply("mod", other, self)

    def __pow__(self, exponent: Any) -> Any:
        return self._call("pow", exponent)

    def __rpow__(self, base: Any) -> Any:
        return FUNCTIONS["pow"](base, self)

    def __neg__(self) -> Expr:
        return apply("sub", 0, self)

    def __abs__(self) -> Expr:
        return apply("abs", self)

    def __and__(self, other: Operand) -> Expr:
        return apply("and", self, other)

    __rand__ = __and__

    def __or__(self, other: Operand) -> Expr:
        return apply("or", self, other)

    __ror__ = __or__

    def __invert__(self) -> Expr:
        return apply("not", self)

    def __xor__(self, other: Operand) -> Any:
        return self._call("xor", other)

    __rxor__ = __xor__

    def __lshift__(self, bits: Any) -> Any:
        return self._call("shift_left", bits)

    def __rshift__(self, bits: Any) -> Any:
        return self._call("shift_right", bits)

    def __lt__(self, other: Operand) -> Expr:
        return apply("lt", self, other)

    def __le__(self, other: Operand) -> Expr:
        return apply("le", self, other)

    def __gt__(self, other: Operand) -> Expr:
        return apply("gt", self, other)

    def __ge__(self, other: Operand) -> Expr:
        return apply("ge", self, other)

    def __eq__(self, other: Operand) -> Expr:  # type: ignore[override]
        return apply("eq", self, other)

    def __ne__(self, other: Operand) -> Expr:  # type: ignore[override]
        return apply("ne", self, other)

    def _call(self, name: str, *others: Any) -> Any:
        return FUNCTIONS[name](self, *others)

    def __getitem__(self, index: Any) -> Expr:
        """Supports ``[()]`` and ``[...]``, which return a captured 0-dim tensor, one number, unchanged."""
        if index == () or index is Ellipsis:
            return self
        raise TypeError("a traced score or position is one number, and cannot be indexed")

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"a traced score or position is one number and has no .{name}: use operators, the methods of tensors that "
            f"compute with one number, or the functions of tileattn.math"
        )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Traces torch functions such as ``torch.where`` and ``torch.tanh``, as code for FlexAttention uses them."""
        name = str(getattr(func, "__name__", func))
        if name == "__getitem__":
            return captured(args[0])[args[1]]
        return call_of_torch(name, args, kwargs or {})


class TensorSymbol:
    """Stands for a captured tensor while a variant is traced: indexing it with positions yields a value.

    ``dtype`` is the elements' torch dtype. ``ones`` says for each dimension whether its size is 1, in which case it is
    broadcast. ``aligned`` is the result of ``tile_loads.is_aligned`` if a kernel may make use of it. ``tensor`` is the
    tensor itself while a user's function is traced; the name is assigned afterwards
    (:mod:`tileattn.variant.tracing.trace`).
    """

    def __init__(
        self,
        name: str,
        dtype: torch.dtype,
        ones: tuple[bool, ...],
        aligned: bool = False,
        tensor: torch.Tensor | None = None,
    ) -> None:
        self.name = name
        self.dtype = dtype
        self.ones = ones
        self.aligned = aligned
        self.tensor = tensor

    def __str__(self) -> str:
        return self.name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # a Python protocol that tests whether the method exists
            raise AttributeError(name)
        raise TypeError(
            f"a mask or score modification must read its tensors element by element (`tensor[h, k]`, "
            f"tileattn.math.load), so that kernels know what it reads; it asked for `tensor.{name}`"
        )

    @property
    def _reference(self) -> Any:
        """The tensor's argument in an expression: its name, or this object if the name is not yet assigned."""
        return self.name if self.tensor is None else self

    @property
    def ndim(self) -> int:
        return len(self.ones)

    @property
    def shape(self) -> tuple[Operand, ...]:
        """The sizes: 1 if the size is known to be 1, else a run-time value."""
        return tuple(1 if one else Expr("size", (self._reference, axis), "int") for axis, one in enumerate(self.ones))

    def __getitem__(self, index: Any) -> Expr:
        index = index if isinstance(index, tuple) else (index,)
        numbers = all(isinstance(i, (Expr, int)) and dtype_of(i) == "int" for i in index)
        if len(index) != self.ndim or not numbers:
            raise TypeError(
                f"a captured tensor with {self.ndim} dimensions must be indexed with {self.ndim} integer positions, "
                f"got ({', '.join([str(i) for i in index])})"
            )
        index = tuple(0 if one else i for i, one in zip(index, self.ones))
        kind = "bool" if self.dtype is torch.bool else "float" if self.dtype.is_floating_point else "int"
        return Expr("load", (self._reference, *index), kind)

    def whole(self) -> Expr:
        """The number in a 0-dim tensor."""
        if self.ndim:
            raise TypeError(
                f"a mask or score modification computed with a captured tensor of {self.ndim} dimensions as a whole: "
                f"index it with positions to get one number, such as `slopes[h]`"
            )
        return self[()]


def captured(tensor: Any) -> TensorSymbol:
    """A symbol for a tensor that a user's function reads while it is traced."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError("a traced score or position is one number, which cannot be indexed")
    return TensorSymbol(f"t{id(tensor)}", tensor.dtype, tuple(size == 1 for size in tensor.shape), tensor=tensor)


def symbol(name: str) -> Expr:
    """The run-time value called `name`: a position (``b h q k``), ``score``, or an operand (``i0``, ``f1``)."""
    if _INT_SYMBOLS.fullmatch(name):
        return Expr("symbol", (name,), "int")
    if _FLOAT_SYMBOLS.fullmatch(name):
        return Expr("symbol", (name,), "float")
    raise ValueError(f"no symbol is called {name!r}")


def apply(op: str, *operands: Operand | TensorSymbol) -> Any:
    """The node ``op(operands)``, or its value if all operands are numbers."""
    args = tuple(arg if isinstance(arg, (Expr, bool, int, float)) else _number(arg) for arg in operands)
    if not any(isinstance(arg, Expr) for arg in args):
        return OPS[op](*args)
    if op in LOGIC_OPS:
        _check_logic(op, args)
    simple = _simplify(op, args)
    return simple if simple is not None else Expr(op, args, _result_dtype(op, args))


def _number(arg: Any) -> Any:
    """Converts a 0-dim tensor, a numpy number or a symbolic number of torch to an operand."""
    if isinstance(arg, TensorSymbol):
        return arg.whole()
    if isinstance(arg, torch.Tensor):
        return captured(arg).whole()
    if isinstance(arg, (torch.SymInt, torch.SymFloat)):
        return Expr("number", (arg, str(arg)), "int" if isinstance(arg, torch.SymInt) else "float")
    if type(arg).__module__ == "numpy" and getattr(arg, "ndim", None) == 0:
        value = arg.item()
        if isinstance(value, (bool, int, float)):
            return value
    raise TypeError(
        f"a mask or score modification met {type(arg).__name__} {arg!r}: only numbers, positions and elements "
        f"of captured tensors can be computed with"
    )


def _check_logic(op: str, args: tuple[Operand, ...]) -> None:
    """Raises TypeError unless `&` and `|` join conditions or integers, and `~` negates a condition."""
    kinds = {dtype_of(arg) for arg in args}
    if kinds != {"bool"} and (kinds != {"int"} or op == "not"):
        raise TypeError(
            f"`{LOGIC_OPS[op]}` in a mask or score modification takes conditions, such as (q >= k), not "
            f"{' and '.join(dtype_of(arg) for arg in args)} values; compare them first"
        )


def _simplify(op: str, args: tuple[Operand, ...]) -> Operand | None:
    """The operand that the operation reduces to, or None. Keeps keys short and generated code readable."""
    if op in ("and", "or"):
        for value, other in (args, args[::-1]):
            # Only the neutral element is simplified, never to a bare False or True: Python's `~True` is -2.
            if isinstance(value, bool) and value == (op == "and"):
                return other
    if op in ("min", "max") and str(args[0]) == str(args[1]):
        return args[0]
    if op == "add" and any(type(arg) is int and arg == 0 for arg in args):
        return args[1] if type(args[0]) is int else args[0]
    if op == "sub" and type(args[1]) is int and args[1] == 0:
        return args[0]
    return None


def _result_dtype(op: str, args: tuple[Operand, ...]) -> str:
    if op in COMPARISONS:
        return "bool"
    if op in FLOAT_OPS:
        return "float"
    if op == "int":
        return "int"
    kinds = [dtype_of(arg) for arg in (args[1:] if op == "where" else args)]
    return "float" if "float" in kinds else "int" if "int" in kinds or op not in KEEP_BOOL else "bool"


def dtype_of(value: Operand) -> str:
    """The kind of a value: ``"float"``, ``"int"`` or ``"bool"``."""
    if isinstance(value, Expr):
        return value.dtype
    return "bool" if isinstance(value, bool) else "int" if isinstance(value, int) else "float"


def nodes(expr: Any) -> Iterator[Expr]:
    """An expression and all expressions in it."""
    if isinstance(expr, Expr):
        yield expr
        for arg in expr.args:
            yield from nodes(arg)


def has_symbol(value: Any, name: str) -> bool:
    """Whether a value is an expression that contains a symbol."""
    return any(node.op == "symbol" and node.args[0] == name for node in nodes(value))


def text_of(arg: Any) -> str:
    """The argument as text that :func:`tileattn.variant.reading.parse` reads back."""
    if isinstance(arg, bool):
        return "true" if arg else "false"
    # numpy floats and enumerations are subclasses of float and int with another repr.
    return repr(float(arg)) if isinstance(arg, float) else str(int(arg)) if isinstance(arg, int) else str(arg)
