"""Promises about tensors that spare the compiler's guards."""

from __future__ import annotations

from typing import Any

import tilelang.language as T
from tilelang.language.eager.builder import Builder


def assume_filled(operands: dict[str, Any]) -> None:
    """Tells the compiler that a variant's tensors have elements, so that it need not ask before each load."""
    for operand in operands.values():
        for size in getattr(operand, "shape", ()):
            if not isinstance(size, int):
                Builder.current().eval(T.assume(size > 0))


def assume_aligned(*strides: Any, itemsize: int = 2) -> None:
    """Tells the compiler that rows begin at multiples of 16 bytes, so that it copies 16 bytes at a time.

    Emitted by hand: outside a macro ``T.assume`` only returns the expression.
    """
    for axes in strides:
        for stride in axes[:-1]:
            Builder.current().eval(T.assume(stride % (16 // itemsize) == 0))
