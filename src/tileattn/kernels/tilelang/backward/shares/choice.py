"""The number of shares that a call's groups of heads are split into, and the main kernels that this takes.

And the queries in a tile, where lengths decide it.
"""

from __future__ import annotations

import dataclasses

import torch

from .....call.facts import CAUSAL, BackwardCall
from .....variant.program import program
from ..amd.config import AmdBackwardConfig
from ..defaults import SHORT, MainConfig, default, short_default
from ..hopper.config import HopperBackwardConfig, HopperWideConfig
from ..hopper.preferences import plainest
from .side_by_side import kv_heads_side_by_side
from .waves import MANY_WAVES, WORTHWHILE, Costs, Groups, best_shares, costs_of, costs_of_wide, predicted, visible_tiles

# Queries in a tile of a kernel under a mask for which ptxas has no registers left if groups are split: it serialises
# the products (C7512). And the queries that the kernel takes instead.
CROWDED, UNCROWDED = 80, 64
# Tiles of 80 queries take 0.95 of the time of as many scores in tiles of 64. But under a causal mask, and where 80 does
# not divide the queries, more of their scores are hidden (35 calls, benchmarks/results/backward/tiles-h200.txt).
WIDE_TIME = 0.95
LARGEST = 2**31 - 1  # elements of dk or dv, which add.py numbers in 32 bits
# Windows, documents and the like say only in the call how many queries see a key. So many are reckoned with, and a
# split must be predicted to save more than where they are known.
SEEN, UNSURE = 1024, 0.96
HOPPER = (HopperBackwardConfig, HopperWideConfig)  # the schedules whose blocks the model knows
MULTIPROCESSORS = 132  # of an H100 SXM or H200, where kernels are compiled without the device


def of_lengths(call: BackwardCall, seqlen_q: int, seqlen_k: int) -> MainConfig | None:
    """The main kernel's configuration for a dense call of such lengths, without shares; None is the default."""
    short = short_default(call)
    if short is None or seqlen_q > SHORT:
        return None
    narrow, wide = (
        sum(visible_tiles(seqlen_q, seqlen_k, config.block_M, config.block_N, causal=True)) * config.block_M
        for config in (short, default(call))
    )
    return short if narrow < WIDE_TIME * wide else None


def split(call: BackwardCall, config: MainConfig, shares: int) -> MainConfig:
    """The configuration of the main kernel whose blocks share groups of heads; with one share, `config`.

    Raises:
        ValueError: more than one share, and a schedule without shares.
    """
    if shares == 1:
        return config
    if isinstance(config, AmdBackwardConfig):
        raise ValueError(f"shares is {shares}, and {type(config).__name__} has no shares: it must be 1")
    masked = program(call.forward.variant).allows is not None
    if isinstance(config, HopperBackwardConfig) and config.block_M == CROWDED and masked:
        config = dataclasses.replace(config, block_M=UNCROWDED)
    if isinstance(config, HopperBackwardConfig):
        config = plainest(config)
    return dataclasses.replace(config, split=True)


def most_shares(call: BackwardCall, q_shape: torch.Size, k_shape: torch.Size) -> int:
    """The most shares whose workspace takes no more memory than q would in float32; at least 1."""
    forward = call.forward
    of_keys = k_shape[0] * k_shape[1] * k_shape[2]
    if of_keys * max(forward.head_dim, forward.head_dim_v) > LARGEST:
        return 1
    return max(q_shape.numel() // (of_keys * (forward.head_dim + forward.head_dim_v)), 1)


def workspace_bytes(call: BackwardCall, k_shape: torch.Size, shares: int) -> int:
    """Bytes of the float32 parts of dk and dv."""
    dims = call.forward.head_dim + call.forward.head_dim_v
    return 0 if shares == 1 else 4 * shares * k_shape[0] * k_shape[1] * k_shape[2] * dims


def may_split(call: BackwardCall, config: MainConfig) -> bool:
    """Whether groups of heads are split for some sizes: where the model knows, or guesses, the tiles of a block.

    That is in dense calls of the Hopper schedules without score modifications and dropout: full, causal, and under
    masks that are hidden by bits (preferences.py), such as windows and documents.
    """
    forward = call.forward
    if forward.packed or forward.dropout or not isinstance(config, HOPPER) or config.listed:
        return False
    return is_known(call) or config.mask_words


def is_known(call: BackwardCall) -> bool:
    """Whether sizes alone tell the tiles of queries that see a tile of keys."""
    return call.forward.variant in ("", CAUSAL)


def is_modelled(call: BackwardCall, config: MainConfig, q_shape: torch.Size, k_shape: torch.Size, slots: int) -> bool:
    """Whether groups may be split, there is something to compute, and the last wave matters."""
    if q_shape.numel() == 0 or k_shape.numel() == 0 or not may_split(call, config):
        return False
    return whole_blocks(config, k_shape) <= MANY_WAVES * slots


def whole_blocks(config: MainConfig, k_shape: torch.Size) -> int:
    """The blocks of a main kernel without shares: one for each tile of keys of each kv head."""
    return -(-k_shape[1] // config.block_N) * k_shape[0] * k_shape[2]


def configurations(call: BackwardCall) -> tuple[MainConfig | None, ...]:
    """The main kernels that a call may get for some sizes, without the tuner; None is the default."""
    whole = dict.fromkeys((None, short_default(call)))
    splits = (split(call, config or default(call), 2) for config in whole if may_split(call, config or default(call)))
    return tuple(dict.fromkeys((*whole, *splits)))


def chosen(
    call: BackwardCall, config: MainConfig, q_shape: torch.Size, k_shape: torch.Size, slots: int | None = None
) -> int:
    """The number of shares that the model of waves prefers, with a workspace of at most q's size in float32.

    Args:
        config: of the main kernel without shares.
        slots: multiprocessors of the device, of which each runs one block. Default: those of the current one.
    """
    slots = multiprocessors() if slots is None else slots
    if not is_modelled(call, config, q_shape, k_shape, slots):
        return 1
    whole_groups, whole_costs = work(call, config, q_shape, k_shape, slots)
    whole = predicted(whole_groups, 1, slots, whole_costs)
    groups, costs = work(call, split(call, config, 2), q_shape, k_shape, slots)
    worthwhile = WORTHWHILE if is_known(call) else UNSURE
    return best_shares(groups, slots, most_shares(call, q_shape, k_shape), costs, whole, worthwhile)


def work(
    call: BackwardCall, config: MainConfig, q_shape: torch.Size, k_shape: torch.Size, slots: int
) -> tuple[Groups, Costs]:
    """What the model is given of a main kernel."""
    forward, kv_heads = call.forward, k_shape[2]

    def side_by_side(shares: int) -> int:
        return kv_heads_side_by_side(call, q_shape, k_shape[1], shares * kv_heads)

    seqlen_q = q_shape[1] if is_known(call) else min(q_shape[1], SEEN)
    causal = forward.variant == CAUSAL
    tiles = visible_tiles(seqlen_q, k_shape[1], config.block_M, config.block_N, causal)
    groups = Groups(k_shape[0], kv_heads, q_shape[2] // kv_heads, tiles, side_by_side)
    masked = forward.variant != ""
    if isinstance(config, HopperWideConfig):
        costs = costs_of_wide(config.block_M, config.block_N, config.head_dim(forward), slots)
    else:
        costs = costs_of(config.block_M, config.block_N, forward.head_dim, forward.head_dim_v, slots, masked)
    if causal and config.block_M == CROWDED and q_shape[1] <= SHORT:
        costs = dataclasses.replace(costs, tile=WIDE_TIME * costs.tile)
    return groups, costs


def multiprocessors() -> int:
    """Of the current device, if the call's kernels are compiled for it."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        return MULTIPROCESSORS
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
