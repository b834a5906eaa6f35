"""The pattern of dropout, as a matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from ..dropout import keep_mask


def dropout_mask(seed: int | Tensor, p: float, batch: int, heads: int, seqlen_q: int, seqlen_k: int) -> Tensor:
    """Which probabilities a call of these sizes keeps: (batch, heads, seqlen_q, seqlen_k), bool.

    `seed` is a number, for a mask on the CPU, or what ``tileattn.dropout.draw_seed`` gave.
    """
    seed = seed if isinstance(seed, Tensor) else torch.tensor([seed], dtype=torch.int64)
    return keep_mask(seed, p, batch, heads, slice(0, seqlen_q), slice(0, seqlen_k))
