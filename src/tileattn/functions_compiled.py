"""A user's function under torch.compile: Dynamo traces it on tensors that stand for positions and scores.

Each symbol is a tensor without dimensions on the device "meta". A torch function mode sees every operation on them,
computes the expression in its place, and returns another such tensor. Dynamo traces the mode as well, so that nothing of
all this is left in the graph but unused tensors. Dynamo knows all operations between tensors, numbers of changing
value (SymInt, SymFloat) and captured tensors; of other objects, as :class:`tileattn.expr.Expr` is, it does not compare
those with a SymInt.

An operation that Dynamo hides from the mode returns a tensor on "meta" that has no expression, which is an error.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from .expr import Expr, TensorSymbol, symbol

_DTYPES = {"float": torch.float32, "int": torch.int64, "bool": torch.bool}


def run(fn: Callable[..., Any], arguments: tuple[str, ...]) -> Any:
    """What `fn` computes of the symbols called `arguments`: an expression or a number."""
    tracing = _Tracing()
    symbols = [tracing.stand_in(symbol(name)) for name in arguments]
    with tracing:
        result = fn(*symbols)
    return tracing.value(result)


class _Tracing(TorchFunctionMode):
    """Computes expressions where torch would compute tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.symbols: list[tuple[torch.Tensor, Expr]] = []
        self.captured: list[TensorSymbol] = []

    def stand_in(self, value: Any) -> Any:
        """The tensor that stands for an expression; a number as it is."""
        if not isinstance(value, Expr):
            return value
        tensor = torch.empty((), dtype=_DTYPES[value.dtype], device="meta")
        self.symbols.append((tensor, value))
        return tensor

    def value(self, value: Any) -> Any:
        """The inverse of :meth:`stand_in`, in which other tensors and numbers of changing value are operands."""
        if isinstance(value, torch.Tensor):
            known = self._expression(value)
            return self._tensor(value).whole() if known is None else known
        return _number(value)

    def _expression(self, tensor: Any) -> Expr | None:
        for known, expr in self.symbols:
            if known is tensor:
                return expr
        return None

    def _tensor(self, tensor: torch.Tensor) -> TensorSymbol:
        if tensor.is_meta:
            raise TypeError(
                "torch.compile cannot trace an operation of this mask or score modification (such as Python's abs() of "
                "a score or position): use operators, torch's functions and those of tileattn.math, such as "
                "tileattn.math.abs"
            )
        for known in self.captured:
            if known.tensor is tensor:
                return known
        ones = tuple([size == 1 for size in tensor.shape])
        self.captured.append(TensorSymbol(f"t{len(self.captured)}", tensor.dtype, ones, tensor=tensor))
        return self.captured[-1]

    def _is_symbol(self, value: Any) -> bool:
        if isinstance(value, (tuple, list)):
            return any([self._is_symbol(item) for item in value])
        return isinstance(value, torch.Tensor) and (value.is_meta or self._expression(value) is not None)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = f"{func.__name__}"  # a string; Dynamo takes func.__name__ itself for something unknown
        if name in ("as_tensor", "asarray") and isinstance(args[0], (bool, int, float)):
            return args[0]  # a number will do, and does not lie on a device
        if name == "__get__" or not self._is_symbol([*args, *kwargs.values()]):
            return func(*args, **kwargs)
        if name == "as_tensor":
            return args[0]
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
            name = name[:-1]  # in place of a symbol, which is nobody else's
        if name in _OPERATORS:
            return _OPERATORS[name](*values, **options)
        if hasattr(Expr, name):
            return getattr(Expr, name)(*values, **options)
        return Expr.__torch_function__(_Named(name), (), tuple(values), options)


class _Named:
    """A function of torch, of which no more is asked than its name."""

    def __init__(self, name: str) -> None:
        self.__name__ = name


def _number(value: Any) -> Any:
    """A number whose value Dynamo does not guard becomes an operand."""
    from torch.fx.experimental.symbolic_shapes import has_static_value

    if isinstance(value, (bool, Expr)) or not isinstance(value, (int, float)) or has_static_value(value):
        return value
    return Expr("number", (value,), "float" if isinstance(value, float) else "int")


# What torch calls Python's operators. Those whose name Expr has (`__rsub__`) are not listed.
_OPERATORS: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "true_divide": operator.truediv,
    "truediv": operator.truediv,
    "__div__": operator.truediv,
    "__rdiv__": lambda x, y: y / x,
    "floor_divide": operator.floordiv,
    "floordiv": operator.floordiv,
    "remainder": operator.mod,
    "mod": operator.mod,
    "pow": operator.pow,
    "neg": operator.neg,
    "pos": lambda x: x,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "eq": operator.eq,
    "ne": operator.ne,
    "and": operator.and_,
    "or": operator.or_,
    "bitwise_and": operator.and_,
    "bitwise_or": operator.or_,
    "bitwise_not": operator.invert,
    "invert": operator.invert,
    "__iadd__": operator.add,
    "__isub__": operator.sub,
    "__imul__": operator.mul,
    "__idiv__": operator.truediv,
    "__itruediv__": operator.truediv,
    "__iand__": operator.and_,
    "__ior__": operator.or_,
}
