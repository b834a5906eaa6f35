"""Functions for masks and score modifications, beside Python's operators.

Each works on torch tensors, on plain numbers and on the traced values of :mod:`tileattn.expr`, so that one Python
function serves the CPU, the reference and the kernels. FlexAttention's ``torch.where``, ``torch.tanh``, ... are traced
as well; these functions are for code that also runs on plain numbers.
"""

from __future__ import annotations

from typing import Any

import torch

from .expr import Expr, TensorSymbol, apply, element

__all__ = [
    "abs",
    "cos",
    "exp",
    "exp2",
    "load",
    "log",
    "log2",
    "maximum",
    "minimum",
    "sin",
    "sqrt",
    "tanh",
    "where",
]


def _unary(op: str, x: Any) -> Any:
    return getattr(torch, op)(x) if isinstance(x, torch.Tensor) else apply(op, x)


def tanh(x: Any) -> Any:
    """Hyperbolic tangent."""
    return _unary("tanh", x)


def exp(x: Any) -> Any:
    """E to the power x."""
    return _unary("exp", x)


def exp2(x: Any) -> Any:
    """2 to the power x."""
    return _unary("exp2", x)


def log(x: Any) -> Any:
    """Natural logarithm; -inf at 0."""
    return _unary("log", x)


def log2(x: Any) -> Any:
    """Logarithm to base 2; -inf at 0."""
    return _unary("log2", x)


def sqrt(x: Any) -> Any:
    """Square root."""
    return _unary("sqrt", x)


def sin(x: Any) -> Any:
    """Sine of x radians."""
    return _unary("sin", x)


def cos(x: Any) -> Any:
    """Cosine of x radians."""
    return _unary("cos", x)


def abs(x: Any) -> Any:
    """Absolute value."""
    return _unary("abs", x)


def minimum(x: Any, y: Any) -> Any:
    """The smaller of x and y, elementwise."""
    return _extremum("min", torch.minimum, x, y)


def maximum(x: Any, y: Any) -> Any:
    """The larger of x and y, elementwise."""
    return _extremum("max", torch.maximum, x, y)


def _extremum(op: str, on_tensors: Any, x: Any, y: Any) -> Any:
    tensor = x if isinstance(x, torch.Tensor) else y
    if not isinstance(tensor, torch.Tensor):
        return apply(op, x, y)
    if torch.compiler.is_dynamo_compiling() and tensor.is_meta:  # a symbol of functions_compiled.py
        return on_tensors(x, y)
    return on_tensors(torch.as_tensor(x, device=tensor.device), torch.as_tensor(y, device=tensor.device))


def where(condition: Any, x: Any, y: Any) -> Any:
    """X where the condition holds, y elsewhere; both are evaluated everywhere."""
    if isinstance(condition, torch.Tensor):
        return torch.where(condition, x, y)
    if isinstance(condition, Expr):
        return apply("where", condition, x, y)
    return x if condition else y


def load(tensor: Any, *index: Any) -> Any:
    """The element ``tensor[index]``, one position for each dimension; a dimension of size 1 is broadcast.

    An index beyond the tensor, negative ones among them, reads something of the tensor or zero, which of these depends
    on the backend: it is for positions that a mask hides, where it makes no difference.
    """
    if isinstance(tensor, TensorSymbol) or (torch.compiler.is_dynamo_compiling() and _traced(tensor, index)):
        return tensor[index]
    return element(tensor, [0 if size == 1 else i for i, size in zip(index, tensor.shape)])


def _traced(tensor: torch.Tensor, index: Any) -> bool:
    """Whether positions are the symbols of :mod:`tileattn.functions_compiled`."""
    return not tensor.is_meta and any([isinstance(i, torch.Tensor) and i.is_meta for i in index])
