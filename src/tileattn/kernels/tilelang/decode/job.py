"""The kernels of a decode call as jobs to compile ahead, in other processes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ....call.decoding import DecodeCall
from ... import tile_lists
from .config import Config
from .library import (
    decode_key,
    ensure_decode_compiled,
    ensure_packed_keys_compiled,
    ensure_plan_compiled,
    packed_keys_key,
    plan_key,
)
from .lines.library import ensure_lines_compiled, lines_key
from .lines.visits import analysis_of


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
class LinesJob:
    """The kernel that lists the tiles which calls visit, of at most so many queries in a tile of rows."""

    arch: str
    packed: bool
    variant: str
    queries: int

    @property
    def key(self) -> str:
        """The key of the library in the kernel cache."""
        return lines_key(self.arch, self.packed, self.variant, self.queries)

    def compile(self) -> None:
        """Compiles the kernel into the cache."""
        ensure_lines_compiled(self.arch, self.packed, self.variant, self.queries)

    def __str__(self) -> str:
        return f"decode: lines of {self.variant}{' packed' * self.packed} queries={self.queries} {self.arch}"


def lines_jobs(call: DecodeCall, *queries: int) -> tuple[LinesJob, ...]:
    """The kernels that make the lines of a call, for these numbers of queries; none where operations do."""
    if not call.listed:
        return ()
    known = [each for each in queries if analysis_of(call.variant, each)]
    return tuple(LinesJob(call.arch, call.packed, call.variant, each) for each in known)


def with_lines(call: DecodeCall) -> tuple[DecodeCall, ...]:
    """The call, and, where its mask may hide tiles between others, that of larger sizes, which goes by lines."""
    may = call.variant and tile_lists.is_listed(call.variant)
    return (call, replace(call, listed=True)) if may else (call,)


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


def jobs_of(call: DecodeCall, config: Config, queries: int | None) -> tuple[DecodeJob | LinesJob | PackedKeysJob, ...]:
    """The kernels of a call, that of attention first.

    Args:
        config: of the attention kernel.
        queries: for how many the kernel is that makes the call's lines (lines/visits.py); None without lines.
    """
    packed_keys = [PackedKeysJob(call.arch)] * call.packed_keys
    lines = () if queries is None else lines_jobs(call, queries)
    return DecodeJob(call, config), DecodeJob(call, None), *packed_keys, *lines
