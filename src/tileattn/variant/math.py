"""Functions for masks and score modifications, in addition to Python's operators.

Each function accepts torch tensors, plain numbers and the traced values of :mod:`tileattn.variant.expression`, so one
Python function serves the CPU, the reference and the kernels. Functions of torch, as FlexAttention uses them
(``torch.where``, ``torch.tanh``, ...), and methods of tensors (``score.clamp(max=30.0)``) can be traced as well. The
functions here also accept plain numbers. Floats are computed in float32 or wider.
"""

from __future__ import annotations

from typing import Any

import torch

from . import torch_functions as _functions
from .expression import Expr, TensorSymbol, apply
from .reading import element, on_tensors, widened

__all__ = [
    "abs",
    "clamp",
    "cos",
    "exp",
    "exp2",
    "load",
    "log",
    "log2",
    "maximum",
    "minimum",
    "relu",
    "sigmoid",
    "silu",
    "sin",
    "softplus",
    "sqrt",
    "square",
    "tanh",
    "where",
]


def _unary(op: str, x: Any) -> Any:
    return _on_tensors(op, x) if isinstance(x, torch.Tensor) else apply(op, x)


def tanh(x: Any) -> Any:
    """Hyperbolic tangent."""
    return _unary("tanh", x)


def sigmoid(x: Any) -> Any:
    """``1 / (1 + exp(-x))``, without overflow."""
    return _unary("sigmoid", x)


def softplus(x: Any) -> Any:
    """``log(1 + exp(x))``, without overflow."""
    return torch.nn.functional.softplus(x) if isinstance(x, torch.Tensor) else _functions.softplus(x)


def silu(x: Any) -> Any:
    """``x * sigmoid(x)``."""
    return torch.nn.functional.silu(x) if isinstance(x, torch.Tensor) else _functions.silu(x)


def relu(x: Any) -> Any:
    """The value x where it is positive, 0 elsewhere."""
    return torch.relu(x) if isinstance(x, torch.Tensor) else _functions.relu(x)


def square(x: Any) -> Any:
    """``x * x``."""
    return x * x


def clamp(x: Any, min: Any = None, max: Any = None) -> Any:
    """The value x limited to the range from min to max; None means no bound."""
    return torch.clamp(x, min, max) if isinstance(x, torch.Tensor) else _functions.clamp(x, min, max)


def exp(x: Any) -> Any:
    """The exponential ``e ** x``."""
    return _unary("exp", x)


def exp2(x: Any) -> Any:
    """The power ``2 ** x``."""
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
    return _extremum("min", x, y)


def maximum(x: Any, y: Any) -> Any:
    """The larger of x and y, elementwise."""
    return _extremum("max", x, y)


def _extremum(op: str, x: Any, y: Any) -> Any:
    tensors = isinstance(x, torch.Tensor) or isinstance(y, torch.Tensor)
    return _on_tensors(op, x, y) if tensors else apply(op, x, y)


def _on_tensors(op: str, *args: Any) -> Any:
    if torch.compiler.is_dynamo_compiling() and _traced(args):
        return getattr(torch, {"min": "minimum", "max": "maximum"}.get(op, op))(*args)
    return on_tensors(op, [*args], torch.float32)


def _traced(values: Any) -> bool:
    """Whether a value is a symbol of tracing/compiled.py. torch must see the operations on symbols unchanged."""
    return True in [isinstance(value, torch.Tensor) and value.is_meta for value in values]


def where(condition: Any, x: Any, y: Any) -> Any:
    """The value x where the condition holds, y elsewhere. Both are evaluated everywhere."""
    if isinstance(condition, torch.Tensor):
        return _on_tensors("where", condition, x, y)
    if isinstance(condition, Expr):
        return apply("where", condition, x, y)
    return x if condition else y


def load(tensor: Any, *index: Any) -> Any:
    """The element ``tensor[index]``, with one index for each dimension. A dimension of size 1 is broadcast.

    An index out of range, negative indices included, is not an error: the result is some element of the tensor or
    zero, depending on the backend. This allows such an index at positions that a mask hides, where the result is not
    used.
    """
    if isinstance(tensor, (TensorSymbol, Expr)):  # an Expr stands for a 0-dim tensor
        return tensor[index]
    if torch.compiler.is_dynamo_compiling() and not tensor.is_meta and _traced(index):
        return tensor[index]
    value = element(tensor, [0 if size == 1 else i for i, size in zip(index, tensor.shape)])
    return widened(value, torch.float32)
