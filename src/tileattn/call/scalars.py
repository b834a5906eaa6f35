"""Conversion of numeric arguments: Python numbers, numpy numbers and 0-dim CPU tensors."""

from __future__ import annotations

import operator
from numbers import Real
from typing import Any

import torch


def as_int(x: Any) -> Any:
    """Converts numpy integers and 0-dim integer tensors on the CPU to an int.

    Any other value is returned unchanged, and later checks refuse it by name. A tensor on a GPU is not read, because
    that would synchronise.
    """
    if x is None or isinstance(x, (int, torch.SymInt)):  # torch.compile of 2.11 cannot trace operator.index(None)
        return x
    if isinstance(x, torch.Tensor):
        is_int = not (x.dtype.is_floating_point or x.dtype.is_complex or x.dtype == torch.bool)
        return int(x) if is_int and x.ndim == 0 and x.device.type == "cpu" else x
    try:
        return operator.index(x)
    except TypeError:
        return x


def as_float(name: str, x: Any, accepted: str = "a finite number or None") -> Any:
    """Converts Python numbers, numpy numbers and 0-dim CPU tensors without a gradient to a float.

    A bool is refused. A tensor on a GPU is refused, because reading it would synchronise. A tensor with a gradient is
    refused, because the gradient would be lost.

    Raises:
        TypeError: x is none of the accepted kinds.
        ValueError: x is an int beyond the range of floats.
    """
    if isinstance(x, (float, torch.SymInt, torch.SymFloat)):
        return x
    if isinstance(x, torch.Tensor):
        is_real = x.dtype.is_floating_point or (x.dtype != torch.bool and not x.dtype.is_complex)
        if is_real and x.ndim == 0 and x.device.type == "cpu" and not x.requires_grad:
            return float(x)
        given = f"a tensor of shape {tuple(x.shape)} in {x.dtype} on {x.device}" + " with a gradient" * x.requires_grad
        raise TypeError(f"{name} must be {accepted}, or a 0-dim tensor on the CPU without a gradient, got {given}")
    if isinstance(x, bool) or not isinstance(x, Real):
        raise TypeError(f"{name} must be {accepted}, got {x!r}")
    try:
        return float(x)
    except OverflowError:
        raise ValueError(f"{name} must be {accepted}, got a number that is beyond the range of floats") from None


def as_flag(name: str, x: Any) -> Any:
    """Converts Python and numpy bools to a bool. Other values are refused: any non-empty string would count as True.

    Raises:
        TypeError: x is not a bool.
    """
    if isinstance(x, (bool, torch.SymBool)):
        return x
    if type(x).__module__ == "numpy" and type(x).__name__ in ("bool", "bool_"):
        return bool(x)
    raise TypeError(f"{name} must be True or False, got {x!r}")
