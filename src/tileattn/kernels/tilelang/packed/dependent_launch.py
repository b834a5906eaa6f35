"""Programmatic dependent launch: the next kernel's blocks start while the kernel in front of them is still at work.

They wait where they need its results, so that starting them costs no time of its own. Only GPUs from sm_90 on have it;
for others nothing is emitted, and kernels follow each other as ever.

The kernel in front must have been launched as ever itself, or have waited in all of its blocks: then whatever came
before it is done, too.
"""

from __future__ import annotations

import tilelang.language as T
from tilelang.language.eager.builder import Builder


def let_next_start(arch: str) -> None:
    """The kernel behind this one may start as soon as all of this one's blocks are here."""
    if has_dependent_launch(arch):
        Builder.current().eval(T.pdl_trigger())


def wait_for_previous(arch: str) -> None:
    """Waits for the end of the kernel in front of this one; makes this one start early."""
    if has_dependent_launch(arch):
        Builder.current().eval(T.pdl_sync())


def has_dependent_launch(arch: str) -> bool:
    return arch.startswith("sm_") and int(arch[3:].rstrip("a")) >= 90
