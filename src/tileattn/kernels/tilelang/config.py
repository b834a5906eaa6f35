"""Tile sizes of the TileLang kernels: their defaults for each architecture, and which are valid."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ...call import AttentionCall
from ...variant import program

# The warpgroup that issues TMA copies: TileLang adds it on sm_90, and it needs few registers.
PRODUCER_THREADS, PRODUCER_REGISTERS = 128, 24


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


def padded(head_dim: int) -> int:
    """The head dim as tiles hold it; the copy into shared memory fills the padding with zeros.

    A multiple of 16, as the matrix units take; of 32 or 64 where it is larger, so that rows can be swizzled.
    """
    step = 16 if head_dim <= 64 else 32 if head_dim <= 128 else 64
    return -(-head_dim // step) * step


def shared_bytes(call: AttentionCall, config: ForwardConfig) -> int:
    """Shared memory of one block: Q (or O, in the same place) and the stages of K and V."""
    head_dim, head_dim_v = padded(call.head_dim), padded(call.head_dim_v)
    q_or_o = config.block_M * max(head_dim, head_dim_v)
    return 2 * (q_or_o + max(config.num_stages, 1) * config.block_N * (head_dim + head_dim_v))


def is_valid(call: AttentionCall, config: ForwardConfig) -> bool:
    """Whether the configuration fits the architecture: rows for each warp, shared memory."""
    arch = ARCHITECTURES[call.arch]
    rows = 16 if arch.warp == 32 else 32
    return (
        config.block_M % (config.threads // arch.warp * rows) == 0
        and config.block_N % 16 == 0
        and shared_bytes(call, config) <= arch.shared_bytes
    )


def default(call: AttentionCall) -> ForwardConfig:
    """The configuration that is used unless another was measured to be faster."""
    for config in _preferences(call):
        if is_valid(call, config):
            return config
    raise NotImplementedError(f"no tile of the forward kernel fits {call}")


def _preferences(call: AttentionCall) -> Iterator[ForwardConfig]:
    """Configurations from the best down; the first that is valid counts."""
    widest = max(padded(call.head_dim), padded(call.head_dim_v))
    if call.arch == "sm_90a" and call.aligned:
        yield from _sm90(widest, call.variant)
    elif call.arch.startswith("gfx"):
        yield ForwardConfig(128, 64, 1, 256)
        yield ForwardConfig(64, 64, 0, 128)
        yield ForwardConfig(64, 32, 0, 128)
    else:
        if widest <= 64 and program(call.variant).score is not None:
            yield ForwardConfig(64, 64, 2, 128)  # half the scores per thread leave registers for the modification
        if widest <= 128 and call.aligned:
            yield ForwardConfig(128, 64, 2, 256 if widest > 64 else 128)
        # Wide heads, and copies of single elements, fill the registers: more than 32 keys at a time would spill.
        yield ForwardConfig(128, 32, 2, 256)
        yield ForwardConfig(128, 32, 1, 256)


def _sm90(widest: int, variant: str) -> Iterator[ForwardConfig]:
    """Measured on an H200 (benchmarks/results)."""
    plain = not program(variant).operands and program(variant).score is None
    if widest <= 64 and plain:
        yield ForwardConfig(128, 64, 2, 256, blocks_per_sm=2)  # short rows: one block computes while another loads
    if widest <= 192:
        yield ForwardConfig(128, 128, 2, 256)
    if not variant:
        yield ForwardConfig(128, 80, 2, 256)
    yield ForwardConfig(128, 64, 2, 256)
