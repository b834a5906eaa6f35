"""Groups that are shared in the last wave alone.

Where the blocks of a call fill some waves and little of one more, only the last keys' groups are shared: the main
kernel is launched for the first keys with a block for each group, and then for the others with several blocks for each.
What the parts of dk and dv take, in memory and traffic, shrinks with the keys.

The second launch starts only when the first has ended. So the first one's blocks must all take equally long: all
queries see its keys. Under a causal mask such keys are those up to the first query's position.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import torch

from .....call.facts import CAUSAL, BackwardCall
from ..defaults import MainConfig, default
from .choice import chosen, is_known, may_split, most_shares, multiprocessors, split, work
from .waves import LAUNCH_SECONDS, MANY_WAVES, WORTHWHILE, predicted

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
    least = WORTHWHILE * _time(call, config, q_shape, k_shape, everywhere, slots)
    for whole_keys in _cuts(call, config, q_shape, k_shape, slots):
        later = later_keys(k_shape, whole_keys)
        before = (
            _time(*whole_part(call, config, 2), q_shape, first_keys(k_shape, whole_keys), 1, slots) + LAUNCH_SECONDS
        )
        most = min(q_shape[2] // k_shape[2], most_shares(call, q_shape, later), MOST_SHARES)
        for shares in range(2, most + 1):
            time = before + _time(call, config, q_shape, later, shares, slots)
            if time < least:
                found, least = Dealt(shares, whole_keys), time
    return found


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


def _may_cut(call: BackwardCall, config: MainConfig, q_shape: torch.Size, k_shape: torch.Size, slots: int) -> bool:
    """Whether there are groups, more blocks than multiprocessors, and not too many."""
    if q_shape.numel() == 0 or k_shape.numel() == 0 or not may_split(call, config) or not is_known(call):
        return False
    blocks = -(-k_shape[1] // config.block_N) * k_shape[0] * k_shape[2]
    return q_shape[2] > k_shape[2] and slots < blocks <= MANY_WAVES * slots


def _cuts(
    call: BackwardCall, config: MainConfig, q_shape: torch.Size, k_shape: torch.Size, slots: int
) -> Iterator[int]:
    """Numbers of first keys that fill whole waves, as nearly as their tiles allow, for the last few of these."""
    batch, seqlen_k, kv_heads, _ = k_shape
    heads, tiles = batch * kv_heads, -(-seqlen_k // config.block_N)
    waves = tiles * heads // slots
    for wave in range(max(waves - LEFT_WAVES, 0) + 1, waves + 1):
        whole_keys = wave * slots // heads * config.block_N
        seen = seqlen_k - q_shape[1] + 1 if call.forward.variant == CAUSAL else seqlen_k - 1
        if 0 < whole_keys <= seen:
            yield whole_keys


def _time(
    call: BackwardCall, config: MainConfig, q_shape: torch.Size, k_shape: torch.Size, shares: int, slots: int
) -> float:
    """The predicted seconds of a call's main kernel, and of the sums of its parts."""
    groups, costs = work(call, split(call, config, min(shares, 2)), q_shape, k_shape, slots)
    return predicted(groups, shares, slots, costs)
