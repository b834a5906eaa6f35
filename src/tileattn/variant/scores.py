"""Score modifications: functions of one attention score, applied before the softmax.

A modification is a function ``score_mod(score, b, h, q, k) -> score``. Its first argument is the scaled score
``scale * <q, k>`` at batch ``b``, query head ``h``, query position ``q`` and key position ``k`` (positions as in
:mod:`tileattn.masks`). A modification is either a user's plain function or an instance of a frozen dataclass such as
those below, which carries numbers and tensors as run-time values. Several modifications are applied in the order
given: ``score_mod=[ALiBi(slopes), SoftCap(30.0)]``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..call.scalars import as_float
from .math import abs, load, tanh

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class ScoreMod:
    """Base class of the score modifications that carry numbers or tensors.

    A new one is a frozen dataclass that subclasses ScoreMod.
    """

    def __call__(self, score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        """The new score. Broadcasts over torch tensors."""
        raise NotImplementedError

    def check(self, batch: int, heads: int, seqlen_q: int, seqlen_k: int) -> None:
        """Raises ValueError if a tensor of the modification does not fit the call."""


@dataclass(frozen=True, eq=False)
class SoftCap(ScoreMod):
    """``cap * tanh(score / cap)``: keeps scores within ``-cap .. cap`` (Gemma 2).

    Args:
        cap: a positive finite number.
    """

    cap: float

    def __post_init__(self) -> None:
        cap: Any = self.cap
        cap = as_float("SoftCap: cap", cap, "a positive finite number")
        if not 0 < cap < float("inf"):
            raise ValueError(f"SoftCap: cap must be a positive finite number, got {cap}")
        object.__setattr__(self, "cap", cap)

    def __call__(self, score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return self.cap * tanh(score / self.cap)


@dataclass(frozen=True, eq=False)
class ALiBi(ScoreMod):
    """Attention with linear biases: adds ``-slope[h] * |q - k|`` (Press et al. 2021, arXiv 2108.12409).

    Args:
        slopes: float tensor (heads,) or (batch, heads), on the queries' device.
    """

    slopes: torch.Tensor

    def __call__(self, score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        slope = load(self.slopes, h) if self.slopes.ndim == 1 else load(self.slopes, b, h)
        if isinstance(score, torch.Tensor):
            slope = slope.to(torch.promote_types(slope.dtype, score.dtype))  # float64 for scores in float64
        return score - slope * abs(q - k)

    def check(self, batch: int, heads: int, seqlen_q: int, seqlen_k: int) -> None:
        _check_float("ALiBi: slopes", self.slopes)
        if tuple(self.slopes.shape) not in ((heads,), (batch, heads), (1, heads)):
            raise ValueError(
                f"ALiBi: slopes must have shape (heads,) = ({heads},) or (batch, heads) = ({batch}, {heads}), "
                f"got {tuple(self.slopes.shape)}"
            )


@dataclass(frozen=True, eq=False)
class Bias(ScoreMod):
    """Adds ``tensor[b, h, row, k]``, where ``row`` is the query's row (not its position).

    Args:
        tensor: float tensor (batch or 1, heads or 1, seqlen_q or 1, seqlen_k), any strides, on the queries' device.
            Fastest on sm_90a if its rows begin at multiples of 16 bytes. For an odd number of keys, pad the rows in
            memory and pass a slice.
    """

    tensor: torch.Tensor

    def __call__(self, score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        rows, keys = self.tensor.shape[2], self.tensor.shape[3]
        return score + load(self.tensor, b, h, q - (keys - rows), k)

    def check(self, batch: int, heads: int, seqlen_q: int, seqlen_k: int) -> None:
        _check_float("Bias: tensor", self.tensor)
        expected = (batch, heads, seqlen_q, seqlen_k)
        shape = tuple(self.tensor.shape)
        fits = len(shape) == 4 and all(size in (1, full) for size, full in zip(shape[:3], expected))
        if not fits or shape[3] != seqlen_k:
            raise ValueError(
                f"Bias: tensor must have shape (batch or 1, heads or 1, seqlen_q or 1, seqlen_k) with "
                f"(batch, heads, seqlen_q, seqlen_k) = {expected}, got {shape}"
            )


@dataclass(frozen=True, eq=False)
class PackedBias(ScoreMod):
    """A `Bias` on packed sequences, where the row of a position depends on the lengths of its sequence.

    Args:
        tensor: float tensor (sequences or 1, heads or 1, max_seqlen_q or 1, max_seqlen_k), or larger.
        first: int32 tensor (sequences,), the position of each sequence's first query.
    """

    tensor: torch.Tensor
    first: torch.Tensor

    def __call__(self, score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score + load(self.tensor, b, h, q - load(self.first, b), k)

    def check(self, batch: int, heads: int, seqlen_q: int, seqlen_k: int) -> None:
        _check_float("Bias: tensor", self.tensor)
        expected = (batch, heads, seqlen_q, seqlen_k)
        shape = tuple(self.tensor.shape)
        fits = len(shape) == 4 and shape[0] in (1, batch) and shape[1] in (1, heads)
        if not fits or not (shape[2] == 1 or shape[2] >= seqlen_q) or shape[3] < seqlen_k:
            raise ValueError(
                f"Bias: tensor must have shape (sequences or 1, heads or 1, max_seqlen_q or 1, max_seqlen_k), or more "
                f"rows and keys, with (sequences, heads, max_seqlen_q, max_seqlen_k) = {expected}, got {shape}"
            )

    def part(self, sequence: int, seqlen_q: int, seqlen_k: int) -> tuple[slice, ...]:
        """The slices of the tensor that hold one sequence's bias (1, heads or 1, seqlen_q or 1, seqlen_k)."""
        batch = 0 if self.tensor.shape[0] == 1 else sequence
        rows = 1 if self.tensor.shape[2] == 1 else seqlen_q
        return slice(batch, batch + 1), slice(None), slice(0, rows), slice(0, seqlen_k)


def for_packed(
    mods: Sequence[Callable[..., Any]], cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor
) -> tuple[Callable[..., Any], ...]:
    """The modifications for a packed call: each Bias becomes a PackedBias. Does not wait for the device."""
    return with_first(mods, lambda: cu_seqlens_k.diff() - cu_seqlens_q.diff())


def with_first(mods: Sequence[Callable[..., Any]], first: Callable[[], torch.Tensor]) -> tuple[Callable[..., Any], ...]:
    """The modifications for sequences whose first queries are at the positions `first()`: as :func:`for_packed`."""
    if not any(type(mod) is Bias for mod in mods):
        return tuple(mods)
    positions = first()
    return tuple(PackedBias(mod.tensor, positions) if type(mod) is Bias else mod for mod in mods)


def _check_float(name: str, tensor: Any) -> None:
    if not isinstance(tensor, torch.Tensor) or tensor.dtype not in _FLOATS:
        given = tensor.dtype if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise TypeError(f"{name} must be a floating-point tensor, got {given}; of 16 bits or more")
