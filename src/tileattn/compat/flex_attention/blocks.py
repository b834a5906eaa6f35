"""The mask of a PyTorch BlockMask, for tileattn.

A BlockMask lists blocks of scores: in a *partial* block its mask_mod decides, in a *full* block all is seen whatever
mask_mod says, and in a block that is in neither list nothing is. The lists become one table of states, which the
kernels read for every score, and bounds of what is visited, by which they skip tiles (:class:`BlockBounds`). Both are
computed on the device in every call, so blocks that are written in place are seen.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import BlockMask

from ...variant.masks import FunctionMask, Mask
from ...variant.row_numbers import BlockBounds
from .lazy import LazyBlockMask
from .mods import is_noop
from .tracing import by_row, mask_of_function, traceable_mask

ABSENT, PARTIAL, FULL = 0, 1, 2
# What PyTorch puts in place of the mask_mod of a BlockMask that is indexed.
_SLICED = getattr(torch_flex, "_sliced_mask_mod_error", object())


def mask_of(block_mask: BlockMask, query: Tensor, key: Tensor) -> Mask | None:
    """The mask for a call of query (B, Hq, Q_LEN, E) and key (.., .., KV_LEN, E); None hides nothing.

    Raises:
        ValueError: the block mask's sizes do not fit.
        RuntimeError: its blocks are on another device, or its mask_mod is that of a sliced BlockMask.
    """
    rows, keys = query.shape[2], key.shape[2]
    check_sizes(block_mask, query, rows, keys)
    if isinstance(block_mask, LazyBlockMask) and not block_mask.has_blocks:
        return None if is_noop(block_mask.mask_mod) else mask_of_function(block_mask.mask_mod, keys - rows)
    if rows == 0 or keys == 0:
        return None
    block_q, block_k = block_mask.BLOCK_SIZE
    states = states_of(block_mask, -(-rows // block_q), -(-keys // block_k))
    bounds = bounds_of(states != ABSENT, block_q, block_k, keys - rows)
    return bounds & by_row(FunctionMask(_allows(states, block_q, block_k, block_mask.mask_mod)), keys - rows)


def _allows(states: Tensor, block_q: int, block_k: int, mask_mod: Any) -> Any:
    """The mask function of rows and keys. The size of a block is a constant of the kernel, which divides by it."""
    mask = None if is_noop(mask_mod) else traceable_mask(mask_mod)

    def allows(b: Any, h: Any, q: Any, k: Any) -> Any:
        state = states[b, h, q // block_q, k // block_k]
        if mask is None:
            return state != ABSENT
        return (state == FULL) | ((state == PARTIAL) & mask(b, h, q, k))

    return allows


def check_sizes(block_mask: BlockMask, query: Tensor, rows: int, keys: int) -> None:
    """Raises ValueError or RuntimeError unless the block mask is for a call of these sizes, as PyTorch does."""
    if block_mask.mask_mod is _SLICED:
        raise RuntimeError(
            "block_mask is a sliced BlockMask, which has no mask_mod: set one, made from that of the whole block mask"
        )
    batch, heads, *lengths = block_mask.shape if len(block_mask.shape) == 4 else (0, 0, 0, 0)
    if len(block_mask.shape) != 4:
        raise ValueError(f"block_mask must have 4 dimensions, (B, H, Q_LEN, KV_LEN), got {block_mask.shape}")
    for name, size, full in (("B", batch, query.shape[0]), ("H", heads, query.shape[1])):
        if size not in (1, full):
            raise ValueError(f"block_mask must have {name} = 1 or {full}, as query has, got shape {block_mask.shape}")
    if not _is_one_block(block_mask) and (lengths[0] != rows or lengths[1] != keys):
        smaller = lengths[0] < rows or lengths[1] < keys
        raise ValueError(
            f"block_mask was created for block_mask.shape={block_mask.shape} but got q_len={rows} and kv_len={keys}. "
            + ("Create one for these lengths." if smaller else "Create one, or crop it by block_mask._adjust(q, kv).")
        )
    if isinstance(block_mask, LazyBlockMask) and not block_mask.has_blocks:
        return
    if block_mask.kv_indices.device != query.device:
        raise RuntimeError(
            f"query and block_mask must be on one device, got {query.device} and {block_mask.kv_indices.device}"
        )
    if block_mask.kv_indices.shape[2] * block_mask.BLOCK_SIZE[0] < rows:
        raise ValueError(
            f"block_mask has {block_mask.kv_indices.shape[2]} rows of blocks of {block_mask.BLOCK_SIZE[0]} queries, "
            f"which do not cover {rows} queries"
        )


def _is_one_block(block_mask: BlockMask) -> bool:
    """Whether one block is larger than any sequence: what PyTorch makes for a call without a block mask."""
    return min(block_mask.BLOCK_SIZE) >= 2**30


def states_of(block_mask: BlockMask, rows: int, columns: int) -> Tensor:
    """The state of each block: uint8 (B, H, rows, columns)."""
    states = _listed(block_mask.kv_num_blocks, block_mask.kv_indices, columns)
    if block_mask.full_kv_num_blocks is not None and block_mask.full_kv_indices is not None:
        full = _listed(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, columns)
        states = torch.where(full != 0, FULL, states)
    return states[:, :, :rows].to(torch.uint8)


def _listed(counts: Tensor, indices: Tensor, columns: int) -> Tensor:
    """1 where a block is among the first `count` indices of its row, else 0: uint8 (B, H, rows, columns).

    The indices behind the count are undefined. They, and indices outside, go to one more column, which is cut off.
    """
    slot = torch.arange(indices.shape[-1], device=indices.device)
    valid = (slot < counts[..., None]) & (indices >= 0) & (indices < columns)
    place = torch.where(valid, indices, columns).long()
    table = torch.zeros(*indices.shape[:-1], columns + 1, dtype=torch.uint8, device=indices.device)
    return table.scatter(-1, place, torch.ones_like(place, dtype=torch.uint8))[..., :columns]


def bounds_of(visited: Tensor, block_q: int, block_k: int, shift: int) -> BlockBounds:
    """The bounds of the visited blocks, bool (B, H, rows of blocks, columns of blocks)."""
    keys, rows = _ends(visited, block_k), _ends(visited.mT, block_q)
    return BlockBounds(*keys, *rows, block_q, block_k, shift)


def _ends(visited: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """For each row its first visited element or a later row's, and the end of its last or an earlier row's."""
    count = visited.shape[-1]
    place = torch.arange(count, device=visited.device)
    first = torch.where(visited, place, count).amin(-1).flip(-1).cummin(-1).values.flip(-1)
    end = torch.where(visited, place + 1, 0).amax(-1).cummax(-1).values
    return _scaled(first, size), _scaled(end, size)


def _scaled(blocks: Tensor, size: int) -> Tensor:
    """Blocks in elements, within int32 for PyTorch's one block of 2^30 as well."""
    return (blocks * size).clamp(max=2**30).to(torch.int32)
