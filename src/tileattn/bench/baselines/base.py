"""The interface of an implementation of attention, as the runner uses it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from tileattn.bench.problem import Problem

# tileattn's own name among the implementations.
OWN = "tileattn"
# The refusals of the baselines that have no fp8, and that want a batch of one length.
NO_FP8 = "it does not take fp8"
NO_PACKED = "it does not take packed sequences"


def is_own(name: str) -> bool:
    """Whether a name is tileattn, or another way to run it, such as "tileattn-dense"."""
    return name.partition("-")[0] == OWN


@dataclass(frozen=True)
class Prepared:
    """A call ready to be timed: `call()` returns o (batch, seqlen_q, heads, head_dim_v), or (tokens, ..) where packed.

    If the problem has gradients, o is differentiable in grad mode (see `bench.passes`).

    held_bytes: Bytes built ahead beyond the problem's tensors (a dense mask, a block mask); not timed, but counted.
    context: Entered around many calls, for settings that are not part of a call's time.
    chosen: Name of the backend that the implementation chose, if it has a choice.
    dtype: The dtype in which it computes (a key of `cases.DTYPES`), if not the case's.
    """

    call: Callable[[], Tensor]
    held_bytes: int = 0
    context: Callable[[], AbstractContextManager[None]] = nullcontext
    chosen: str | None = None
    dtype: str | None = None


class Implementation(Protocol):
    """Something that computes attention; `name` is its column in tables and its `backend` in result files."""

    @property
    def name(self) -> str: ...

    def refusal(self, problem: Problem) -> str | None:
        """A short reason why it cannot run this problem; None if it can."""

    def prepare(self, problem: Problem) -> Prepared:
        """Does the work that a user would do once before many calls."""


def unusual(problem: Problem) -> str | None:
    """The refusal of an implementation that takes only dense batches in 16 or 32 bits, or None."""
    if problem.fp8 is not None:
        return NO_FP8
    return NO_PACKED if problem.cu_seqlens is not None else None


def tensor_bytes(*tensors: Tensor | None) -> int:
    """Bytes of the given tensors together; None counts nothing."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)
