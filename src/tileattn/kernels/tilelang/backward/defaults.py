"""The default configuration, and with it the schedule, of each kernel of a backward call."""

from __future__ import annotations

import dataclasses
import functools

from ....call.facts import CAUSAL, BackwardCall
from .amd.config import amd_preferences, amd_queries_preferences, is_valid_amd_backward
from .config import (
    BackwardConfig,
    Part,
    default_queries,
    is_valid,
    is_valid_queries,
    kept_derivatives,
    part_of,
    preferences,
    read_together,
)
from .hopper.config import HopperBackwardConfig, HopperQueriesConfig, HopperWideConfig
from .hopper.preferences import hopper_preferences, queries_preferences
from .operand_gradients import paths

# Queries up to which sequences count as short. At their ends, under a causal mask, tiles of 80 queries hide more scores
# than tiles of 64. Up to so many queries the scores of all visited tiles are counted, and decide between the two
# (shares/choice.py, `of_lengths`); beyond, the ends matter little and tiles always have 80.
SHORT = 4096

MainConfig = BackwardConfig | HopperBackwardConfig | HopperWideConfig
QueriesConfig = BackwardConfig | HopperQueriesConfig


@functools.lru_cache(maxsize=1024)
def default(call: BackwardCall) -> MainConfig:
    """The main kernel's configuration: the first valid one of Hopper, AMD or generic schedules."""
    forward = read_together(call)
    for config in hopper_preferences(forward, paths(call), not call.deterministic):
        if config.is_valid(forward):
            return config
    if forward.arch.startswith("gfx"):
        for amd in amd_preferences(forward):
            if is_valid_amd_backward(forward, amd):
                return amd
    for generic in preferences(forward, kept_derivatives(call)):
        if is_valid(forward, generic):
            return generic
    raise NotImplementedError(f"no tile of the backward kernel fits {forward}")


def short_default(call: BackwardCall) -> MainConfig | None:
    """The other main kernel that a call may get up to `SHORT` queries: with 64 in a tile where the default has 80.

    None if there is no other. Lengths decide between the two (shares/choice.py, `of_lengths`).
    """
    config = default(call)
    if isinstance(config, HopperBackwardConfig) and config.block_M == 80 and call.forward.variant == CAUSAL:
        return dataclasses.replace(config, block_M=64)
    return None


@functools.lru_cache(maxsize=1024)
def queries_default(call: BackwardCall) -> QueriesConfig:
    """The configuration of the kernel for dq alone."""
    forward = read_together(call)
    for config in queries_preferences(forward):
        if config.is_valid(forward):
            return config
    if forward.arch.startswith("gfx"):
        for amd in amd_queries_preferences(forward):
            if is_valid_queries(forward, amd):
                return amd
    return default_queries(call)


def listed_as(main: MainConfig, queries: QueriesConfig) -> QueriesConfig:
    """The configuration of the kernel for dq alone that follows a main kernel: with lists of tiles if that has them."""
    if not isinstance(queries, HopperQueriesConfig) or isinstance(main, BackwardConfig):
        return queries
    return dataclasses.replace(queries, listed=main.listed)


def adds_dq(call: BackwardCall) -> bool:
    """Whether the main kernel adds up dq; else a kernel for dq alone follows it."""
    config = default(call)
    return not call.deterministic if isinstance(config, BackwardConfig) else config.adds_dq


def prepared(call: BackwardCall) -> Part:
    """What a block of prepare.py takes; in a packed call of the tiles in the list that a later kernel has as well.

    That of the kernel for dq alone, if its tiles are whole tiles of the main kernel, which reads what is prepared by
    tiles of its own; else that of finish.py.
    """
    if not call.forward.packed:
        return Part()
    tile = default(call).block_M
    if not adds_dq(call) and queries_default(call).block_M % tile == 0:
        tile = queries_default(call).block_M
    return part_of(tile)


def finished(call: BackwardCall, config: MainConfig) -> Part:
    """What a block of finish.py takes, after a main kernel of this configuration."""
    if isinstance(config, HopperBackwardConfig):
        return Part(config.block_M)
    return part_of(config.block_M) if call.forward.packed else Part()
