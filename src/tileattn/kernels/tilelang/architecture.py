"""Limits of tiles on each architecture, and their padding for the matrix units; for both passes."""

from __future__ import annotations

from dataclasses import dataclass

# The warpgroup that issues TMA copies. TileLang adds it on sm_90; it needs few registers.
PRODUCER_THREADS, PRODUCER_REGISTERS = 128, 24
# Keys per block of transpose_fp8.py. Its result is padded to a multiple of this.
TRANSPOSED_KEYS = 128
# Registers of a consumer thread besides the tiles: rows' maxima and sums, addresses and a tile's coordinates; and those
# that a score modification computes with. With these numbers ptxas spills none of SoftCap's or ALiBi's candidates at
# head dim 128, and none of SoftCap's at 64.
OTHER_REGISTERS, SCORE_REGISTERS = 32, 8


@dataclass(frozen=True)
class Architecture:
    """Limits of a configuration: shared memory per block in bytes, threads in a warp."""

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
    """The head dim of tiles. The copy into shared memory fills the padding with zeros.

    It is a multiple of 32 bytes, which the matrix units need. Larger ones are multiples of 32 or 64 elements, so that
    rows can be swizzled.
    """
    step = 32 // itemsize if head_dim <= 64 else 32 if head_dim <= 128 else 64
    return -(-head_dim // step) * step


def padded_finely(head_dim: int) -> int:
    """The head dim of the backward pass's tiles, of 16 bits: a multiple of 32 up to 160, not only up to 128.

    The backward pass is bound by its products: at head dim 160 it takes 12 to 15 % less time than in tiles of 192
    (H100). The Hopper forward pass has widths of its own (forward/config.py).
    """
    return -(-head_dim // 32) * 32 if 128 < head_dim <= 160 else padded(head_dim)


def panel(head_dim: int) -> int:
    """Columns of a tile that lie together, of 16 bits each, in rows of 128, 64 or 32 bytes."""
    return next(width for width in (64, 32, 16) if head_dim % width == 0)
