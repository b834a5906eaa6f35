"""The tuner's search space for a forward call: configurations that fit, before any is compiled."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from ....call.facts import AttentionCall
from ....tuner.space import Space
from ....variant.program import program
from .. import tuned
from ..architecture import ARCHITECTURES, OTHER_REGISTERS, SCORE_REGISTERS, padded
from ..tuned import Sizes
from .amd.config import AmdConfig
from .amd.space import amd_candidates, distinct
from .candidates import CLUSTER_REGISTERS, fits_registers, hopper_candidates
from .config import ForwardConfig, HopperConfig, is_valid, shared_bytes
from .defaults import SHORT, Config, fits
from .library import Job

SCHEDULES = {each.__name__: each for each in (ForwardConfig, HopperConfig, AmdConfig)}

# As many as sixteen cores compile within a minute.
MOST = 108
# Of a multiprocessor: registers of 32 bits, and warps below which its schedulers idle; and registers of a thread.
REGISTERS, FEWEST_WARPS, MAX_REGISTERS = 65536, 4, 255


def tuned_config(call: AttentionCall, sizes: Sizes) -> Config | None:
    """The tuner's result for a call; None where there is none, or it is not valid (any more)."""
    return tuned.tuned_config(call.arch, call, sizes, SCHEDULES, functools.partial(fits, call))


def forward_space(
    call: AttentionCall,
    sizes: Sizes,
    default: Config,
    prepare: Callable[[Config], Callable[..., object]],
    launched: Callable[[Config], Config] = lambda config: config,
) -> Space:
    """The search space of a call.

    Args:
        prepare: makes a function of each configuration.
        launched: the configuration that this function launches: with lists of tiles or not (tile_lists.py).
    """
    return Space(
        call=str(call),
        sizes=sizes,
        default=default,
        candidates=lambda: [config for config in candidates(call, sizes) if config != default],
        compile=lambda configs: tuned.compiled(jobs(call, configs, launched)),
        prepare=prepare,
        known=tuned_config(call, sizes) is not None,
    )


def jobs(
    call: AttentionCall, configs: Sequence[Config], launched: Callable[[Config], Config] = lambda config: config
) -> dict[Config, list[Job]]:
    """The kernel of each configuration.

    The default first, with which the others are compared; then large tiles, which take longest, so that no process
    begins one when the others are done.
    """
    first, *rest = configs
    rest.sort(key=lambda config: config.block_M * config.block_N, reverse=True)
    return {config: [Job(call, launched(config))] for config in (first, *rest)}


def candidates(call: AttentionCall, sizes: Sizes) -> list[Config]:
    """Valid configurations, at most `MOST` of them; what was worth measuring for the table of defaults comes first."""
    _, seqlen_q, seqlen_k, _ = sizes
    if call.arch.startswith("gfx"):
        return distinct([config for config in amd_candidates(call) if _suits(config, sizes)], seqlen_q)
    configs: list[Config] = []
    if call.arch == "sm_90a" and call.aligned:
        short = min(seqlen_q, seqlen_k) <= SHORT
        first = hopper_candidates(call, short) if _has_hopper_candidates(call) else []
        configs += [*first, *_thinned(list(_hopper(call)), MOST - len(first))]
    if call.dtype.itemsize == 2:
        configs += _thinned(list(_generic(call)), MOST)
    return list(dict.fromkeys(config for config in configs if _suits(config, sizes)))[:MOST]


def _has_hopper_candidates(call: AttentionCall) -> bool:
    """Whether a tile of 128 queries by 64 keys fits, with which the list for the table begins."""
    narrowest = HopperConfig(128, 64)
    return is_valid(call, narrowest) and fits_registers(call, narrowest)


def _hopper(call: AttentionCall) -> Iterator[HopperConfig]:
    clusters = (1,) if call.variant else (1, 2)  # a mask that reaches further for one block keeps the other waiting
    threshold = 4.0 if call.dtype.itemsize == 1 else 8.0
    sizes = itertools.product((192, 128, 64), range(256, 47, -16), (3, 2, 4))
    flags = list(itertools.product((False, True), (True, False), clusters))
    for (block_M, block_N, stages), (in_registers, ping_pong, cluster) in itertools.product(sizes, flags):
        if (ping_pong and block_M == 64) or (in_registers and call.dtype.itemsize == 1):
            continue
        registers = CLUSTER_REGISTERS if cluster > 1 or call.dtype.itemsize == 1 else 32
        config = HopperConfig(
            block_M, block_N, stages, in_registers, ping_pong, threshold, producer_registers=registers, cluster=cluster
        )
        # Three warpgroups leave too few registers for wide heads' weights.
        in_shared = block_M == 192 and ping_pong and not in_registers and call.dtype.itemsize == 2
        for each in (config, replace(config, weights_in_shared=True))[: 1 + in_shared]:
            if is_valid(call, each) and fits_registers(call, each):
                yield each


def _generic(call: AttentionCall) -> Iterator[ForwardConfig]:
    for block_M, block_N, depth, threads in itertools.product((128, 64), (128, 96, 64, 32), (2, 1, 3), (256, 128)):
        config = ForwardConfig(block_M, block_N, depth, threads)
        if is_valid(call, config) and fits_generic(call, config):
            yield config


def fits_generic(call: AttentionCall, config: ForwardConfig) -> bool:
    """Whether tiles fit into registers, and enough warps onto a multiprocessor; estimates, before compiling."""
    arch = ARCHITECTURES[call.arch]
    # O, scores in float32 and weights in 16 bits.
    elements = config.block_M * (padded(call.head_dim_v) + config.block_N * 3 // 2)
    score = SCORE_REGISTERS * (program(call.variant).score is not None)
    registers = elements // config.threads + OTHER_REGISTERS + score
    blocks = min(arch.shared_bytes // shared_bytes(call, config), REGISTERS // (registers * config.threads))
    return registers <= MAX_REGISTERS and blocks * config.threads // 32 >= FEWEST_WARPS


def _suits(config: Config, sizes: Sizes) -> bool:
    """Whether tiles are not mostly beyond the ends of short sequences."""
    _, seqlen_q, seqlen_k, _ = sizes
    return config.block_M <= max(64, 2 * seqlen_q) and config.block_N <= max(64, 2 * seqlen_k)


def _thinned(configs: list[Config], most: int) -> list[Config]:
    """Fewer, if they are too many: first without odd widths, then without the smallest tiles."""
    if len(configs) > most:
        configs = [config for config in configs if config.block_N % 32 == 0]
    largest = sorted(configs, key=lambda config: -config.block_M * config.block_N)[:most]
    return [config for config in configs if config in largest]
