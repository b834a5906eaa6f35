"""The work lists of packed sequences, which kernels read, made before a launch. Imports no TileLang."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence

import torch

from ....call import packed_status
from ....call.facts import Packed
from .library import plan_function
from .work_list import LISTS, WIDTH, capacity


def work_list(
    arch: str, packed: Packed, total_q: int, total_k: int, tile: int, *, of_keys: bool = False
) -> torch.Tensor:
    """The header and the records (work_list.py) for tiles of queries, or of keys: int32 (1 + capacity, 8), on the
    device.

    See :func:`work_lists`.

    Args:
        tile: rows in a tile.
        of_keys: whether keys are cut into tiles, rather than queries.
    """
    return work_lists(arch, packed, total_q, total_k, ((tile, of_keys),))[0]


def work_lists(
    arch: str, packed: Packed, total_q: int, total_k: int, cuts: Sequence[tuple[int, bool]]
) -> tuple[torch.Tensor, ...]:
    """One list for each of the `cuts`: rows in a tile, and whether tiles are of keys. At most `LISTS`.

    One launch, without a host-device synchronisation. Errors in the cumulative lengths go to the device's status
    (:mod:`tileattn.call.packed_status`). There must be at least one sequence.

    Args:
        arch: of the device, as :class:`AttentionCall` spells it.
        packed: where the sequences lie.
        total_q: rows of the tensor of queries, which may be more than the sequences have.
        total_k: the same of the keys.
    """
    bounds = packed.cu_seqlens_q
    rows, whole, numbers = _laid_out(total_q, total_k, bounds.numel() - 1, tuple(cuts))
    work = bounds.new_empty(whole, WIDTH)
    plan_function(arch)(
        bounds,
        packed.cu_seqlens_k,
        work,
        packed_status.status_of(bounds.device),
        total_q,
        total_k,
        packed.max_seqlen_q,
        packed.max_seqlen_k,
        *numbers,
    )
    return (work,) if len(rows) == 1 else torch.split_with_sizes(work, rows)


@functools.lru_cache(maxsize=4096)
def _laid_out(
    total_q: int, total_k: int, sequences: int, cuts: tuple[tuple[int, bool], ...]
) -> tuple[list[int], int, tuple[int, ...]]:
    """The rows of each list and of all, and the kernel's arguments: tiles, whether of keys, where each list begins."""
    rows = [1 + capacity(total_k if of_keys else total_q, sequences, tile) for tile, of_keys in cuts]
    tiles, of_keys = zip(*cuts)
    begins = itertools.accumulate(rows[:-1], initial=0)
    return rows, sum(rows), (*_filled_up(tiles), *_filled_up(of_keys), *_filled_up(begins), len(cuts))


def _filled_up(values: Iterable[int]) -> list[int]:
    numbers = [int(value) for value in values]
    return numbers + [0] * (LISTS - len(numbers))
