"""The configuration of a kernel: sizes of tiles, and Triton's compile options."""

from __future__ import annotations

from typing import NamedTuple

KERNELS = ("forward", "keys", "queries")


class Config(NamedTuple):
    """How a kernel is cut and compiled; names as in Triton.

    ``tma``: whether tensors are copied by the hardware from descriptors, where they are aligned (sm_90 and later).
    """

    block_M: int
    block_N: int
    num_warps: int
    num_stages: int
    tma: bool = False
    warp_specialize: bool = False


def has_descriptors(arch: str) -> bool:
    """Whether the hardware copies from tensor descriptors."""
    return arch.startswith("sm_") and int(arch.removeprefix("sm_").rstrip("a")) >= 90
