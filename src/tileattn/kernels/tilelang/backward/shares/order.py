"""How many kv heads' tiles of keys start together: as many as the L2 cache suits, or more for the last wave's sake.

Under a causal mask the tiles of a head differ in cost, the first being the longest. Heads follow one another, a few
side by side, so that what they read stays in the cache. But then the longest tiles of the last heads start late, and
leave most multiprocessors idle at the end: for a tenth of the time and more if there are few heads.
"""

from __future__ import annotations

import dataclasses

import torch

from .....call.facts import CAUSAL, BackwardCall
from ...host import L2_BYTES, divisors
from ..defaults import MainConfig, adds_dq
from ..hopper.config import HopperBackwardConfig
from .choice import multiprocessors, work
from .side_by_side import bytes_beside, kv_heads_side_by_side
from .waves import MANY_WAVES, run_time

# What heads side by side may read, at the most, in L2 caches. Where blocks add to dq, each head beyond FREE costs a
# part of the time, since fewer blocks share what they read, and so does each cache beyond the first. 15 calls on an
# H200 (benchmarks/results/backward/order-h200.txt); the kernels of head dims above 128 lost nothing.
MOST_CACHES, FREE, OF_HEAD, OF_CACHE = 8, 8, 0.003, 0.01
WORTHWHILE = 0.97  # another order must be predicted to save something


def heads_together(
    call: BackwardCall,
    config: MainConfig,
    q_shape: torch.Size,
    k_shape: torch.Size,
    shares: int,
    slots: int | None = None,
) -> int:
    """The number of kv heads, or of shares of their groups, whose tiles start side by side.

    Args:
        config: of the main kernel.
        shares: blocks that share a group.
        slots: multiprocessors of the device, of which each runs one block. Default: those of the current one.
    """
    kv_heads = shares * k_shape[2]
    for_cache = kv_heads_side_by_side(call, q_shape, k_shape[1], kv_heads)
    if call.forward.variant != CAUSAL or call.forward.packed or not isinstance(config, HopperBackwardConfig):
        return for_cache
    slots = multiprocessors() if slots is None else slots
    groups, costs = work(call, config, q_shape, k_shape, slots)
    heads = q_shape[0] * kv_heads
    if len(groups.tiles) * heads > MANY_WAVES * slots:
        return for_cache
    caches = bytes_beside(call, q_shape, kv_heads) / L2_BYTES  # that one reads

    def time(side: int) -> float:
        ordered = dataclasses.replace(groups, side_by_side=lambda _: side)
        crowding = OF_HEAD * max(side - FREE, 0) + OF_CACHE * max(side * caches - 1, 0)
        return run_time(ordered, shares, slots, costs) * (1 + crowding * adds_dq(call))

    more = [side for side in divisors(heads) if for_cache < side <= MOST_CACHES / caches]
    times = {side: time(side) for side in (for_cache, *more)}
    best = min(times, key=lambda side: times[side])
    return best if times[best] <= WORTHWHILE * times[for_cache] else for_cache
