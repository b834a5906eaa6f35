"""The kernel of an append call as a job to compile ahead, in another process."""

from __future__ import annotations

from dataclasses import dataclass

from ....call.appending import AppendCall
from .library import append_key, ensure_append_compiled


@dataclass(frozen=True)
class AppendJob:
    """The kernel of a call."""

    call: AppendCall

    @property
    def key(self) -> str:
        """The key of the library in the kernel cache."""
        return append_key(self.call)

    def compile(self) -> None:
        """Compiles the kernel into the cache."""
        ensure_append_compiled(self.call)

    def __str__(self) -> str:
        return str(self.call)
