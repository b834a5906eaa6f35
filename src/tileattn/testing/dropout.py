"""The mask of dropout as a matrix: which probabilities a call keeps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..call.dropout import keep_mask


def dropout_mask(seed: int | Tensor, p: float, batch: int, heads: int, seqlen_q: int, seqlen_k: int) -> Tensor:
    """The probabilities that a call of these sizes keeps.

    To reproduce a call with dropout, draw the seed that the call will draw. Then multiply the probabilities by the mask
    and by the weight of the kept ones::

        from tileattn.call.dropout import draw_seed, weight_of_kept

        torch.manual_seed(0)
        keep = dropout_mask(draw_seed(q.device), p, batch, heads, seqlen_q, seqlen_k)
        factors = keep * weight_of_kept(p)  # of the softmax's probabilities
        torch.manual_seed(0)
        o = tileattn.attention(q, k, v, dropout_p=p)

    Args:
        seed: what :func:`tileattn.call.dropout.draw_seed` gave, a tensor (1,) in int64; or an int from -2**63 to
            2**63 - 1, for a mask on the CPU.
        p: the probability of being dropped, from 0 to 1. It is rounded to a multiple of 2**-16, as in the call; and
            ``weight_of_kept(p)`` is ``1 / (1 - p)`` of the rounded one.
        batch: of the call, 0 or more; of packed sequences, how many there are.
        heads: of the queries, 1 or more.
        seqlen_q: rows of the queries, 0 or more; of packed sequences, those of the longest. A smaller matrix is the
            upper left corner of a larger one.
        seqlen_k: keys, likewise.

    Returns:
        (batch, heads, seqlen_q, seqlen_k), bool, True where a probability is kept; on the seed's device.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it, what was given and what is accepted.

    Source: Philox, Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3" (SC11), whose implementation is
    Random123 (github.com/DEShawResearch/random123). Which counters: :mod:`tileattn.call.dropout`.
    """
    seed = _seed(seed)
    _check_probability(p)
    _check_size("heads", heads, least=1)
    for name, size in (("batch", batch), ("seqlen_q", seqlen_q), ("seqlen_k", seqlen_k)):
        _check_size(name, size, least=0)
    return keep_mask(seed, p, batch, heads, slice(0, seqlen_q), slice(0, seqlen_k))


def _seed(seed: Any) -> Tensor:
    """As :func:`keep_mask` takes it."""
    accepted = "seed must be an int from -2**63 to 2**63 - 1 or an int64 tensor of shape (1,)"
    if isinstance(seed, Tensor):
        if seed.dtype != torch.int64 or seed.shape != (1,):
            error = TypeError if seed.dtype != torch.int64 else ValueError
            raise error(f"{accepted}, got {seed.dtype} of shape {tuple(seed.shape)}")
        return seed
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise TypeError(f"{accepted}, got {seed!r}")
    if not -(2**63) <= seed < 2**63:
        raise ValueError(f"{accepted}, got {seed}")
    return torch.tensor([seed], dtype=torch.int64)


def _check_probability(p: Any) -> None:
    if not isinstance(p, (int, float)) or isinstance(p, bool):
        raise TypeError(f"p must be a probability, a number from 0 to 1, got {p!r}")
    if not 0 <= p <= 1:
        raise ValueError(f"p must be a probability, a number from 0 to 1, got {p!r}")


def _check_size(name: str, size: Any, least: int) -> None:
    if not isinstance(size, int) or isinstance(size, bool):
        raise TypeError(f"{name} must be an int of at least {least}, got {size!r}")
    if size < least:
        raise ValueError(f"{name} must be an int of at least {least}, got {size}")
