"""The tuner's search space for the main kernel of a backward pass, and the kernels of each configuration.

It holds only configurations that compute dq in the same kernel as the default, the main kernel or one of its own. The
kernel that runs first is then the same for all.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from ....call.facts import AttentionCall, BackwardCall
from ....tuner.space import Space
from .. import tuned
from ..architecture import OTHER_REGISTERS, SCORE_REGISTERS, padded_finely
from ..tuned import Sizes
from .amd.config import AmdBackwardConfig, amd_candidates, is_valid_amd_backward
from .config import BackwardConfig, is_valid, kept_derivatives, read_together
from .defaults import MainConfig, default
from .hopper.config import HopperBackwardConfig, HopperWideConfig
from .library import AnyBackwardJob
from .operand_gradients import paths

SCHEDULES = {
    each.__name__: each for each in (BackwardConfig, AmdBackwardConfig, HopperBackwardConfig, HopperWideConfig)
}


def fits(call: BackwardCall, config: MainConfig) -> bool:
    """Whether a configuration may take the place of the default."""
    forward, present = read_together(call), default(call)
    if config.split:
        return False  # whether groups are split depends on sizes: shares/choice.py decides
    if isinstance(config, AmdBackwardConfig):
        return is_valid_amd_backward(forward, config)
    if isinstance(config, BackwardConfig):
        return isinstance(present, BackwardConfig) and is_valid(forward, config)
    return not isinstance(present, BackwardConfig) and config.adds_dq == present.adds_dq and config.is_valid(forward)


def tuned_config(call: BackwardCall, sizes: Sizes) -> MainConfig | None:
    """The tuner's result for a call; None where there is none, or it is not valid (any more)."""
    return tuned.tuned_config(call.forward.arch, call, sizes, SCHEDULES, functools.partial(fits, call))


def backward_space(
    call: BackwardCall,
    sizes: Sizes,
    prepare: Callable[[MainConfig], Callable[..., Any]],
    jobs: Callable[[MainConfig], Sequence[AnyBackwardJob]],
) -> Space:
    """The search space of a call.

    Args:
        prepare: makes a function of each configuration.
        jobs: the kernels that this function launches.
    """
    present = default(call)
    return Space(
        call=str(call),
        sizes=sizes,
        default=present,
        candidates=lambda: [config for config in candidates(call) if config != present],
        compile=lambda configs: tuned.compiled({config: jobs(config) for config in configs}),
        prepare=prepare,
        known=tuned_config(call, sizes) is not None,
        gradients=True,
    )


def candidates(call: BackwardCall) -> list[MainConfig]:
    """Valid configurations that registers have room for."""
    present = default(call)
    configs = _generic(call) if isinstance(present, BackwardConfig) else _hopper(call, present)
    return [config for config in dict.fromkeys(configs) if fits(call, config)]


def _hopper(call: BackwardCall, present: MainConfig) -> Iterator[MainConfig]:
    if isinstance(present, HopperWideConfig):
        yield HopperWideConfig(late_dp=True)
    wide = max(padded_finely(call.forward.head_dim), padded_finely(call.forward.head_dim_v)) > 128
    # Registers that gradients of tensors take bound the tile from above; wide heads have been tried at 32 queries.
    largest = present.block_M if paths(call) else 32 if wide else 128
    stages = (2, 3, 4)
    for block_M, num_stages, late_dp in itertools.product(range(largest, 31, -16), stages, (False, True)):
        if isinstance(present, HopperBackwardConfig) and present.late_dp and not late_dp:
            continue
        buffers = present.ds_buffers if isinstance(present, HopperBackwardConfig) else 0
        words = isinstance(present, HopperBackwardConfig) and present.mask_words
        unpadded = isinstance(present, HopperBackwardConfig) and present.unpadded
        config = HopperBackwardConfig(
            block_M,
            num_stages=num_stages,
            ds_buffers=buffers,
            late_dp=late_dp,
            mask_words=words,
            unpadded=unpadded,
        )
        if isinstance(present, HopperBackwardConfig) and present.tile_stages:
            for tile_stages in (num_stages, 1):
                yield replace(config, tile_stages=tile_stages, gradient_bytes=present.gradient_bytes)
        else:
            yield config


def _generic(call: BackwardCall) -> Iterator[BackwardConfig]:
    forward, kept = read_together(call), kept_derivatives(call)
    if forward.arch.startswith("gfx"):
        yield from (config for config in amd_candidates(forward) if registers(forward, config, kept) <= 512)
        return
    tiles = itertools.product((128, 64, 32, 16), (128, 64, 32), (2, 1, 3), (256, 128))
    for block_M, block_N, num_stages, threads in tiles:
        config = BackwardConfig(block_M, block_N, num_stages, threads)
        if registers(forward, config, kept) <= 255:
            yield config


def registers(call: AttentionCall, config: BackwardConfig, kept: int) -> int:
    """Per thread, estimated: dK, dV, dQ, S and dP in float32, P and dS in 16 bits, and derivatives that are kept."""
    head_dim, head_dim_v = padded_finely(call.head_dim), padded_finely(call.head_dim_v)
    elements = config.block_N * (head_dim + head_dim_v) + config.block_M * head_dim
    elements += (3 + kept) * config.block_N * config.block_M
    return elements // config.threads + OTHER_REGISTERS + SCORE_REGISTERS * (kept > 0)
