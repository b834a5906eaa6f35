"""The kernels of a decode call as jobs to compile ahead, in other processes."""

from __future__ import annotations

from dataclasses import dataclass

from ....call.decoding import DecodeCall
from .config import Config
from .library import (
    decode_key,
    ensure_decode_compiled,
    ensure_packed_keys_compiled,
    ensure_plan_compiled,
    packed_keys_key,
    plan_key,
)


@dataclass(frozen=True)
class DecodeJob:
    """One kernel: the attention kernel of a call, or (config None) the planning kernel that runs before it."""

    call: DecodeCall
    config: Config | None

    @property
    def key(self) -> str:
        """The key of the library in the kernel cache."""
        call = self.call
        if self.config is None:
            return plan_key(call.arch, call.packed, call.variant, call.listed)
        return decode_key(call, self.config)

    def compile(self) -> None:
        """Compiles the kernel into the cache."""
        call = self.call
        if self.config is None:
            ensure_plan_compiled(call.arch, call.packed, call.variant, call.listed)
        else:
            ensure_decode_compiled(call, self.config)

    def __str__(self) -> str:
        return f"plan of {self.call}" if self.config is None else f"{self.call} {self.config}"


@dataclass(frozen=True)
class PackedKeysJob:
    """The kernel that finds each sequence's packed keys."""

    arch: str

    @property
    def key(self) -> str:
        """The key of the library in the kernel cache."""
        return packed_keys_key(self.arch)

    def compile(self) -> None:
        """Compiles the kernel into the cache."""
        ensure_packed_keys_compiled(self.arch)

    def __str__(self) -> str:
        return f"decode: packed keys {self.arch}"
