"""What bounds tiles on each architecture, and how tiles are padded for its matrix units: of both passes."""

from __future__ import annotations

from dataclasses import dataclass

# The warpgroup that issues TMA copies: TileLang adds it on sm_90, and it needs few registers.
PRODUCER_THREADS, PRODUCER_REGISTERS = 128, 24
# Keys that a block of transpose_fp8.py takes; its result is padded to a multiple.
TRANSPOSED_KEYS = 128
# What a consumer thread needs besides the tiles: rows' maxima and sums, addresses, a tile's coordinates; and what a
# modification of the score computes with. With these ptxas spills none of SoftCap's or ALiBi's candidates at head dim
# 128, and none of SoftCap's at 64.
OTHER_REGISTERS, SCORE_REGISTERS = 32, 8


@dataclass(frozen=True)
class Architecture:
    """What bounds a configuration: shared memory per block in bytes, threads in a warp."""

    shared_bytes: int
    warp: int = 32


_KB = 1024
ARCHITECTURES = {
    "sm_80": Architecture(163 * _KB),
    "sm_86": Architecture(99 * _KB),
    "sm_87": Architecture(163 * _KB),
    "sm_89": Architecture(99 * _KB),
    "sm_90a": Architecture(227 * _KB),
    "sm_100a": Architecture(227 * _KB),
    "sm_103a": Architecture(227 * _KB),
    "sm_120a": Architecture(99 * _KB),
    "sm_121a": Architecture(99 * _KB),
    "gfx942": Architecture(64 * _KB, warp=64),
}


def padded(head_dim: int, itemsize: int = 2) -> int:
    """The head dim as tiles hold it; the copy into shared memory fills the padding with zeros.

    A multiple of 32 bytes, as the matrix units take; of 32 or 64 elements where it is larger, so that rows can be
    swizzled.
    """
    step = 32 // itemsize if head_dim <= 64 else 32 if head_dim <= 128 else 64
    return -(-head_dim // step) * step


def panel(head_dim: int) -> int:
    """Columns of a tile that lie together, of 16 bits each, in rows of 128, 64 or 32 bytes."""
    return next(width for width in (64, 32, 16) if head_dim % width == 0)
