"""Pads packed sequences to (elements, seqlen, ...), the form in which the oracle computes and results are compared.

Imports nothing of tileattn. Dense tensors pass as they are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .spec import Call

OF_KEYS = ("k", "v")


class Padding:
    """Where the rows of a call's tensors belong.

    Attributes:
        row, key: numbers of the rows and of the keys of an element.
        offset: the position of each element's first row, (elements, 1).
        both: whether row and key are of the sequence, (elements, 1, rows, keys); True for dense calls.
        rows_there: whether a row is of the sequence, (elements, rows).
    """

    def __init__(self, call: Call, t: dict[str, Tensor]) -> None:
        device = t["q"].device
        self.packed = call.packed
        self.row, self.key = (torch.arange(size, device=device) for size in (call.rows, call.keys))
        first = 0 if call.top else call.keys - call.rows
        self.offset = torch.full((max(call.elements, 1), 1), first, device=device)[: call.elements]
        self.both = torch.ones((), dtype=torch.bool, device=device)
        self.rows_there = torch.ones(call.elements, call.rows, dtype=torch.bool, device=device)
        if not call.packed:
            return
        starts_q, starts_k = t["cu_q"].long(), t["cu_k"].long()
        lengths_q, lengths_k = starts_q.diff()[:, None], starts_k.diff()[:, None]
        self.offset = lengths_k - lengths_q
        is_row, is_key = self.row < lengths_q, self.key < lengths_k
        self.rows_there = is_row
        self.both = is_row[:, None, :, None] & is_key[:, None, None, :]
        self._rows = torch.where(is_row, starts_q[:-1, None] + self.row, len(t["q"]))
        self._keys = torch.where(is_key, starts_k[:-1, None] + self.key, len(t["k"]))
        self.used_q, self.used_k = starts_q[-1], starts_k[-1]

    def padded(self, x: Tensor, name: str, fill: float = 0.0) -> Tensor:
        """(total, ...) as (elements, seqlen, ...), with `fill` beyond a sequence's end."""
        if not self.packed:
            return x
        index = self._keys if name in OF_KEYS else self._rows
        return torch.cat([x, x.new_full((1, *x.shape[1:]), fill)])[index]

    def unused(self, x: Tensor, name: str) -> Tensor | None:
        """Which rows of x (total, ...) belong to no sequence, broadcastable to x."""
        if not self.packed:
            return None
        used = self.used_k if name in OF_KEYS else self.used_q
        rows = torch.arange(len(x), device=x.device) >= used
        return rows.view(-1, *([1] * (x.ndim - 1)))
