"""The open tuning session, if any. Dispatch and the session both import this small module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from .space import Space


class Session(Protocol):
    """The interface of the open session, :class:`tileattn.tuner.session.Session`."""

    @property
    def tuned(self) -> bool: ...
    def without_candidates(self, backend: str, arch: str) -> None: ...
    def tunes(self, space: Space, arch: str, prepare: Callable[[], Callable[..., Any]]) -> Callable[..., Any]: ...


# The session of `with tileattn.tuning():`, for all threads: autograd runs backward passes in threads of its own.
session: Session | None = None

# What forgets prepared calls: called when a session begins, keeps a result, or ends.
_forgetful: list[Callable[[], object]] = []


def forgets(forget: Callable[[], object]) -> None:
    """Registers a function that empties a table of prepared calls."""
    _forgetful.append(forget)


def forget_prepared() -> None:
    """Empties all tables of prepared calls, so that the next calls look up their configuration again."""
    for forget in _forgetful:
        forget()


def refuse_tracing() -> None:
    """Raises while `tuning()` is open: a traced call has no values and cannot be timed."""
    if session is not None:
        raise RuntimeError(
            "tileattn.tuning() is open while a call is traced (torch.compile, torch.export, fake tensors): there is "
            "nothing to time. Tune with an eager call first; a graph that is compiled after that uses the result"
        )
