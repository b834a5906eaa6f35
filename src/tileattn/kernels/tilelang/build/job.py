"""One kernel as a value, from which its key in the cache and its TileLang function follow. Imports no compiler."""

from __future__ import annotations

from typing import Any, NamedTuple

from .library import find_or_compile, is_there, key_of


class Name(NamedTuple):
    """What a kernel is, without how it is generated.

    Attributes:
        facts: all that decides which kernel it is: its kind, the call's static facts, its configuration, its variant.
        module: below `kernels/tilelang`, the one that has the function that returns the TileLang function.
    """

    facts: str
    module: str


class KernelJob:
    """One kernel to find or to compile. Subclasses are frozen dataclasses, which are sent to other processes.

    Attributes:
        arch: the architecture that it is compiled for.
    """

    arch: str

    @property
    def name(self) -> Name:
        """What the kernel is."""
        raise NotImplementedError

    def function(self) -> Any:
        """The TileLang function. Imports TileLang."""
        raise NotImplementedError

    @property
    def key(self) -> str:
        """The key of the library in the kernel cache."""
        return key_of(*self.name)

    def is_there(self) -> bool:
        """Whether an installed bundle or the cache holds the kernel, as far as its files' names say."""
        return is_there(self)

    def compile(self) -> None:
        """Compiles the kernel into the cache, if neither an installed bundle nor the cache holds it."""
        find_or_compile(self)
