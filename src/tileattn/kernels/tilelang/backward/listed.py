"""Which backward passes take their tiles from lists (tile_lists.py), and the lists of their kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from ....call.facts import BackwardCall, Gradients
from ....call.inputs import Inputs
from ...kept_lists import arguments_of, lists_of, packed_lists_of
from ...tile_lists import Cut, Sizes, pays
from ..lists.bits import bits_pay
from ..lists.launch import make, make_packed
from ..packed_lists import PackedSizes, packed_pays
from .config import BackwardConfig
from .defaults import MainConfig, default, queries_default
from .hopper.config import HopperBackwardConfig, HopperWideConfig

Pass = Callable[..., Gradients]


def with_lists(config: MainConfig, call: BackwardCall, q_shape: torch.Size, k_shape: torch.Size) -> MainConfig | None:
    """The configuration for a dense call of these sizes that takes its tiles from lists; None for any other call."""
    if isinstance(config, BackwardConfig) or not pays(call.forward, q_shape, k_shape):
        return None
    return as_listed(config, bits_pay(call.forward, q_shape))


def as_listed(config: HopperBackwardConfig | HopperWideConfig, bits: bool = False) -> MainConfig:
    """The configuration with lists of tiles. bits: whether mixed tiles have bits, which wide heads' have not."""
    if isinstance(config, HopperBackwardConfig):  # the words' code and that of lists have not run together
        config = dataclasses.replace(config, mask_words=False, bits=bits)
    return dataclasses.replace(config, listed=True)


def cuts_of(call: BackwardCall, config: MainConfig) -> tuple[Cut, Cut | None]:
    """How the main kernel, and that for dq alone in a Hopper schedule, cut the scores for lists of tiles."""
    queries = queries_default(call)
    bits = not isinstance(config, BackwardConfig) and config.bits
    main = Cut(config.block_M, config.block_N, by_keys=True, masks_queries=True, bits=bits)
    if isinstance(queries, BackwardConfig):
        return main, None
    return main, Cut(queries.block_M, queries.block_N, masks_queries=True)


def lists_for(
    call: BackwardCall, inputs: Inputs, sizes: Sizes, cut: Cut | None, work: tuple[Tensor, ...]
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """The lists of tiles that a kernel takes, and their steps; none without a cut.

    Args:
        sizes: of a dense call.
        work: the kernel's work list, of a packed call.
    """
    if cut is None:
        return (), ()
    variant, operands, packed = call.forward.variant, inputs.operands, inputs.packed
    if packed is None:
        return arguments_of(lists_of(make, variant, operands, sizes, cut, inputs.q.device))
    return arguments_of(packed_lists_of(make_packed, variant, operands, packed, _sizes_of(inputs), cut, *work))


def packed_backward(call: BackwardCall, longest: tuple[int, int], prepare: Callable[[MainConfig | None], Pass]) -> Pass:
    """The backward pass of a packed call: with lists of tiles or without, as the sizes of each call say.

    Args:
        longest: max_seqlen_q and max_seqlen_k.
        prepare: the pass with a configuration of the main kernel, None for the default.
    """
    config = default(call)
    # Tensors with as many rows as sequences may have, one after the other or one alone.
    most = PackedSizes(1, 1, *longest, *longest)
    if isinstance(config, BackwardConfig) or not packed_pays(call.forward, most, ()):
        return prepare(None)
    listed = as_listed(config)
    cuts = tuple(cut for cut in cuts_of(call, listed) if cut is not None)
    passes: dict[bool, Pass] = {}

    def backward(inputs: Inputs, *rest: Tensor | None) -> Gradients:
        pays = packed_pays(call.forward, _sizes_of(inputs), cuts)
        if pays not in passes:
            passes[pays] = prepare(listed if pays else None)
        return passes[pays](inputs, *rest)

    return backward


def _sizes_of(inputs: Inputs) -> PackedSizes:
    assert inputs.packed is not None
    return PackedSizes.of(inputs.packed, inputs.q.shape[1], inputs.k.shape[1], inputs.q.shape[2])
