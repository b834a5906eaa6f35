"""Tile sizes of the TileLang kernels: their defaults for each architecture, and which are valid."""

from __future__ import annotations

from dataclasses import dataclass

from ....call.facts import AttentionCall
from ....variant.program import program
from ..architecture import ARCHITECTURES, PRODUCER_REGISTERS, PRODUCER_THREADS, padded, panel


@dataclass(frozen=True)
class ForwardConfig:
    """How the generic forward schedule cuts its work.

    Attributes:
        block_M: rows of Q in a tile.
        block_N: rows of K and V in a tile.
        num_stages: tiles of K and V in flight.
        threads: per block, without the producer warpgroup that TileLang adds on sm_90 and later.
        blocks_per_sm: how many blocks must fit on one multiprocessor together (sm_90 only; 1 elsewhere).
    """

    block_M: int
    block_N: int
    num_stages: int
    threads: int
    blocks_per_sm: int = 1

    def consumer_registers(self) -> int:
        """Registers per consumer thread when the producer warpgroup keeps 24 (sm_90: setmaxnreg)."""
        block = 65536 // self.blocks_per_sm
        launch = block // (self.threads + PRODUCER_THREADS) // 8 * 8 * (self.threads + PRODUCER_THREADS)
        return min((launch - PRODUCER_THREADS * PRODUCER_REGISTERS) // self.threads // 8 * 8, 240)


@dataclass(frozen=True)
class HopperConfig:
    """How the Hopper schedule cuts its work and what it keeps where.

    Attributes:
        block_M: rows of Q in a tile: 64 for each consumer warpgroup.
        block_N: rows of K and V in a tile.
        num_stages: tiles of K and V in flight.
        q_in_registers: whether the first product takes Q from registers rather than from shared memory.
        ping_pong: whether the warpgroups take turns at the tensor cores.
        rescale_threshold: by how much (in powers of two) a row's maximum may grow before O is rescaled.
        producer_registers: registers per thread of the producer's warpgroup; the consumers get the rest.
        two_level: whether each tile's P V is summed apart and added to O in float32 (for fp8, whose matrix units keep
            fewer bits of their sums).
        cluster: how many blocks, on neighbouring tiles of queries, share the loads of K and V: 1 or 2.
        weights_in_shared: whether the second product takes the weights from shared memory rather than from registers.
        mask_words: whether masks that leave a range of keys hide scores by a bit for each (tile/key_words.py).
        listed: whether tiles of keys are taken from lists (tile_lists.py) rather than from ranges.
        bits: whether mixed tiles of lists are hidden by bits that were made before (tile/mixed_bits.py).
    """

    block_M: int
    block_N: int
    num_stages: int = 2
    q_in_registers: bool = False
    ping_pong: bool = False
    rescale_threshold: float = 8.0
    producer_registers: int = 32
    two_level: bool = False
    cluster: int = 1
    weights_in_shared: bool = False
    mask_words: bool = False
    listed: bool = False
    bits: bool = False

    def consumer_threads(self) -> int:
        """Threads of the consumer warpgroups."""
        return self.block_M // 64 * 128

    def consumer_registers(self) -> int:
        """Registers per consumer thread that the producer leaves (sm_90: setmaxnreg)."""
        threads = self.consumer_threads() + PRODUCER_THREADS
        launch = 65536 // threads // 8 * 8 * threads
        return min((launch - PRODUCER_THREADS * self.producer_registers) // self.consumer_threads() // 8 * 8, 240)

    def output_apart(self, call: AttentionCall) -> bool:
        """Whether O has its own shared memory, rather than Q's."""
        o_bytes = 2 * self.block_M * hopper_dims(call)[1]
        return hopper_shared_bytes(call, self) + o_bytes <= ARCHITECTURES["sm_90a"].shared_bytes


Config = ForwardConfig | HopperConfig


def hopper_shared_bytes(call: AttentionCall, config: HopperConfig) -> int:
    """Shared memory of one block without O's own: Q, weights, the stages of K, V and a bias, messages and barriers."""
    size = call.dtype.itemsize
    head_dim, head_dim_v = hopper_dims(call)
    tile = program(call.variant).copied_tile
    tile_row = 0 if tile is None else config.block_M * tile[1].itemsize
    return (
        size * config.block_M * (head_dim + config.block_N * config.weights_in_shared)
        + config.num_stages * config.block_N * (size * (head_dim + head_dim_v) + tile_row)
        + 1024
    )


def hopper_dims(call: AttentionCall) -> tuple[int, int]:
    """Both head dims as the Hopper schedule's tiles hold them.

    Less padded where they are equal, in 16 bits: 80 and 160 as they are, others to multiples of 32. On an H200 80 ran
    at 502 TFLOPS, padded to 96 at 450; 160 at 94 % of 192's, padded to 192 at 85 %; but 112 at 545 in panels of 32
    bytes, padded to 128 at 570. Head dims that differ keep equal panels, for O may have to lie where Q was.
    """
    size = call.dtype.itemsize
    if call.head_dim == call.head_dim_v and size == 2:
        step = 16 if call.head_dim <= 80 else 32
        return (-(-call.head_dim // step) * step,) * 2
    return padded(call.head_dim, size), padded(call.head_dim_v, size)


def shared_bytes(call: AttentionCall, config: ForwardConfig) -> int:
    """Shared memory of one block: Q (or O, in the same place) and the stages of K and V."""
    head_dim, head_dim_v = padded(call.head_dim), padded(call.head_dim_v)
    q_or_o = config.block_M * max(head_dim, head_dim_v)
    return 2 * (q_or_o + max(config.num_stages, 1) * config.block_N * (head_dim + head_dim_v))


def _o_fits_where_q_was(call: AttentionCall) -> bool:
    head_dim, head_dim_v = hopper_dims(call)
    return call.dtype.itemsize == 2 and head_dim_v <= head_dim and panel(head_dim_v) == panel(head_dim)


def is_valid(call: AttentionCall, config: Config) -> bool:
    """Whether the configuration fits the architecture: rows for each warp, shared memory."""
    arch = ARCHITECTURES[call.arch]
    if isinstance(config, HopperConfig):
        return (
            call.arch == "sm_90a"
            and call.aligned
            and config.block_M % 64 == 0
            and config.cluster in (1, 2)
            and config.block_N % (32 // call.dtype.itemsize) == 0
            and hopper_shared_bytes(call, config) <= arch.shared_bytes
            and (config.output_apart(call) or _o_fits_where_q_was(call))
        )
    rows = 16 if arch.warp == 32 else 32
    return (
        config.threads >= arch.warp
        and config.block_M % (config.threads // arch.warp * rows) == 0
        and config.block_N % 16 == 0
        and shared_bytes(call, config) <= arch.shared_bytes
    )
