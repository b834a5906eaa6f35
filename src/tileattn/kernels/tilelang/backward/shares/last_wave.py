"""Groups that are shared in the last wave alone.

Where the blocks of a call fill some waves and little of one more, only the last keys' groups are shared: the main
kernel is launched for the first keys with a block for each group, and then for the others with several blocks for each.
What the parts of dk and dv take, in memory and traffic, shrinks with the keys.

The second launch starts only when the first has ended. So the first one's blocks must all take equally long: all
queries see its keys. Under a causal mask such keys are those up to the first query's position.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from .....call.facts import CAUSAL, BackwardCall
from ..defaults import MainConfig, default
from ..hopper.config import HopperWideConfig
from .choice import chosen, is_known, is_modelled, most_shares, multiprocessors, split, whole_blocks, work
from .waves import LAUNCH_SECONDS, WORTHWHILE, predicted

LEFT_WAVES = 2  # for how many waves' keys groups may be shared: the last one, and the one before
MOST_SHARES = 8  # that are tried: with them a wave's idle part is an eighth of a block's time


class Dealt(NamedTuple):
    """How the heads of groups are dealt to blocks.

    Attributes:
        shares: blocks for each tile of keys of a kv head, of which each has a share of the group.
        whole_keys: how many keys, from the first on, have one block for a whole group instead.
    """

    shares: int = 1
    whole_keys: int = 0


def dealt(
    call: BackwardCall, config: MainConfig, q_shape: torch.Size, k_shape: torch.Size, slots: int | None = None
) -> Dealt:
    """What the model of waves prefers, with a workspace of at most q's size in float32.

    Args:
        config: of the main kernel without shares.
        slots: multiprocessors of the device, of which each runs one block. Default: those of the current one.
    """
    slots = multiprocessors() if slots is None else slots
    everywhere = chosen(call, config, q_shape, k_shape, slots)
    found = Dealt(everywhere)
    if not _may_cut(call, config, q_shape, k_shape, slots):
        return found
    main = split(call, config, min(everywhere, 2))
    least = WORTHWHILE * _time(call, main, q_shape, k_shape, slots)(everywhere)
    of_first, shared = whole_part(call, config, 2), split(call, config, 2)
    for whole_keys in _cuts(call, config, q_shape, k_shape, slots):
        later = later_keys(k_shape, whole_keys)
        before = LAUNCH_SECONDS + _time(*of_first, q_shape, first_keys(k_shape, whole_keys), slots)(1)
        of_later = _time(call, shared, q_shape, later, slots)
        most = min(q_shape[2] // k_shape[2], most_shares(call, q_shape, later), MOST_SHARES)
        for shares in range(2, most + 1):
            time = before + of_later(shares)
            if time < least:
                found, least = Dealt(shares, whole_keys), time
    return found


def is_cut(config: MainConfig) -> bool:
    """Whether the last wave of this kernel is shared alone, for some sizes.

    That of wide heads is not: dq's kernel runs beside it, and fills what a last wave leaves idle. A cut that the model
    predicted to take 0.94 of the main kernel's time took 1.02 of the pass's (an H200,
    benchmarks/results/backward/wide-shares-h200.txt).
    """
    return not isinstance(config, HopperWideConfig)


def whole_part(call: BackwardCall, config: MainConfig, shares: int) -> tuple[BackwardCall, MainConfig]:
    """The call and the configuration of the main kernel for the first keys. It adds to the same sums of dq.

    config, shares: of the main kernel without shares, and how many the later keys have.
    """
    if call.forward.variant != CAUSAL:
        return call, config
    unmasked = dataclasses.replace(call, forward=dataclasses.replace(call.forward, variant=""))
    if default(unmasked).block_M == split(call, config, shares).block_M:
        return unmasked, default(unmasked)
    return unmasked, dataclasses.replace(split(call, config, shares), split=False)


def first_keys(k_shape: torch.Size, whole_keys: int) -> torch.Size:
    """The shape of the keys whose groups are not shared."""
    return torch.Size((k_shape[0], whole_keys, *k_shape[2:]))


def later_keys(k_shape: torch.Size, whole_keys: int) -> torch.Size:
    """The shape of the keys whose groups are shared, if any are."""
    return first_keys(k_shape, k_shape[1] - whole_keys)


def most_whole_keys(call: BackwardCall, q_shape: torch.Size, k_shape: torch.Size) -> int:
    """How many keys, from the first on, may have whole groups: all queries see them, and a key is left to share."""
    if not is_known(call):
        return 0
    hidden = q_shape[1] - 1 if call.forward.variant == CAUSAL else 0  # from the first query
    return k_shape[1] - max(hidden, 1)


def _may_cut(call: BackwardCall, config: MainConfig, q_shape: torch.Size, k_shape: torch.Size, slots: int) -> bool:
    """Whether there are groups, and a tile of keys that all queries see."""
    if not is_cut(config) or not is_modelled(call, config, q_shape, k_shape, slots):
        return False
    return q_shape[2] > k_shape[2] and most_whole_keys(call, q_shape, k_shape) >= config.block_N


def _cuts(
    call: BackwardCall, config: MainConfig, q_shape: torch.Size, k_shape: torch.Size, slots: int
) -> Iterator[int]:
    """Numbers of first keys that fill whole waves, as nearly as their tiles allow, for the last few of these."""
    heads = k_shape[0] * k_shape[2]
    waves = whole_blocks(config, k_shape) // slots
    for wave in range(max(waves - LEFT_WAVES, 0) + 1, waves + 1):
        whole_keys = wave * slots // heads * config.block_N
        if 0 < whole_keys <= most_whole_keys(call, q_shape, k_shape):
            yield whole_keys


def _time(
    call: BackwardCall, config: MainConfig, q_shape: torch.Size, k_shape: torch.Size, slots: int
) -> Callable[[int], float]:
    """Given the number of shares, the predicted seconds of a main kernel and of the sums of its parts."""
    groups, costs = work(call, config, q_shape, k_shape, slots)
    return lambda shares: predicted(groups, shares, slots, costs)
