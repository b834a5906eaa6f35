"""Tile sizes of the decode kernels' generic schedule, and their default."""

from __future__ import annotations

from dataclasses import dataclass

from ....call.decoding import DecodeCall
from ..architecture import ARCHITECTURES, padded
from .hopper.config import HopperDecodeConfig
from .hopper.config import default as hopper_default

LEAST_KEYS = 128  # of a worker: smaller parts take longer to merge than to compute
TILES_OF_FEW = 20  # of a multiprocessor: with no more one block each is faster than two
THREADS_PER_SM = 128  # that compute: the matrix units of a multiprocessor are four
MOST_CHOOSING_ROWS = 128  # a tile is not larger: more packed rows choose the same
KEYS_OF_FIXED_SPLIT = 128  # FixedSplit.keys is a multiple of this, and so of all block_N


@dataclass(frozen=True)
class GenericConfig:
    """How the generic schedule cuts its work.

    Attributes:
        block_M: packed query rows of a job, 16 for each warp.
        block_N: keys of a tile; a divisor of KEYS_OF_FIXED_SPLIT.
        num_stages: tiles of K and V in flight.
    """

    block_M: int
    block_N: int
    num_stages: int

    @property
    def threads(self) -> int:
        return self.block_M // 16 * 32

    def shared_bytes(self, call: DecodeCall) -> int:
        """Shared memory of a block: Q, and the stages of K and V."""
        head_dim, head_dim_v = padded(call.head_dim), padded(call.head_dim_v)
        return 2 * (self.block_M * head_dim + self.num_stages * self.block_N * (head_dim + head_dim_v)) + 1024

    def blocks_per_sm(self, call: DecodeCall) -> int:
        """How many blocks a multiprocessor is given: as many as its shared memory and its registers hold."""
        shared = ARCHITECTURES[call.arch].shared_bytes
        return max(min(shared // self.shared_bytes(call), 256 // self.threads), 1)


Config = GenericConfig | HopperDecodeConfig


def default(call: DecodeCall, q_rows: int) -> Config:
    """The configuration of a call: of the Hopper schedule where it runs the call, else of the generic one.

    Args:
        call: the static facts.
        q_rows: the packed rows that a sequence has at most. With FixedSplit they do not count, for a row's result must
            not depend on how many queries there are.
    """
    on_hopper = hopper_default(call)
    return on_hopper if on_hopper is not None else generic_default(call, q_rows)


def defaults(call: DecodeCall) -> list[Config]:
    """The configurations that :func:`default` may choose, whatever the sizes: kernels to compile ahead."""
    return list(dict.fromkeys(default(call, q_rows) for q_rows in range(1, MOST_CHOOSING_ROWS + 1)))


def generic_default(call: DecodeCall, q_rows: int) -> GenericConfig:
    """The same, of the generic schedule."""
    rows = 64 if call.fixed or q_rows > 32 else 32 if q_rows > 16 else 16
    tiles = [GenericConfig(rows, *tile) for tile in ((64, 3), (64, 2), (32, 3), (32, 2), (16, 2), (16, 1))]
    if padded(call.head_dim_v) > 128:
        tiles = [tile for tile in tiles if tile.block_N < 64]  # O takes the registers of larger tiles of scores
    fitting = [tile for tile in tiles if tile.shared_bytes(call) <= ARCHITECTURES[call.arch].shared_bytes]
    for config in fitting:
        if config.blocks_per_sm(call) * config.threads >= THREADS_PER_SM:
            return config
    if fitting:
        return max(fitting, key=lambda config: config.blocks_per_sm(call))
    raise NotImplementedError(f"no tile of the decode kernel fits {call}")
