"""What the methods of :class:`tileattn.PagedKVCache` accept as sequences and as sizes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..call.scalars import as_int

Sequences = int | Iterable[int] | Tensor


def rows_of(sequences: Sequences, seqlens: Tensor) -> Tensor:
    """Bool (batch,), as the lengths: which sequences are named. Raises TypeError or ValueError for what names none."""
    rows = torch.zeros_like(seqlens, dtype=torch.bool)
    if isinstance(sequences, Tensor):
        if sequences.dtype != torch.bool or sequences.shape != rows.shape or sequences.device != seqlens.device:
            raise ValueError(
                f"sequences must be numbers, or a bool tensor (batch,) = {tuple(rows.shape)} on {seqlens.device}, got "
                f"{sequences.dtype} of shape {tuple(sequences.shape)} on {sequences.device}"
            )
        return sequences
    for sequence in numbers_of(sequences):
        if not 0 <= sequence < rows.shape[0]:
            raise ValueError(f"sequences must lie in 0 .. {rows.shape[0] - 1}, got {sequence}")
        rows[sequence].fill_(True)
    return rows


def numbers_of(sequences: Any) -> tuple[int, ...]:
    """The numbers of sequences as ints. Raises TypeError for others; a list of bools would be 0 and 1."""
    given = tuple(sequences) if isinstance(sequences, Iterable) else (sequences,)
    numbers = tuple(map(as_int, given))
    for number in numbers:
        if not isinstance(number, int) or isinstance(number, bool):
            raise TypeError(f"sequences must be numbers, or a bool tensor (batch,), got {number!r}")
    return numbers


def as_size(name: str, value: Any, at_least: int = 1) -> int:
    """The value as an int. Raises TypeError or ValueError if it is none or less than `at_least`."""
    value = as_int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value < at_least:
        raise ValueError(f"{name} must be at least {at_least}, got {value}")
    return value
