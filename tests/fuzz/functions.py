"""Masks and score functions as users write them, for tileattn to trace. :mod:`fuzz.variants` defines them again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tileattn import math

Function = Callable[..., Any]


def mask(name: str, n: int, table: Any) -> Function:
    """A mask function of this name with the number n."""
    if name == "stripes":
        return lambda b, h, q, k: (q - k) % n == 0
    if name == "first_head":
        return lambda b, h, q, k: (h == 0) | (math.abs(q - k) < n)
    if name == "blocks":
        return lambda b, h, q, k: q // n == k // n
    assert name == "table"
    return lambda b, h, q, k: table[h, k]


def score(name: str, x: Any) -> Function:
    """A score function of this name; x is the tensor that it captures, if it does."""
    return {
        "slopes": lambda s, b, h, q, k: s + x[h] * (k - q),
        "keybias": lambda s, b, h, q, k: s + x[b, k],
        "gate": lambda s, b, h, q, k: s * x[h],
        "temperature": lambda s, b, h, q, k: s * x,
        "relative": lambda s, b, h, q, k: s - 0.125 * (q - k),
        "squash": lambda s, b, h, q, k: 3 * torch.tanh(s * 0.5) + s / 4,
        "hidden": lambda s, b, h, q, k: torch.where((q + 2 * k) % 3 == 1, -float("inf"), s),
        "decay": lambda s, b, h, q, k: s + 2 * math.exp2(-0.25 * math.abs(q - k)),
        "odd_heads": lambda s, b, h, q, k: math.where((h + b) % 2 == 1, 0.5 * s, s),
    }[name]
