"""Parsing of expressions from their text, and their evaluation on tensors.

Evaluation has the same precision as kernels: floats are float32 or wider (float64 in a float64 call), whatever the
dtype of the tensors that are read and whatever ``torch.set_default_dtype`` says. Integers are int64.

    >>> evaluate(parse("(mul 0.5 k)", {}), {"k": torch.arange(3)})
    tensor([0.0000, 0.5000, 1.0000])
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .expression import Expr, Operand, TensorSymbol, apply, dtype_of, symbol
from .operations import FLOAT_OPS, OPERATORS, OPS

_TOKEN = re.compile(r"[()]|[^\s()]+")


def parse(text: str, tensors: dict[str, TensorSymbol]) -> Any:
    """Parses the text that ``str(expr)`` returns. `tensors` maps tensor names (``t0``) to tensors.

    A subexpression that occurs several times in the text becomes one node.
    """
    tokens = _TOKEN.findall(text)
    value, rest = _parse(tokens, 0, tensors, {})
    if rest != len(tokens):
        raise ValueError(f"not an expression: {text!r}")
    return value


def _parse(tokens: list[str], at: int, tensors: dict[str, TensorSymbol], known: dict[Any, Any]) -> tuple[Any, int]:
    token = tokens[at]
    if token != "(":
        return _leaf(token), at + 1
    op, at = tokens[at + 1], at + 2
    if op in ("load", "size"):
        tensor, at = tensors[tokens[at]], at + 1
    args = []
    while tokens[at] != ")":
        arg, at = _parse(tokens, at, tensors, known)
        args.append(arg)
    if op not in OPS and op not in ("load", "size"):
        raise ValueError(f"no operation is called {op!r}")
    name = tensor.name if op in ("load", "size") else ""
    node = (op, name, *((type(arg), arg if isinstance(arg, float) else str(arg)) for arg in map(_named, args)))
    if node not in known:
        made = tensor[tuple(args)] if op == "load" else tensor.shape[args[0]] if op == "size" else apply(op, *args)
        known[node] = made
    return known[node], at + 1


def _named(arg: Any) -> Any:
    """The identity of an argument in a lookup: the id of a node; a symbol or number itself."""
    return id(arg) if isinstance(arg, Expr) and arg.op != "symbol" else arg


def _leaf(token: str) -> Operand:
    if token in ("true", "false"):
        return token == "true"
    if re.fullmatch(r"-?\d+", token):
        return int(token)
    try:
        return float(token)
    except ValueError:
        return symbol(token)


# --- Evaluation ---


def evaluate(expr: Any, values: dict[str, Any], dtype: torch.dtype = torch.float32) -> Any:
    """The value of an expression for given values of its symbols and tensors.

    Args:
        expr: an expression, or a number.
        values: torch tensors, numbers or expressions by the names of symbols and tensors. Names without a value stay
            symbolic.
        dtype: float32 or float64, the dtype in which floats are computed; wider floats stay wider.
    """
    return _evaluated(expr, values, dtype, {})


def _evaluated(expr: Any, values: dict[str, Any], dtype: torch.dtype, known: dict[int, Any]) -> Any:
    if not isinstance(expr, Expr):
        return expr
    if id(expr) not in known:
        known[id(expr)] = _value_of(expr, values, dtype, known)
    return known[id(expr)]


def _value_of(expr: Expr, values: dict[str, Any], dtype: torch.dtype, known: dict[int, Any]) -> Any:
    if expr.op == "symbol":
        return widened(values.get(expr.args[0], expr), dtype)
    if expr.op in ("load", "size"):
        tensor, index = values.get(expr.args[0]), [_evaluated(arg, values, dtype, known) for arg in expr.args[1:]]
        if tensor is None:
            return Expr(expr.op, (expr.args[0], *index), expr.dtype)
        return tensor.shape[index[0]] if expr.op == "size" else widened(element(tensor, index), dtype)
    args = [_evaluated(arg, values, dtype, known) for arg in expr.args]
    if not any(isinstance(arg, torch.Tensor) for arg in args):
        return apply(expr.op, *args)
    return on_tensors(expr.op, args, dtype)


def element(tensor: Any, index: Sequence[Any]) -> Any:
    """``tensor[index]``, or the nearest element if the index is out of range.

    A function is evaluated at all positions of a tile, including those that a mask hides. There the index of
    ``table[q - k]`` may be out of range.
    """
    return tensor[tuple(_within(i, size) for i, size in zip(index, tensor.shape))]


def _within(index: Any, size: int) -> Any:
    if isinstance(index, torch.Tensor):
        return index.clamp(0, max(size - 1, 0))
    return index if isinstance(index, Expr) else min(max(index, 0), max(size - 1, 0))


def widened(value: Any, dtype: torch.dtype) -> Any:
    """A tensor converted for computation: floats to `dtype` or wider, integers to int64. Others are unchanged."""
    if not isinstance(value, torch.Tensor) or value.dtype == torch.bool:
        return value
    return value.to(torch.promote_types(value.dtype, dtype) if value.dtype.is_floating_point else torch.int64)


def on_tensors(op: str, args: list[Any], dtype: torch.dtype) -> torch.Tensor:
    """One operation with at least one tensor argument. Tensors are as :func:`widened` returns them."""
    condition, numbers = (args[:1], args[1:]) if op == "where" else ([], args)
    kinds = {_kind(number) for number in numbers}
    if "float" in kinds or op in FLOAT_OPS:
        dtype = functools.reduce(
            torch.promote_types, (x.dtype for x in numbers if _kind(x) == "float" and _is(x)), dtype
        )
    else:
        dtype = torch.bool if kinds == {"bool"} and op not in _ARITHMETIC else torch.int64
    numbers = [_tensor_in(number, dtype) if _is(number) else _NUMBER[dtype](number) for number in numbers]
    if op in ("floordiv", "mod") and _is(numbers[1]) and dtype == torch.int64:
        # Avoids an error for integer division by 0: masked positions do not matter, and kernels raise none either.
        numbers[1] = numbers[1].masked_fill(numbers[1] == 0, 1)
    if op == "floordiv" and dtype.is_floating_point:
        return torch.floor(numbers[0] / numbers[1])  # torch's own has no derivative, not even 0
    if op in _PYTHON:
        return _PYTHON[op](*numbers)  # which take numbers beside tensors
    device = next(arg.device for arg in args if _is(arg))
    numbers = [_filled(number, dtype, device) for number in numbers]
    condition = [_filled(each, torch.bool, device) for each in condition]
    run: Callable[..., torch.Tensor] = _TORCH[op] if op in _TORCH else getattr(torch, op)
    return run(*condition, *numbers)


def _is(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "float" if value.dtype.is_floating_point else "bool" if value.dtype == torch.bool else "int"
    return dtype_of(value)


def _tensor_in(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Integers and conditions converted to `dtype`. Floats are unchanged; the operation promotes them."""
    return value if value.dtype.is_floating_point else value.to(dtype)


def _filled(value: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A number as a tensor, filled in on the device, because a copy from the host would synchronise."""
    return value if isinstance(value, torch.Tensor) else torch.full((), value, dtype=dtype, device=device)


_NUMBER: dict[torch.dtype, Callable[[Any], Any]] = {
    torch.bool: bool,
    torch.int64: int,
    torch.float32: float,
    torch.float64: float,
}

# Operations that treat conditions as integers: True is 1.
_ARITHMETIC = {"add", "sub", "mul", "floordiv", "mod", "min", "max", "abs", "int"}

_PYTHON: dict[str, Callable[..., Any]] = {**OPERATORS, "not": operator.invert}

_TORCH: dict[str, Callable[..., Any]] = {
    "min": torch.minimum,
    "max": torch.maximum,
    "float": lambda x: x,
    "int": lambda x: x.to(torch.int64),
}
