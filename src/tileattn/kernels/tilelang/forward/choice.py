"""Which of a call's kernels takes least time for given sizes, by a model of waves.

A kernel's tasks are tiles of queries, which its blocks draw from a queue. A task costs its rows times the keys that
they see, and some more for its beginning and end. The launch takes as long as

    all tasks together, shared by the blocks;    or, where that is more,
    as many of the cheapest tasks as the block has that gets most.

The second decides where few tasks cost nearly the same: without a mask, or with fewer queries than keys. 288 tasks of
192 queries take 132 blocks three turns, as 384 tasks of 128 do, and each turn takes 1.5 times as long.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ....call.facts import AttentionCall
from .config import HopperConfig
from .defaults import Config, default, row_dims, wide
from .wide import is_plain

MULTIPROCESSORS = 132  # of an H100 or H200
GAIN = 0.98  # another kernel than the table's is taken if it takes less than this part of the time


class Speed(NamedTuple):
    """A kernel beside another.

    Attributes:
        keys: keys in a unit of time, on long sequences.
        overhead: what a tile costs besides the keys that it sees, as a number of keys.
    """

    keys: float
    overhead: int


# The short row of the table is the measure. The others were measured on an H200 (docs/design/forward.md); what waves
# cost by the model is taken out.
SHORT = Speed(1.0, 150)
CLUSTERED = Speed(1.02, 280)
SPEEDS = {
    (64, 64, "masked", "long"): Speed(1.17, 350),
    (64, 64, "full", "long"): Speed(1.18, 200),
    (96, 96, "masked", "wide"): Speed(1.13, 250),
    (96, 96, "full", "long"): Speed(1.12, 200),
    (128, 128, "full", "wide"): Speed(1.13, 340),
    (128, 128, "masked", "wide"): Speed(1.11, 360),
}


def chosen(call: AttentionCall, q_shape: torch.Size, k_shape: torch.Size) -> Config:
    """The configuration for these sizes: of (batch, seqlen, heads, head_dim)."""
    usual = default(call, min(q_shape[1], k_shape[1]))
    if not is_plain(call) or not isinstance(usual, HopperConfig):
        return usual
    times = {config: launch_time(config, speed, call, q_shape, k_shape) for config, speed in speeds(call).items()}
    best = min(times, key=lambda config: times[config])
    return best if times[best] < GAIN * times.get(usual, 0.0) else usual


def speeds(call: AttentionCall) -> dict[HopperConfig, Speed]:
    """The kernels of a plain call."""
    dims = row_dims(call.head_dim, call.head_dim_v)
    if dims is None:
        return {}
    kind = "masked" if call.variant else "full"
    found: dict[HopperConfig, Speed] = {}
    for lengths, config in (("short", default(call, 1)), ("long", default(call)), ("wide", wide(call))):
        if isinstance(config, HopperConfig) and config not in found:
            beside = CLUSTERED if config.cluster > 1 else SHORT
            found[config] = SPEEDS.get((*dims, kind, lengths), beside)
    return found


def launch_time(
    config: HopperConfig, speed: Speed, call: AttentionCall, q_shape: torch.Size, k_shape: torch.Size
) -> float:
    """The time of a launch by the model, in no particular unit."""
    batch, seqlen_q, heads, _ = q_shape
    seqlen_k = k_shape[1]
    rows = config.cluster * config.block_M
    tiles = -(-seqlen_q // rows)
    blocks = MULTIPROCESSORS // config.cluster
    if call.variant:
        ends = [min(seqlen_k, max((tile + 1) * rows + seqlen_k - seqlen_q, 1)) for tile in range(tiles)]
    else:
        ends = [seqlen_k] * tiles
    tasks = [-(-end // config.block_N) * config.block_N + speed.overhead for end in ends]
    shared = sum(tasks) * batch * heads / blocks
    turns = -(-tiles * batch * heads // blocks)
    return config.block_M * max(shared, turns * min(tasks), max(tasks)) / speed.keys
