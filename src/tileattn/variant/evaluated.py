"""Variants evaluated with PyTorch operations, for the torch backend and the reference.

A user's mask or modification is evaluated by its traced expression. The result is therefore the same as in kernels:
floats are computed in float32 or wider, whatever the dtype of the tensors and ``torch.get_default_dtype()``. The
package's own masks compute with integers, and its modifications are known to backends, so both are used unchanged.
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
from .tree_mask import TreeMask

if TYPE_CHECKING:
    from ..call.inputs import Operands
    from .program import Program

_OF_INTEGERS = (Causal, Documents, KeyPadding, PrefixLM, SlidingWindow, TreeMask)
_KNOWN = (ALiBi, Bias, PackedBias, SoftCap)


def values_of(operands: Operands) -> dict[str, Any]:
    """The operands by their names in expressions (``t0``, ``i0``, ``f0``, ...)."""
    kinds = (("t", operands.tensors), ("i", operands.ints), ("f", operands.floats))
    return {f"{kind}{index}": value for kind, values in kinds for index, value in enumerate(values)}


def evaluated_mask(mask: Mask | None, program: Program, values: dict[str, Any], dtype: torch.dtype) -> Mask | None:
    """The mask, with floats computed in `dtype` or wider."""
    return mask if mask is None or _is_of_integers(mask) else EvaluatedMask(program, values, dtype)


def evaluated_mods(
    mods: Sequence[Callable[..., Any]], exprs: Sequence[Any], values: dict[str, Any], dtype: torch.dtype
) -> list[Callable[..., Any]]:
    """The modifications, which have the expressions `exprs`, with floats computed in `dtype` or wider."""
    return [
        mod if type(mod) in _KNOWN else functools.partial(call, expr, values, dtype) for mod, expr in zip(mods, exprs)
    ]


def call(expr: Any, values: dict[str, Any], dtype: torch.dtype, *arguments: Any) -> Any:
    """Evaluates a traced function on ``(b, h, q, k)`` for a mask, or ``(score, b, h, q, k)`` for a modification."""
    names = ("b", "h", "q", "k") if len(arguments) == 4 else ("score", "b", "h", "q", "k")
    return evaluate(expr, {**values, **dict(zip(names, arguments))}, dtype)


def _is_of_integers(mask: Mask) -> bool:
    if type(mask) in (And, Or):
        return _is_of_integers(mask.x) and _is_of_integers(mask.y)  # type: ignore[attr-defined]
    return type(mask) in _OF_INTEGERS


def knows_ranges(mask: Mask) -> bool:
    """Whether a mask is one of the package's masks of one range of keys, or several joined by `&`."""
    if type(mask) is And:
        return knows_ranges(mask.x) and knows_ranges(mask.y)
    return type(mask) in _OF_INTEGERS


class EvaluatedMask(Mask):
    """A mask that evaluates the expressions of a program."""

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
