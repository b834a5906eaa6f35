"""Which calls take their tiles from lists (kernels/tile_lists.py), how lists are cut, and what a launch passes of them.

PyTorch's operations make the lists: some 80 operations or more, and a few bytes for each tile and operation. So a call
must be longer than one of TileLang, whose lists are made by a kernel; and the tiles of a list are no smaller than 64 by
64, several of a kernel's where these are smaller, as in float32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ...call.facts import AttentionCall
from ...call.inputs import Operands
from ..kept_lists import arguments_of, lists_of
from ..tile_lists import Cut, Sizes, is_listed, make_lists
from .grid import Sizes as CallSizes
from .tile_sizes import Config

# Pairs of queries and keys from which on a call takes lists: 4096 by 4096. Batch elements and heads do not count, so
# that a row's bits do not depend on how many there are. Chosen by the time that making lists takes elsewhere
# (docs/design/triton.md); not measured.
FEWEST_PAIRS = 2**24
LEAST_BLOCK = 64  # rows of a list's tiles, at least


class Walk(NamedTuple):
    """How the loops of a kernel walk over lists.

    Attributes:
        steps: tiles of the loop in one of a list; 0 where loops go by ranges.
        line_rows: rows of the program's own side in a line: those of a tile of a list.
    """

    steps: int = 0
    line_rows: int = 0


def pays(call: AttentionCall, q_shape: torch.Size, k_shape: torch.Size) -> bool:
    """Whether a call of these sizes, (batch, seqlen, heads, head_dim), takes its tiles from lists."""
    return bool(call.variant) and q_shape[1] * k_shape[1] >= FEWEST_PAIRS and is_listed(call.variant)


def cut_of(kernel: str, config: Config) -> Cut:
    """How the lists of one of :data:`.tile_sizes.KERNELS` are cut. Those of equal cuts are the same lists.

    The kernel for dk and dv loads whole tiles of queries without asking where they end.
    """
    by_keys = kernel == "keys"
    blocks = max(config.block_M, LEAST_BLOCK), max(config.block_N, LEAST_BLOCK)
    return Cut(*blocks, by_keys=by_keys, masks_queries=by_keys)


def walk_of(kernel: str, config: Config) -> Walk:
    """How a kernel walks over the lists of :func:`cut_of`."""
    cut = cut_of(kernel, config)
    if cut.by_keys:
        return Walk(cut.block_M // config.block_M, cut.block_N)
    return Walk(cut.block_N // config.block_N, cut.block_M)


def of_lists(
    variant: str, operands: Operands, sizes: CallSizes, cut: Cut | None, device: torch.device
) -> tuple[Any, ...]:
    """What a kernel takes of a call's lists: tiles, counts, batch_step, head_step; without a cut None for each."""
    if cut is None:
        return None, None, None, None
    of_call = Sizes(sizes.batch, sizes.heads, sizes.seqlen_q, sizes.seqlen_k)
    tensors, steps = arguments_of(lists_of(make_lists, variant, operands, of_call, cut, device))
    return *tensors, *steps
