"""What the runner asks of an implementation of attention."""

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
    """Whether an implementation is tileattn, or another way to run it, such as "tileattn-dense"."""
    return name.partition("-")[0] == OWN


@dataclass(frozen=True)
class Prepared:
    """A call ready to be timed: `call()` returns o (batch, seqlen_q, heads, head_dim_v), or (tokens, ..) where packed.

    Where the problem asks for gradients, which grad mode must then allow for, o is differentiable (see `bench.passes`).

    held_bytes: what was built ahead for it beyond the problem's tensors (a dense mask, a block mask). It is not timed,
    but counts as memory. context: entered around many calls, for settings that are no part of a call's time. chosen:
    what the implementation chose to run, where that is its own choice. dtype: in which it computes (a key of
    `cases.DTYPES`), where that is not the case's.
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
        """Why it can't run this problem, in a few words for a reader of the table; None if it can."""

    def prepare(self, problem: Problem) -> Prepared:
        """Everything that a user would do once, ahead of many calls."""


def unusual(problem: Problem) -> str | None:
    """The refusal of who knows dense batches in 16 or 32 bits, or None."""
    if problem.fp8 is not None:
        return NO_FP8
    return NO_PACKED if problem.cu_seqlens is not None else None


def tensor_bytes(*tensors: Tensor | None) -> int:
    """Bytes of the given tensors together; None counts nothing."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)
