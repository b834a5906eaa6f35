"""The backends of :func:`tileattn.append_kv`, and the choice of the one that runs a call.

The table is that of :mod:`tileattn.runtime.dispatch` for another kind of call: ordered, each row with its refusals.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ..call.appending import AppendCall, AppendInputs
from ..kernels.tilelang.append import backend as tilelang_append
from ..kernels.torch import append as torch_append
from ..kernels.triton.append import backend as triton_append
from .dispatch import Answers, Backend, check_name, first_that_accepts

Append = Callable[[AppendInputs], Tensor | None]


@dataclass(frozen=True)
class AppendPhase:
    """What a backend has for :func:`tileattn.append_kv`.

    Attributes:
        name: that of the backend.
        refusal: ``refusal(call)`` says why the backend does not run a call; None if it does.
        reservation: ``reservation(call)`` says why it runs a call only if it is named; None otherwise.
        prepare: ``prepare(call)`` returns the function that writes to the caches of a call's inputs, and returns the
            rotated q (batch, q_len, heads, head_dim), contiguous, or None without q.
    """

    name: str
    refusal: Callable[[AppendCall], str | None]
    reservation: Callable[[AppendCall], str | None]
    prepare: Callable[[AppendCall], Append]


# In order of preference: the first one that accepts the call runs it.
PHASES: tuple[AppendPhase, ...] = (
    AppendPhase("tilelang", tilelang_append.refusal, lambda call: None, tilelang_append.prepare),
    AppendPhase("triton", triton_append.refusal, triton_append.reservation, triton_append.prepare),
    AppendPhase("torch", torch_append.refusal, lambda call: None, torch_append.prepare),
)


def answers_for_append(candidate: Backend) -> Answers[AppendCall]:
    """The reservation and the refusal of a backend for append calls."""
    phase = next((phase for phase in PHASES if phase.name == candidate.name), None)
    if phase is None:
        return (lambda call: None), (lambda call: "it has no append_kv")
    return phase.reservation, phase.refusal


def select_append(call: AppendCall, backend: str | None = None) -> AppendPhase:
    """Selects the backend that runs an append call.

    Args:
        call: the call's static facts.
        backend: the name of a backend; None selects the first that accepts the call.

    Raises:
        ValueError: no backend has that name.
        NotImplementedError: the named backend (or every backend) refuses the call; the message says why.
    """
    name = first_that_accepts(call, backend, answers_for_append).name
    return next(phase for phase in PHASES if phase.name == name)


def prepare_append(call: AppendCall, backend: str | None) -> Append:
    """The function of the backend that runs a call. Arguments and errors are those of :func:`select_append`."""
    check_name(backend)
    return _prepare_append(call, backend)


@functools.lru_cache(maxsize=4096)
def _prepare_append(call: AppendCall, backend: str | None) -> Append:
    return select_append(call, backend).prepare(call)
