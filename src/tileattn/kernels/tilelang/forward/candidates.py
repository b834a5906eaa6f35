"""Configurations of the Hopper schedule that are worth measuring for a call; see benchmarks/tune_defaults.py."""

from __future__ import annotations

from dataclasses import replace

from ....call.facts import AttentionCall
from ....variant.program import program
from ..architecture import OTHER_REGISTERS, SCORE_REGISTERS
from .config import HopperConfig, hopper_dims, is_valid

MAX_KEYS, MIN_KEYS = 192, 64
CLUSTER_REGISTERS = 48  # of the producer, which has more to do in a cluster; with 40 ptxas spills 12 bytes


def tile_registers(call: AttentionCall, config: HopperConfig) -> int:
    """Registers per consumer thread that hold tiles: O, scores, weights, and Q where it is kept there."""
    rows = 64 / 128  # of the tile's rows, per thread of a warpgroup
    per_word = 4 // call.dtype.itemsize
    head_dim, head_dim_v = hopper_dims(call)
    o, scores = head_dim_v, config.block_N
    weights = 0 if config.weights_in_shared else config.block_N / per_word
    q = head_dim / per_word if config.q_in_registers else 0
    return int(rows * (o + scores + weights + q))


def fits_registers(call: AttentionCall, config: HopperConfig) -> bool:
    """An estimate; the lowering tests ask ptxas about those that become defaults."""
    others = OTHER_REGISTERS + SCORE_REGISTERS * (program(call.variant).score is not None)
    return tile_registers(call, config) + others <= config.consumer_registers()


def hopper_candidates(call: AttentionCall, short: bool) -> list[HopperConfig]:
    """About 4 to 10 configurations, each valid and without an expected spill.

    Two warpgroups, with Q in shared memory or in registers: the widest tile of keys that fits, and a narrower one, of
    which a mask wastes less. Three warpgroups: the widest. One, for short sequences: up to 128 keys. The first of them
    also without ping-pong. Without a mask, for long sequences: the first two also in clusters. (Under a mask that
    reaches further for one block of a cluster, the other would wait.)
    """
    configs = []
    for q_in_registers in (False, True):
        widths = _widths(call, 128, q_in_registers)
        narrower = 128 if widths and widths[0] > 128 else widths[0] * 7 // 8 // 16 * 16 if widths else 0
        configs += [_deepest(call, 128, width, q_in_registers) for width in widths if width in (widths[0], narrower)]
        configs += [_deepest(call, 192, width, q_in_registers) for width in _widths(call, 192, q_in_registers)[:1]]
    if short:
        configs += [_deepest(call, 64, width, False) for width in _widths(call, 64, False) if width <= 128][:1]
    elif not call.variant:
        clusters = [replace(config, cluster=2, producer_registers=CLUSTER_REGISTERS) for config in configs]
        configs += [config for config in clusters if _fits(call, config)][:2]
    return [*configs, replace(configs[0], ping_pong=False)]


def _widths(call: AttentionCall, block_M: int, q_in_registers: bool) -> list[int]:
    """Of tiles of keys that fit twice; in descending order."""
    return [
        block_N
        for block_N in range(MAX_KEYS, MIN_KEYS - 1, -16)
        if _fits(call, HopperConfig(block_M, block_N, q_in_registers=q_in_registers))
    ]


def _deepest(call: AttentionCall, block_M: int, block_N: int, q_in_registers: bool) -> HopperConfig:
    """With three stages where they leave O its own memory, else two."""
    two = HopperConfig(block_M, block_N, q_in_registers=q_in_registers, ping_pong=block_M > 64)
    three = replace(two, num_stages=3)
    return three if _fits(call, three) and three.output_apart(call) else two


def _fits(call: AttentionCall, config: HopperConfig) -> bool:
    return is_valid(call, config) and fits_registers(call, config)
