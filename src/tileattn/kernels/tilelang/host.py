"""The preparation of a call's tensors before a launch, for both passes."""

from __future__ import annotations

import functools
import math

import torch

from ...call.dropout import GROUP, Dropout, threshold, weight_of_kept

# Bytes of the L2 cache for the data of heads that run at the same time.
L2_BYTES = 32 * 2**20


@functools.lru_cache(maxsize=256)
def divisors(number: int) -> list[int]:
    """All divisors of a number, in ascending order."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def one_batch(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that is expanded over the batch (stride 0, which tensor maps refuse), as its one batch."""
    return tensor if tensor.stride(0) else tensor[0][None]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A variant's tensor as kernels take it: booleans as bytes, and never an empty one.

    Kernels read the ends of ranges before they know that there is no key. An empty tensor is replaced by zeros, in rows
    that begin at multiples of 16 bytes, as tensor maps need.
    """
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.numel() == 0:
        *outer, last = (max(size, 1) for size in tensor.shape)
        tensor = tensor.new_zeros(*outer, -(-last // 16) * 16)[..., :last]
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor


def pattern_arguments(dropout: Dropout | None, heads: int) -> tuple[tuple[torch.Tensor, ...], tuple[float, ...]]:
    """The tensors and the numbers that a kernel with dropout takes; empty without dropout. heads: of the queries."""
    if dropout is None:
        return (), ()
    place = dropout.of_heads(heads)
    assert place.row % GROUP == place.key % GROUP == 0
    numbers = threshold(dropout.p), weight_of_kept(dropout.p)
    return (dropout.seed.detach(),), (*numbers, place.heads, place.head, place.row // 2, place.key // 2)
