"""How the forward schedule for AMD's CDNA 3 (gfx942: MI300X) cuts its work; its parameters, validity and space.

The parameters are those of TileLang's FlashAttention on MI300X (tile-ai/tilelang, examples/amd), which searches 108
combinations of five of them; see :func:`published_space`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from .....call.facts import AttentionCall
from .....variant.program import program
from ...architecture import ARCHITECTURES, padded

WAVE = 64
# Of a thread. There are as many again for accumulators, but the softmax cannot reach those: with an estimate of 304
# clang keeps 272 bytes per thread in scratch memory, with 208 nothing.
MAX_REGISTERS = 256
# ... of head dims above 128, whose rows take more on their way: estimates of 200 and 224 were too many, 188 was not.
MAX_REGISTERS_WIDE = 192
# What a thread needs besides the tiles, as for NVIDIA's kernels.
OTHER_REGISTERS, SCORE_REGISTERS = 48, 8


@dataclass(frozen=True)
class AmdConfig:
    """How the AMD schedule cuts its work.

    Attributes:
        block_M: rows of Q in a tile.
        block_N: rows of K and V in a tile.
        num_split_q: blocks for each (batch, head) pair; each walks over every num_split_q-th tile of queries. A number
            at run time: configurations that differ in nothing else share a kernel.
        threads: per block.
        num_stages: tiles of K and V in flight; with 0 and 1 they are loaded where they are needed, in one buffer.
        enable_rasterization: whether blocks are renumbered, so that those that run together share keys in the L2 cache.
        panel_size: (batch, head) pairs that are renumbered together.
        k_pack: steps of 16 along the head dim that one read of Q and K from shared memory takes: 1 or 2.
        qk_coalesced_width: elements of a row of Q or K that a thread copies at a time: 4 or 8.
        v_coalesced_width: the same of V.
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
        """Of what the kernel is compiled from; without num_split_q."""
        return str(dataclasses.replace(self, num_split_q=0))


def warps(call: AttentionCall, config: AmdConfig) -> int:
    """Of a block: waves of 64 threads; warps of 32 where the schedule is lowered for NVIDIA's GPUs, to be checked."""
    return config.threads // ARCHITECTURES[call.arch].warp


def shared_bytes(call: AttentionCall, config: AmdConfig) -> int:
    """Shared memory of one block: Q, the stages of K and V, and the workspaces of the row reductions.

    TileLang 0.1.15 gives the maximum and the sum a float per thread each, although their rows stay within a warp.
    """
    head_dim, head_dim_v = padded(call.head_dim), padded(call.head_dim_v)
    keys = max(config.num_stages, 1) * config.block_N * (head_dim + head_dim_v)
    return 2 * (config.block_M * head_dim + keys) + 2 * 4 * config.threads


def registers(call: AttentionCall, config: AmdConfig) -> int:
    """Per thread, estimated: O and scores in float32, weights in 16 bits, and the rest."""
    tile = config.block_M * (2 * padded(call.head_dim_v) + 3 * config.block_N) // 2 // config.threads
    return tile + OTHER_REGISTERS + SCORE_REGISTERS * (program(call.variant).score is not None)


def most_registers(call: AttentionCall) -> int:
    """Up to which estimate clang keeps everything of a thread in registers."""
    wide = max(padded(call.head_dim), padded(call.head_dim_v)) > 128
    return MAX_REGISTERS_WIDE if wide else MAX_REGISTERS


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
        and registers(call, config) <= most_registers(call)
    )


def published_space() -> Iterator[AmdConfig]:
    """The 108 configurations that TileLang's example for MI300X searches (with one panel size); most fit no call."""
    space = itertools.product((64, 128, 256), (64, 128, 256), (64, 128, 256), (128, 256), (0, 1))
    for block_M, block_N, num_split_q, threads, num_stages in space:
        yield AmdConfig(block_M, block_N, num_split_q, threads, num_stages)


def amd_preferences(call: AttentionCall) -> Iterator[AmdConfig]:
    """From the best down, as far as that can be told without the machine; the first that is valid counts.

    Tiles of 128 queries in four waves; of keys as many as leave room for a second block beside the first, if any do.
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


def amd_candidates(call: AttentionCall) -> list[AmdConfig]:
    """What the tuner measures: the published space, smaller tiles for wide heads, and blocks in their own order."""
    k_pack = 2 if padded(call.head_dim) % 32 == 0 else 1
    smaller = (
        AmdConfig(block_M, block_N, threads=threads, num_stages=num_stages)
        for block_M, block_N, threads, num_stages in itertools.product((32, 64, 128), (16, 32), (128, 256), (0, 1))
    )
    found = [dataclasses.replace(config, k_pack=k_pack) for config in (*published_space(), *smaller)]
    others = [dataclasses.replace(config, enable_rasterization=False) for config in amd_preferences(call)]
    others += [dataclasses.replace(config, v_coalesced_width=8) for config in amd_preferences(call)]
    return [config for config in dict.fromkeys([*found, *others]) if is_valid_amd(call, config)]
