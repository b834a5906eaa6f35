"""The configurations of the Hopper decode schedule, and which are valid; see kernel.py."""

from __future__ import annotations

from dataclasses import dataclass

from .....call.decoding import DecodeCall
from .....variant.program import program
from ...architecture import ARCHITECTURES, padded

BLOCK_M = 64  # packed query rows of a tile: one warpgroup's
CONSUMERS, WARP = 128, 32
REGISTERS = 65536  # of a multiprocessor
SHARED_BYTES_OF_SM = 228 * 1024
RESERVED_BYTES = 1024  # of each block, by the driver
OTHER_BYTES = 1024  # barriers and the flag of the combine, aligned as the tiles are
MIN_BOX_ROWS = 8  # a TMA box must be whole swizzle atoms, of eight rows
TMA_ROWS = 16  # of a box, from which on boxes are faster than rows
KEYS_OF_GATHERING_WARP = 32  # each lane follows the page table for one key


@dataclass(frozen=True)
class HopperDecodeConfig:
    """How the Hopper decode schedule cuts its work, and how many bytes it keeps in flight.

    Attributes:
        block_N: keys in a tile.
        num_stages: tiles of K and V in flight, in each block.
        blocks: that share a multiprocessor; a second one computes while the first one waits.
        gather: whether K and V are copied row by row (cp.async) rather than in boxes (TMA).
        rescale_threshold: by how much (in powers of two) a row's maximum may grow before O is rescaled.
    """

    block_N: int
    num_stages: int
    blocks: int
    gather: bool = False
    rescale_threshold: float = 8.0

    @property
    def producer_warps(self) -> int:
        """One that issues boxes, or as many as have a lane for each key."""
        return self.block_N // KEYS_OF_GATHERING_WARP if self.gather else 1

    @property
    def block_M(self) -> int:
        """Packed query rows of a tile: one warpgroup's."""
        return BLOCK_M

    @property
    def threads(self) -> int:
        """Of a block: one consumer warpgroup, and the producer's warps."""
        return CONSUMERS + WARP * self.producer_warps

    def blocks_per_sm(self, call: DecodeCall) -> int:
        """How many blocks a multiprocessor is given."""
        return self.blocks


def shared_bytes(call: DecodeCall, config: HopperDecodeConfig) -> int:
    """Shared memory of one block: Q, the stages of K and V, barriers."""
    head_dim, head_dim_v = padded(call.head_dim), padded(call.head_dim_v)
    stage = config.block_N * (head_dim + head_dim_v)
    return 2 * (BLOCK_M * head_dim + config.num_stages * stage) + OTHER_BYTES


def box_rows(call: DecodeCall, config: HopperDecodeConfig) -> int:
    """Rows that one TMA box copies: of a contiguous cache the tile, else what is sure to lie in one page."""
    return min(call.page_rows, config.block_N) if call.paged else config.block_N


def is_valid(call: DecodeCall, config: HopperDecodeConfig) -> bool:
    """Whether the configuration can run the call: boxes of whole swizzle atoms, shared memory."""
    of_sm = config.blocks * (shared_bytes(call, config) + RESERVED_BYTES)
    return (
        call.arch == "sm_90a"
        and call.aligned
        and config.block_N in (32, 64, 96, 128)
        and config.num_stages >= 1
        and config.blocks >= 1
        and (config.gather or box_rows(call, config) >= MIN_BOX_ROWS)
        and (config.gather or config.block_N % box_rows(call, config) == 0)
        and shared_bytes(call, config) <= ARCHITECTURES["sm_90a"].shared_bytes
        and of_sm <= SHARED_BYTES_OF_SM
    )


def default(call: DecodeCall) -> HopperDecodeConfig | None:
    """The configuration of a call, or None if none fits.

    Tiles of 64 keys, whatever the pages are (see kernel.py about bits); two blocks where their registers and stages
    suffice. A bias, or another tensor read at each score, takes more registers than half of a multiprocessor has.
    """
    crowded = padded(call.head_dim_v) > 128 or program(call.variant).tile_loads
    for blocks in (1,) if crowded else (2, 1):
        for num_stages in (12, 8, 6, 5, 4, 3, 2):
            config = HopperDecodeConfig(64, num_stages, blocks, gather=call.paged and call.page_rows < TMA_ROWS)
            if is_valid(call, config):
                return config
    return None
