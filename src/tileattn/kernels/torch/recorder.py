"""Errors that PyTorch's operations find on a GPU, where the host must not wait: they go to the device's status."""

from __future__ import annotations

import torch
from torch import Tensor

from ...call import cache_status


class Recorder:
    """Records errors in the device's status, without a synchronisation."""

    def __init__(self, device: torch.device) -> None:
        self.status = cache_status.status_of(device)

    def record(self, field: int, wrong: Tensor, sequence: Tensor | None = None) -> None:
        """Records a sequence with an error in a field of :mod:`tileattn.call.cache_fields`.

        wrong: bool (batch,), or any shape with `sequence`, the sequences' numbers in the same shape.
        """
        if not wrong.numel():
            return
        wrong = wrong.flatten()
        # With a dimension of one: an index without a dimension would be read by the host.
        at = wrong.int().argmax(keepdim=True)
        number = at if sequence is None else sequence.flatten().index_select(0, at)
        found = self.status[field : field + 1]
        found.copy_(torch.where(wrong.index_select(0, at), (number + 1).to(found.dtype), found))
