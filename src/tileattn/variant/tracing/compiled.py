"""Tracing of a user's function under torch.compile: Dynamo runs it on tensors that stand for positions and scores.

Each symbol is a 0-dim tensor on the device "meta". A torch function mode intercepts every operation on symbols,
computes the expression instead, and returns another such tensor. Dynamo traces the mode as well, so its guards cover
everything that the function captures. The tensors that remain in the graph are not used by anything.

Symbols are not :class:`tileattn.variant.expression.Expr` objects here, for two reasons. Dynamo compares an Expr wrongly
with a number that it does not treat as a constant (``q - k == w`` is False). It also does not see an Expr in an index
(``bias[h, k]``).

An operation that the mode does not intercept returns a tensor on "meta" without an expression. In torch 2.13 Python's
``abs`` is such an operation; it is looked up in the graph. All other such operations raise an error.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.comptime import comptime
from torch._dynamo.eval_frame import skip_code
from torch._dynamo.utils import _disable_side_effect_safety_checks_for_current_subtracer as _unchecked
from torch.fx.experimental.symbolic_shapes import has_static_value
from torch.overrides import TorchFunctionMode

from ..expression import Expr, TensorSymbol, symbol
from ..operations import OPERATORS
from .eager import run_eagerly

_DTYPES = {"float": torch.float32, "int": torch.int64, "bool": torch.bool}


def run(fn: Callable[..., Any], arguments: tuple[str, ...]) -> Any:
    """The expression or number that `fn` returns for the symbols called `arguments`."""
    if not torch.compiler.is_dynamo_compiling():  # Dynamo could not trace this and calls it outside of a graph
        return _run_eagerly(fn, arguments)
    tracing = _Tracing()
    symbols = [tracing.stand_in(symbol(name)) for name in arguments]
    # Within a checkpoint Dynamo refuses the first change of the mode stack, but not later changes.
    _unchecked(_enter_and_leave, tracing)
    with tracing:
        result = fn(*symbols)
    return tracing.value(result)


# Dynamo traces `run` either as a part of its caller or not at all. Otherwise it could resume in the middle of the
# user's function, or trace that function alone on Expr objects.
skip_code(run.__code__)
_run_eagerly = torch._dynamo.disable(run_eagerly)


def _enter_and_leave(mode: TorchFunctionMode) -> None:
    with mode:
        pass


class _Tracing(TorchFunctionMode):
    """The torch function mode that computes expressions instead of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.symbols: list[tuple[torch.Tensor, Expr]] = []
        self.captured: list[TensorSymbol] = []
        self.numbers = 0

    def stand_in(self, value: Any) -> Any:
        """The tensor that stands for an expression. A number is returned unchanged."""
        if not isinstance(value, Expr):
            return value
        tensor = torch.empty((), dtype=_DTYPES[value.dtype], device="meta")
        place = len(self.symbols)  # noqa: F841  # read by `_mark`
        comptime(_mark)
        self.symbols.append((tensor, value))
        return tensor

    def value(self, value: Any) -> Any:
        """The inverse of :meth:`stand_in`. Other tensors, and numbers that may change, become operands."""
        if isinstance(value, torch.Tensor):
            known = self._expression(value)
            if known is None and value.is_meta:
                return self._hidden(value)
            return self._tensor(value).whole() if known is None else known
        return self._number(value)

    def _expression(self, tensor: Any) -> Expr | None:
        for known, expr in self.symbols:
            if known is tensor:
                return expr
        return None

    def _hidden(self, tensor: torch.Tensor) -> Any:
        """The expression of a tensor that Dynamo computed from a symbol without the mode."""
        comptime(_look)
        name, place = _seen()
        if name == "abs" and place is not None:
            return abs(self.symbols[place][1])
        raise TypeError(
            f"torch.compile cannot trace {name!r} in a mask or score modification: use operators, the functions of "
            f"tileattn.math and those of torch"
        )

    def _tensor(self, tensor: torch.Tensor) -> TensorSymbol:
        for known in self.captured:
            if known.tensor is tensor:
                return known
        ones = tuple([size == 1 for size in tensor.shape])
        self.captured.append(TensorSymbol(f"t{len(self.captured)}", tensor.dtype, ones, tensor=tensor))
        return self.captured[-1]

    def _number(self, value: Any) -> Any:
        """A number whose value Dynamo does not guard becomes an operand."""
        if isinstance(value, (bool, Expr)) or not isinstance(value, (int, float)) or has_static_value(value):
            return value
        self.numbers += 1
        return Expr("number", (value, f"n{self.numbers}"), "float" if isinstance(value, float) else "int")

    def _is_symbol(self, value: Any) -> bool:
        if isinstance(value, (tuple, list)):
            return True in [self._is_symbol(item) for item in value]
        return isinstance(value, torch.Tensor) and (value.is_meta or self._expression(value) is not None)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = f"{func.__name__}"  # a string; Dynamo takes func.__name__ itself for something unknown
        if name in ("as_tensor", "asarray") and isinstance(args[0], (bool, int, float)):
            return args[0]  # a number suffices, and has no device
        if name == "__get__" or not self._is_symbol([*args, *kwargs.values()]):
            return func(*args, **kwargs)
        if name == "as_tensor":
            return args[0]
        if func is torch.Tensor.where:  # whose condition is its second argument, not its first
            args = (args[1], args[0], *args[2:])
        return self.stand_in(self._compute(name, args, kwargs))

    def _compute(self, name: str, args: Any, kwargs: Any) -> Any:
        if name in ("__getitem__", "getitem"):
            tensor, index = args
            if self._expression(tensor) is not None:
                raise TypeError("a traced score or position is one number, which cannot be indexed")
            index = index if isinstance(index, tuple) else (index,)
            return self._tensor(tensor)[tuple([self.value(i) for i in index])]
        values = [self.value(arg) for arg in args]
        options = {key: self.value(arg) for key, arg in kwargs.items()}
        if name.endswith("_") and not name.startswith("_"):
            name = name[:-1]  # an in-place operation; nothing else refers to the symbol
        if name in _OPERATORS:
            return _OPERATORS[name](*values, **options)
        if name != "where" and hasattr(Expr, name):
            return getattr(Expr, name)(*values, **options)
        return Expr.__torch_function__(_Named(name), (), tuple(values), options)


# Set by `_look` and read by `_seen`, which run while Dynamo traces: a graph node's target and its symbol's index.
_SEEN = threading.local()


def _mark(context: Any) -> None:
    """Stores the local `place` in the graph node of the local `tensor`, a new symbol."""
    node = context.get_local("tensor").as_proxy().node
    node.meta["tileattn_place"] = context.get_local("place").as_python_constant()


def _look(context: Any) -> None:
    """Looks up in the graph how the local `tensor` is computed."""
    node = context.get_local("tensor").as_proxy().node
    of = node.args[0] if len(node.args) == 1 else None
    _SEEN.value = getattr(node.target, "__name__", str(node.target)), getattr(of, "meta", {}).get("tileattn_place")


def _seen() -> tuple[str, int | None]:
    return getattr(_SEEN, "value", ("an operation", None))


_seen._dynamo_marked_constant = True  # type: ignore[attr-defined]  # runs while Dynamo traces


class _Named:
    """Stands for a torch function of which only the name is needed."""

    def __init__(self, name: str) -> None:
        self.__name__ = name


# torch's names of Python's operators, except names that are methods of Expr (`__rsub__`).
_OPERATORS: dict[str, Callable[..., Any]] = {
    **OPERATORS,
    "true_divide": operator.truediv,
    "truediv": operator.truediv,
    "__div__": operator.truediv,
    "__rdiv__": lambda x, y: y / x,
    "floor_divide": operator.floordiv,
    "remainder": operator.mod,
    "pow": operator.pow,
    "neg": Expr.__neg__,
    "pos": lambda x: x,
    "bitwise_and": operator.and_,
    "bitwise_or": operator.or_,
    "bitwise_not": Expr.__invert__,
    "invert": Expr.__invert__,
    "__iadd__": operator.add,
    "__isub__": operator.sub,
    "__imul__": operator.mul,
    "__idiv__": operator.truediv,
    "__itruediv__": operator.truediv,
    "__iand__": operator.and_,
    "__ior__": operator.or_,
}
