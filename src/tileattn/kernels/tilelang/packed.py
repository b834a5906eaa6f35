"""Packed sequences before a launch: the work list that the kernels read; imports no TileLang."""

from __future__ import annotations

import torch

from ... import packed_status
from ...call import Packed
from .launch import plan_function
from .records import WIDTH, capacity


def work_list(
    arch: str, packed: Packed, total_q: int, total_k: int, tile: int, *, of_keys: bool = False
) -> torch.Tensor:
    """The header and the records (records.py) for tiles of queries, or of keys: int32 (1 + capacity, 8), on the device.

    One launch, for which nothing waits; what is wrong with the cumulative lengths is in the device's status
    (:mod:`tileattn.packed_status`). There must be a sequence.

    Args:
        arch: of the device, as :class:`AttentionCall` spells it.
        packed: where the sequences lie.
        total_q: rows of the tensor of queries, which may be more than the sequences have.
        total_k: the same of the keys.
        tile: rows in a tile.
        of_keys: whether keys are cut into tiles, rather than queries.
    """
    queries = (packed.cu_seqlens_q, total_q, packed.max_seqlen_q)
    keys = (packed.cu_seqlens_k, total_k, packed.max_seqlen_k)
    (tiled, tiled_total, tiled_longest), (other, other_total, other_longest) = (
        (keys, queries) if of_keys else (queries, keys)
    )
    rows = 1 + capacity(tiled_total, tiled.numel() - 1, tile)
    work = torch.empty(rows, WIDTH, dtype=torch.int32, device=tiled.device)
    status = packed_status.status_of(tiled.device)
    plan_function(arch)(
        tiled, other, work, status, tiled_total, other_total, tiled_longest, other_longest, tile, int(of_keys)
    )
    return work
