"""Numbers as callers of existing code have them: Python's, numpy's, or in a tensor."""

from __future__ import annotations

import operator
from numbers import Real
from typing import Any

import torch


def as_int(x: Any) -> Any:
    """An int of what is one, such as numpy's integers; all else as it is, for the checks to name, tensors included."""
    if isinstance(x, (int, torch.SymInt, torch.Tensor)):
        return x
    try:
        return operator.index(x)
    except TypeError:
        return x


def as_float(name: str, x: Any, accepted: str = "a finite number or None") -> Any:
    """A float of numpy's numbers and of 0-dim tensors on the host without a gradient; Python's numbers as they are.

    A tensor on a GPU is refused, for its value would have to be waited for; one with a gradient, for it would be lost.

    Raises:
        TypeError: x is none of these.
    """
    is_bool = isinstance(x, bool)
    if isinstance(x, (int, float, torch.SymInt, torch.SymFloat)) and not is_bool:
        return x
    if isinstance(x, torch.Tensor):
        is_real = x.dtype.is_floating_point or (x.dtype != torch.bool and not x.dtype.is_complex)
        if is_real and x.ndim == 0 and x.device.type == "cpu" and not x.requires_grad:
            return float(x)
        given = f"a tensor of shape {tuple(x.shape)} in {x.dtype} on {x.device}" + " with a gradient" * x.requires_grad
        raise TypeError(f"{name} must be {accepted}, or a 0-dim tensor on the CPU without a gradient, got {given}")
    if isinstance(x, Real) and not is_bool:
        return float(x)
    raise TypeError(f"{name} must be {accepted}, got {x!r}")
