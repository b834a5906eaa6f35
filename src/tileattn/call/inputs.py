"""The run-time values of a call: one value from the public functions to a backend.

An :class:`tileattn.call.facts.AttentionCall` says what a kernel is specialised on. :class:`Inputs` hold the tensors and
numbers that the kernel is then launched on. What must see tensors one by one (autograd, ``torch.library``) takes inputs
apart with :func:`separate` and puts them together with :func:`join`.
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
    """The run-time values of a variant, in the order of their appearance, by kind."""

    tensors: list[Tensor] = field(default_factory=list)
    ints: list[int] = field(default_factory=list)
    floats: list[float] = field(default_factory=list)


NO_OPERANDS = Operands()


class Inputs(NamedTuple):
    """The tensors and numbers of one call.

    Attributes:
        q, k, v: bshd, of any strides with a contiguous last dimension.
        sink: (heads,), one logit per head, or None.
        operands: of the mask and the score modifications.
        dropout: what is dropped, or None.
        packed: where the sequences of a packed call lie, or None.
        descales: of an fp8 call, all three; None for any other.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    sink: Tensor | None = None
    operands: Operands = NO_OPERANDS
    dropout: Dropout | None = None
    packed: Packed | None = None
    descales: Descales | None = None


# Inputs(*...) of a tuple of all of them, in a third of the time: a launch should cost the host little.
inputs_of = partial(tuple.__new__, Inputs)


class Numbers(NamedTuple):
    """What is not a tensor in :class:`Inputs`; dropout_p without a seed and lengths without cu_seqlens mean nothing."""

    ints: list[int]
    floats: list[float]
    dropout_p: float = 0.0
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0


def separate(inputs: Inputs) -> tuple[Numbers, tuple[Tensor | None, ...]]:
    """Numbers, and as tensors: seed, cu_seqlens_q, cu_seqlens_k, q, k, v, sink, and the variant's. Without descales."""
    q, k, v, sink, operands, dropout, packed, _ = inputs
    p, seed = dropout or (0.0, None)
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
    return inputs_of((q, k, v, sink, operands, dropout, packed, None))
