"""Numbers as callers of existing code have them: Python's, numpy's, or in a tensor."""

from __future__ import annotations

import operator
from numbers import Real
from typing import Any

import torch


def as_int(x: Any) -> Any:
    """An int of numpy's integers and of 0-dim integer tensors on the host; all else as it is, for checks to name.

    A bool is no number; a tensor on a GPU is not read, for its value would have to be waited for.
    """
    if isinstance(x, (int, torch.SymInt)):
        return x
    if isinstance(x, torch.Tensor):
        is_int = not (x.dtype.is_floating_point or x.dtype.is_complex or x.dtype == torch.bool)
        return int(x) if is_int and x.ndim == 0 and x.device.type == "cpu" else x
    try:
        return operator.index(x)
    except TypeError:
        return x


def as_float(name: str, x: Any, accepted: str = "a finite number or None") -> Any:
    """A float of Python's numbers, of numpy's, and of 0-dim tensors on the host without a gradient.

    A bool is no number. A tensor on a GPU is refused, for its value would have to be waited for; one with a gradient,
    for it would be lost.

    Raises:
        TypeError: x is none of these.
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
    """True or False, also of numpy: any other string than "" would silently mean True.

    Raises:
        TypeError: x is something else.
    """
    if isinstance(x, (bool, torch.SymBool)):
        return x
    if type(x).__module__ == "numpy" and type(x).__name__ in ("bool", "bool_"):
        return bool(x)
    raise TypeError(f"{name} must be True or False, got {x!r}")
