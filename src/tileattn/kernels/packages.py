"""Whether the packages that a backend needs are installed, for its refusals.

A refusal answers for this machine. Pages and ``tileattn info --arch`` ask about others: inside :func:`any_machine` a
refusal answers for a machine on which every package of tileattn is installed and no environment variable is set.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from ..installation import pip_install

_ANY_MACHINE = ContextVar("tileattn_any_machine", default=False)


def absence(module: str, install: str = "", *, extra: str = "") -> str | None:
    """The reason to refuse a call because a module is not installed; None if it is.

    Args:
        module: its name, such as "tilelang" or "cuda.core".
        install: the name for pip, of a package that is installed by itself.
        extra: instead of `install`, the extra of tileattn that brings the module.
    """
    if _ANY_MACHINE.get() or _is_installed(module):
        return None
    command = pip_install(extra) if extra else f"pip install {install}"
    return f"{module.replace('.', '-')} is not installed ({command})"


def asked_for_any_machine() -> bool:
    """Whether refusals answer for any machine, and not for this one."""
    return _ANY_MACHINE.get()


@contextmanager
def any_machine() -> Iterator[None]:
    """Inside it refusals do not depend on what is installed here.

    Choices of a backend are cached (``dispatch.select``) and must not be made inside it.
    """
    token = _ANY_MACHINE.set(True)
    try:
        yield
    finally:
        _ANY_MACHINE.reset(token)


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package that contains it is not installed
        return False
