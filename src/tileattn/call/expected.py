"""The backward pass that a forward pass expects: what it may compile ahead. Nothing that is computed depends on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from .facts import AttentionCall, BackwardCall
from .inputs import Operands

_given: ContextVar[tuple[bool, tuple[bool, ...]]] = ContextVar("given", default=(False, ()))


@contextmanager
def expecting(deterministic: bool, operands: Operands) -> Iterator[None]:
    """Inside, forward passes are prepared for calls whose gradients are to be deterministic, with these operands."""
    token = _given.set((deterministic, tuple(tensor.requires_grad for tensor in operands.tensors)))
    try:
        yield
    finally:
        _given.reset(token)


def backward_of(call: AttentionCall, tensors: int) -> BackwardCall:
    """The backward pass that probably follows a forward pass, which knows neither o nor the gradients that are wanted.

    Those of q, k and v are, and those of the variant's tensors that require one; lse has none.

    tensors: how many tensors the variant has.
    """
    deterministic, given = _given.get()
    needs = given if len(given) == tensors else (False,) * tensors
    return BackwardCall(call, needs=(True, True, True, call.sink, *needs), deterministic=deterministic)
