"""The run-time values of a call, as one object that is passed from the public functions to a backend.

An :class:`tileattn.call.facts.AttentionCall` holds the facts that a kernel is specialised on. :class:`Inputs` hold the
tensors and numbers that the kernel is launched on. Autograd and ``torch.library`` take tensors as separate arguments:
:func:`separate` takes inputs apart, and :func:`join` puts them together again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from torch import Tensor

from .dropout import Dropout
from .facts import Packed
from .fp8 import Descales


@dataclass
class Operands:
    """The run-time values of a variant, by kind, each kind in the order in which the key names them."""

    tensors: list[Tensor] = field(default_factory=list)
    ints: list[int] = field(default_factory=list)
    floats: list[float] = field(default_factory=list)


NO_OPERANDS = Operands()


class Inputs(NamedTuple):
    """The tensors and numbers of one call.

    Attributes:
        q, k, v: bshd tensors of any strides with a contiguous last dimension.
        sink: (heads,), one logit per head, or None.
        operands: the numbers and tensors of the mask and the score modifications.
        dropout: the dropout probability and the seed, or None.
        packed: the sequences of a packed call, or None.
        descales: all three descales of an fp8 call; None for any other call.
        out: where a backend may write o (in a backward pass dq), contiguous and of its shape and dtype; None for a new
            tensor. A backend that does not use it returns a tensor of its own.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    sink: Tensor | None = None
    operands: Operands = NO_OPERANDS
    dropout: Dropout | None = None
    packed: Packed | None = None
    descales: Descales | None = None
    out: Tensor | None = None


# Inputs(*fields) for a tuple of all fields, in a third of the time, to keep the host's latency low.
inputs_of = partial(tuple.__new__, Inputs)


class Numbers(NamedTuple):
    """The values in :class:`Inputs` that are not tensors.

    dropout_p has no meaning without a seed; max_seqlen_q and max_seqlen_k have none without cu_seqlens.
    """

    ints: list[int]
    floats: list[float]
    dropout_p: float = 0.0
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0


def separate(inputs: Inputs) -> tuple[Numbers, tuple[Tensor | None, ...]]:
    """The numbers and the tensors of inputs, without descales.

    The tensors are seed, cu_seqlens_q, cu_seqlens_k, q, k, v, sink, then those of the variant.
    """
    q, k, v, sink, operands, dropout, packed, *_ = inputs
    p, seed = dropout[:2] if dropout else (0.0, None)  # a part of a call does not come here
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k = packed or (None, None, 0, 0)
    numbers = Numbers(operands.ints, operands.floats, p, max_seqlen_q, max_seqlen_k)
    return numbers, (seed, cu_seqlens_q, cu_seqlens_k, q, k, v, sink, *operands.tensors)


def join(
    numbers: Numbers,
    seed: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    *tensors: Tensor,
) -> Inputs:
    """The inverse of :func:`separate`."""
    ints, floats, dropout_p, max_seqlen_q, max_seqlen_k = numbers
    operands = Operands(list(tensors), ints, floats) if tensors or ints or floats else NO_OPERANDS
    dropout = None if seed is None else Dropout(dropout_p, seed)
    packed = None
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        packed = Packed(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return inputs_of((q, k, v, sink, operands, dropout, packed, None, None))
