"""A variant on the values of its operands, as PyTorch operations compute it (the torch backend, the reference).

What users write runs by its traced expression, so that it computes what kernels compute: floats in float32 at least,
whatever the dtype of tensors and of ``torch.get_default_dtype()``. The masks of the package, which compute with
integers, and its modifications, which backends know, stay the instances that they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .mask_bounds import Range
from .masks import And, Causal, Documents, KeyPadding, Mask, Or, PrefixLM, SlidingWindow
from .reading import evaluate
from .scores import ALiBi, Bias, PackedBias, SoftCap

if TYPE_CHECKING:
    from ..call.inputs import Operands
    from .program import Program

_OF_INTEGERS = (Causal, Documents, KeyPadding, PrefixLM, SlidingWindow)
_KNOWN = (ALiBi, Bias, PackedBias, SoftCap)


def values_of(operands: Operands) -> dict[str, Any]:
    """The operands by the names that expressions have for them."""
    kinds = (("t", operands.tensors), ("i", operands.ints), ("f", operands.floats))
    return {f"{kind}{index}": value for kind, values in kinds for index, value in enumerate(values)}


def evaluated_mask(mask: Mask | None, program: Program, values: dict[str, Any], dtype: torch.dtype) -> Mask | None:
    """The mask, of which floats are computed in `dtype`."""
    return mask if mask is None or _is_of_integers(mask) else EvaluatedMask(program, values, dtype)


def evaluated_mods(
    mods: Sequence[Callable[..., Any]], exprs: Sequence[Any], values: dict[str, Any], dtype: torch.dtype
) -> list[Callable[..., Any]]:
    """The modifications, whose expressions `exprs` are; floats are computed in `dtype` at least."""
    return [
        mod if type(mod) in _KNOWN else functools.partial(call, expr, values, dtype) for mod, expr in zip(mods, exprs)
    ]


def call(expr: Any, values: dict[str, Any], dtype: torch.dtype, *arguments: Any) -> Any:
    """Runs a traced function: ``(b, h, q, k)`` of a mask, or ``(score, b, h, q, k)`` of a modification."""
    names = ("b", "h", "q", "k") if len(arguments) == 4 else ("score", "b", "h", "q", "k")
    return evaluate(expr, {**values, **dict(zip(names, arguments))}, dtype)


def _is_of_integers(mask: Mask) -> bool:
    if type(mask) in (And, Or):
        return _is_of_integers(mask.x) and _is_of_integers(mask.y)  # type: ignore[attr-defined]
    return type(mask) in _OF_INTEGERS


class EvaluatedMask(Mask):
    """A mask by its program."""

    def __init__(self, program: Program, values: dict[str, Any], dtype: torch.dtype) -> None:
        self.program, self.values, self.dtype = program, values, dtype

    def _of(self, expr: Any, **symbols: Any) -> Any:
        return evaluate(expr, {**self.values, **symbols}, self.dtype)

    def allows(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return self._of(self.program.allows, b=b, h=h, q=q, k=k)

    def kv_range(self, b: Any, h: Any, q_lo: Any, q_hi: Any, seqlen_k: Any) -> Range:
        return self._range(self.program.kv_range, b=b, h=h, q_lo=q_lo, q_hi=q_hi, seqlen_k=seqlen_k)

    def full_range(self, b: Any, h: Any, q_lo: Any, q_hi: Any, seqlen_k: Any) -> Range:
        return self._range(self.program.full_range, b=b, h=h, q_lo=q_lo, q_hi=q_hi, seqlen_k=seqlen_k)

    def q_range(self, b: Any, h: Any, k_lo: Any, k_hi: Any, seqlen_k: Any) -> Range:
        return self._range(self.program.q_range, b=b, h=h, k_lo=k_lo, k_hi=k_hi, seqlen_k=seqlen_k)

    def full_q_range(self, b: Any, h: Any, k_lo: Any, k_hi: Any, seqlen_k: Any) -> Range:
        return self._range(self.program.full_q_range, b=b, h=h, k_lo=k_lo, k_hi=k_hi, seqlen_k=seqlen_k)

    def _range(self, bounds: tuple[Any, Any], **symbols: Any) -> Range:
        return self._of(bounds[0], **symbols), self._of(bounds[1], **symbols)
