"""Lists of blocks as conditions, and what is wrong with them.

On a GPU a number out of range is left out, and recorded in a status that the host reads later
(:mod:`tileattn.call.deferred_status`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...call.deferred_status import DeferredStatus

STATUS = DeferredStatus(
    ("BlockSparse: blocks must hold numbers in 0 .. ceil(seqlen_k / block_size) - 1, or -1",),
    "lists of blocks",
    pause=1e-2,
)


def check_blocks() -> None:
    """Waits until the GPU has checked the lists of all `BlockSparse` masks so far, and raises if one was wrong.

    A call does not wait for the numbers in its lists. Without check_blocks, a later call with lists raises the error.

    Raises:
        ValueError: a list of a call had a number that is no block of keys, and not -1. Errors of several calls since
            the last ValueError are raised as one. The number of the sequence is that of the batch element.
    """
    STATUS.check()


def as_conditions(lists: Tensor, counts: Tensor | None, columns: int) -> Tensor:
    """Whether each block is named: bool (batch or 1, heads, blocks of q, columns, but at least 2).

    Args:
        lists: integers (batch or 1, heads, blocks of q, capacity); -1 names none.
        counts: integers (batch or 1, heads, blocks of q), how many count; None: all.
        columns: the number of blocks of keys.

    Raises:
        ValueError: a number is out of range: at once on a CPU, else that of an earlier call.
    """
    numbers = lists.long()
    counted = numbers != -1
    if counts is not None:
        counted = counted & (torch.arange(lists.shape[-1], device=lists.device) < counts[..., None])
    inside = (numbers >= 0) & (numbers < columns)
    _report(counted & ~inside, lists, columns)
    # Numbers that do not count go to one more column, which is cut off. One column alone would be another kernel.
    width = max(columns, 2)
    place = torch.where(counted & inside, numbers, width)
    table = torch.zeros(*lists.shape[:-1], width + 1, dtype=torch.bool, device=lists.device)
    return table.scatter(-1, place, True)[..., :width]


def _report(wrong: Tensor, lists: Tensor, columns: int) -> None:
    """Raises, or records, that numbers are out of range."""
    if _has_no_values(lists):
        return
    if is_on_host(lists):
        if bool(wrong.any()):
            at = wrong.nonzero()[0].tolist()
            raise ValueError(
                f"BlockSparse: blocks must hold numbers in 0 .. {columns - 1} (ceil(seqlen_k / block_size) - 1), or "
                f"-1, got {int(lists[tuple(at)])} at {tuple(at)}"
            )
        return
    STATUS.raise_pending()
    status = STATUS.of(lists.device)
    number = torch.arange(1, lists.shape[0] + 1, dtype=torch.int32, device=lists.device)
    found = torch.where(wrong.flatten(1).any(1), number, 0).amax().reshape(1) if lists.shape[0] else status
    torch.maximum(status, found, out=status)
    STATUS.report(lists.device)


def is_on_host(lists: Tensor) -> bool:
    """Whether numbers can be read without waiting for a device."""
    return not lists.is_cuda


def _has_no_values(x: Any) -> bool:
    """Whether the call is traced, so that nothing can be recorded."""
    return (
        torch.compiler.is_compiling()
        or type(x) is not Tensor
        or x.is_meta
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
    )
