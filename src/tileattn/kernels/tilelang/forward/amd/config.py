"""Tile sizes of the forward kernel for AMD's CDNA 3 (gfx942: MI300X), their limits and preferences.

The parameters are those of TileLang's FlashAttention on MI300X (tile-ai/tilelang, examples/amd). What is searched is
in space.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from .....call.facts import AttentionCall
from .....variant.program import program
from ...architecture import ARCHITECTURES, padded

WAVE = 64
# The largest valid estimate of registers per thread. There are as many again for accumulators, but the softmax cannot
# use those: at an estimate of 304, clang spills 272 bytes per thread to scratch memory; at 208, nothing.
MAX_REGISTERS = 256
# ... for head dims above 128, whose copies take more registers: estimates of 200 and 224 spill, 188 does not. And for
# 512 threads, which have 256 registers each, accumulators included: 248 spills, 168 does not.
MAX_REGISTERS_WIDE = 192
# Registers per thread besides the tiles, as for NVIDIA's kernels.
OTHER_REGISTERS, SCORE_REGISTERS = 48, 8


@dataclass(frozen=True)
class AmdConfig:
    """Tile sizes and options of the AMD schedule.

    Attributes:
        block_M: rows of Q in a tile.
        block_N: rows of K and V in a tile.
        num_split_q: blocks for each (batch, head) pair. Each takes every num_split_q-th tile of queries. This is a
            run-time value: configurations that differ in nothing else share a kernel.
        threads: threads per block.
        num_stages: tiles of K and V in flight; with 0 and 1 they are loaded where they are needed, into one buffer.
        enable_rasterization: whether blocks are renumbered, so that those that run together share keys in the L2 cache.
        panel_size: the number of (batch, head) pairs that are renumbered together.
        k_pack: steps of 16 along the head dim in one read of Q and K from shared memory: 1 or 2.
        qk_coalesced_width: elements of a row of Q or K that a thread copies at a time: 4 or 8.
        v_coalesced_width: the same for V.
    """

    block_M: int
    block_N: int
    num_split_q: int = 128
    threads: int = 256
    num_stages: int = 0
    enable_rasterization: bool = True
    panel_size: int = 8
    k_pack: int = 2
    qk_coalesced_width: int = 8
    v_coalesced_width: int = 4

    @property
    def kernel_text(self) -> str:
        """The configuration in the kernel's cache key.

        It lacks num_split_q, which is a run-time value. With 0 and 1 stages the kernel is the same.
        """
        return str(dataclasses.replace(self, num_split_q=0, num_stages=max(self.num_stages, 1)))

    def splits(self, seqlen_q: int) -> int:
        """Blocks for each (batch, head) pair: no more than there are tiles of queries."""
        return min(self.num_split_q, -(-seqlen_q // self.block_M))


def warps(call: AttentionCall, config: AmdConfig) -> int:
    """Waves of 64 threads per block; warps of 32 where tests lower the schedule for NVIDIA's GPUs."""
    return config.threads // ARCHITECTURES[call.arch].warp


def shared_bytes(call: AttentionCall, config: AmdConfig) -> int:
    """Shared memory of one block: Q, the stages of K and V, and the workspaces of the row reductions.

    TileLang 0.1.15 gives the maximum and the sum a float per thread each, although their rows stay within a warp.
    """
    head_dim, head_dim_v = padded(call.head_dim), padded(call.head_dim_v)
    keys = max(config.num_stages, 1) * config.block_N * (head_dim + head_dim_v)
    return 2 * (config.block_M * head_dim + keys) + 2 * 4 * config.threads


def registers(call: AttentionCall, config: AmdConfig) -> int:
    """The estimated registers per thread: O and scores in float32, weights in 16 bits, and the rest."""
    tile = config.block_M * (2 * padded(call.head_dim_v) + 3 * config.block_N) // 2 // config.threads
    return tile + OTHER_REGISTERS + SCORE_REGISTERS * (program(call.variant).score is not None)


def most_registers(call: AttentionCall, config: AmdConfig) -> int:
    """The largest estimate at which clang does not spill."""
    wide = max(padded(call.head_dim), padded(call.head_dim_v)) > 128
    return MAX_REGISTERS_WIDE if wide or config.threads > 256 else MAX_REGISTERS


def is_valid_amd(call: AttentionCall, config: AmdConfig) -> bool:
    """Whether the configuration fits: whole rows for each warp, steps of the head dim, shared memory, registers."""
    rows = 16
    return (
        call.dtype.itemsize == 2
        and config.num_split_q >= 1
        and config.panel_size >= 1
        and config.k_pack in (1, 2)
        and {config.qk_coalesced_width, config.v_coalesced_width} <= {4, 8}
        and 0 <= config.num_stages <= 2
        and config.threads in (64, 128, 256, 512)
        and config.block_M % (warps(call, config) * rows) == 0
        and config.block_N % 16 == 0
        and padded(call.head_dim) % (16 * config.k_pack) == 0
        and shared_bytes(call, config) <= ARCHITECTURES[call.arch].shared_bytes
        and registers(call, config) <= most_registers(call, config)
    )


def amd_preferences(call: AttentionCall) -> Iterator[AmdConfig]:
    """Configurations from the best down, as estimated; none has been measured. The first valid one is the default.

    Tiles have 128 queries in four waves, and as many keys as leave room for a second block per multiprocessor.
    """
    k_pack = 2 if padded(call.head_dim) % 32 == 0 else 1
    for block_M, block_N, threads in (
        (128, 64, 256),
        (128, 32, 256),
        (64, 64, 256),
        (64, 32, 256),
        (64, 16, 256),
        (32, 16, 128),
    ):
        yield AmdConfig(block_M, block_N, threads=threads, k_pack=k_pack)
