"""Tile sizes of the backward kernels for AMD's CDNA 3 (gfx942: MI300X), their limits, preferences and candidates."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from .....call.facts import AttentionCall
from ...architecture import ARCHITECTURES, padded_finely
from ..config import BackwardConfig, is_valid


@dataclass(frozen=True)
class AmdBackwardConfig(BackwardConfig):
    """The generic schedule's configuration, with options of AMD's matrix cores and memory.

    Attributes:
        k_pack: steps of 16 along the head dim in one read of the operands of S and dP from shared memory.
        coalesced_width: elements of a row of Q, K, V or dO that a thread copies at a time: 4 or 8.
    """

    k_pack: int = 2
    coalesced_width: int = 8


def k_pack_of(call: AttentionCall) -> int:
    """The largest `k_pack` of the call: 2 if both head dims are multiples of 32, else 1."""
    return 2 if padded_finely(call.head_dim) % 32 == padded_finely(call.head_dim_v) % 32 == 0 else 1


def is_valid_amd_backward(call: AttentionCall, config: AmdBackwardConfig) -> bool:
    """Whether the main kernel fits: :func:`.config.is_valid`, and at least 16 x 16 of each product for each wave."""
    waves = config.threads // ARCHITECTURES[call.arch].warp
    narrower = min(padded_finely(call.head_dim), padded_finely(call.head_dim_v))
    of_scores, of_keys = (config.block_N // 16 * (size // 16) for size in (config.block_M, narrower))
    of_queries = config.block_M // 16 * (padded_finely(call.head_dim) // 16)
    return (
        call.arch.startswith("gfx")
        and config.k_pack in (1, k_pack_of(call))
        and config.coalesced_width in (4, 8)
        and config.num_stages in (0, 1, 2)
        and config.threads in (64, 128, 256, 512)
        and min(of_scores, of_keys, of_queries) >= waves
        and is_valid(call, config)
    )


def amd_preferences(call: AttentionCall) -> Iterator[AmdBackwardConfig]:
    """Configurations of the main kernel from the best down, as estimated; none has been measured."""
    for block_M, block_N in ((64, 64), (32, 64), (16, 32)):
        yield AmdBackwardConfig(block_M, block_N, 0, 128, k_pack=k_pack_of(call))


def amd_queries_preferences(call: AttentionCall) -> Iterator[AmdBackwardConfig]:
    """The same for the kernel for dq alone."""
    for block_M, block_N, threads in ((64, 32, 128), (32, 16, 64)):
        yield AmdBackwardConfig(block_M, block_N, 0, threads, k_pack=k_pack_of(call))


def amd_candidates(call: AttentionCall) -> Iterator[AmdBackwardConfig]:
    """The main kernel's configurations for the tuner, whether or not they fit into registers."""
    sizes = itertools.product((128, 64, 32, 16), (128, 64, 32), (0, 1), (128, 256))
    for block_M, block_N, num_stages, threads in sizes:
        yield AmdBackwardConfig(block_M, block_N, num_stages, threads, k_pack=k_pack_of(call))
    for config in amd_preferences(call):
        yield AmdBackwardConfig(config.block_M, config.block_N, 0, config.threads, k_pack_of(call), coalesced_width=4)
