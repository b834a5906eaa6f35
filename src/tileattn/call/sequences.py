"""The sequences of a packed call: the checks of `cu_seqlens`, and its values on the host.

:func:`check_metadata` checks what the host knows without a synchronisation; it runs for every packed call.
:func:`sequences` reads and checks the values; the torch backend uses it. GPU kernels clamp wrong values instead, and
report them afterwards (:mod:`tileattn.call.packed_status`).
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch

from .facts import Packed
from .validation import check_int32


def check_metadata(packed: Packed, device: torch.device) -> None:
    """Raises TypeError or ValueError if `cu_seqlens` or `max_seqlen` have a wrong type, dtype, shape or device.

    `device` is that of q. The values of `cu_seqlens` are not read.
    """
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        check_cu_seqlens(name, getattr(packed, name), device)
    of_q, of_k = packed.cu_seqlens_q.shape[0], packed.cu_seqlens_k.shape[0]
    if of_q != of_k:
        raise ValueError(
            f"cu_seqlens_q and cu_seqlens_k must be of one number of sequences, got {of_q - 1} and {of_k - 1} "
            f"(shapes ({of_q},) and ({of_k},))"
        )
    for name in ("max_seqlen_q", "max_seqlen_k"):
        check_max_seqlen(name, getattr(packed, name))


def check_cu_seqlens(name: str, x: Any, device: torch.device) -> None:
    """Raises TypeError or ValueError unless x is int32 (sequences + 1,), contiguous, on the device."""
    check_int32(name, x, {"sequences + 1": None}, device)
    if x.shape[0] == 0:
        raise ValueError(f"{name} must have shape (sequences + 1,), got (0,)")


def check_max_seqlen(name: str, size: Any) -> None:
    """Raises TypeError or ValueError unless the size is an int of at least 0."""
    if not isinstance(size, (int, torch.SymInt)) or isinstance(size, bool):
        raise TypeError(f"{name} must be an int that the host knows, got {type(size).__name__} {size!r}")
    if size < 0:
        raise ValueError(f"{name} must be at least 0, got {size}")


class SequenceSlices(NamedTuple):
    """The slices of one sequence of a packed call in its tensors."""

    number: int
    rows: slice
    """The sequence's rows of q."""
    keys: slice
    """The sequence's rows of k and v."""


def sequences(packed: Packed, total_q: int, total_k: int) -> list[SequenceSlices]:
    """The sequences of a packed call, in order. Waits for the device.

    Raises:
        ValueError: `cu_seqlens` does not start at 0, decreases, or goes beyond the tensors; or a length is larger than
            `max_seqlen`.
    """
    of_q = spans_of("q", packed.cu_seqlens_q.tolist(), packed.max_seqlen_q, total_q)
    of_k = spans_of("k", packed.cu_seqlens_k.tolist(), packed.max_seqlen_k, total_k)
    return [SequenceSlices(number, *spans) for number, spans in enumerate(zip(of_q, of_k, strict=True))]


def spans_of(which: str, ends: list[int], max_seqlen: int, total: int) -> list[slice]:
    """The rows of each sequence, of the values of `cu_seqlens` on the host. Raises as :func:`sequences`."""
    name = f"cu_seqlens_{which}"
    if ends[0] != 0:
        raise ValueError(f"{name} must start at 0, got {ends[0]}")
    spans = [slice(start, end) for start, end in pairwise(ends)]
    lengths = [end - start for start, end in pairwise(ends)]
    for number, length in enumerate(lengths):
        if length < 0:
            raise ValueError(
                f"{name} must not decrease, got {ends[number + 1]} after {ends[number]} (sequence {number})"
            )
    if ends[-1] > total:
        raise ValueError(f"the last value of {name} must be at most total_{which} = {total}, got {ends[-1]}")
    longest = max(lengths, default=0)
    if longest > max_seqlen:
        raise ValueError(
            f"max_seqlen_{which} must be at least the longest length, got {max_seqlen} and a length of {longest} "
            f"(sequence {lengths.index(longest)})"
        )
    return spans
