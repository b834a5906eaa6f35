"""Programmatic dependent launch: a kernel's blocks start while the kernel before it still runs.

They wait where they need its results, which hides the time that starting them takes. Only GPUs from sm_90 on have this.
For others nothing is emitted, and kernels run one after another.

The kernel before must have been launched without dependent launch, or have waited in all of its blocks. Then all
earlier kernels have ended, too.
"""

from __future__ import annotations

import tilelang.language as T
from tilelang.language.eager.builder import Builder


def let_next_start(arch: str) -> None:
    """Lets the next kernel start as soon as all blocks of this one have reached this line."""
    if has_dependent_launch(arch):
        Builder.current().eval(T.pdl_trigger())


def wait_for_previous(arch: str) -> None:
    """Waits for the end of the kernel before this one, and marks this one for dependent launch."""
    if has_dependent_launch(arch):
        Builder.current().eval(T.pdl_sync())


def has_dependent_launch(arch: str) -> bool:
    return arch.startswith("sm_") and int(arch[3:].rstrip("a")) >= 90
