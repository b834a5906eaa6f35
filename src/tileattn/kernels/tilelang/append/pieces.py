"""How the elements of a head are dealt to threads: in pieces of at most 16 bytes. Imports no TileLang.

A rotated piece has some pairs: two runs of elements in the two halves of the rotated part or, where pairs are
neighbours, one run of twice as many elements. A plain piece is one run that is copied.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ....call.appending import AppendCall


@dataclass(frozen=True)
class Pieces:
    """The pieces of a head.

    Attributes:
        pairs: of a rotated piece.
        rotated: the number of rotated pieces, which come first.
        width: elements of a plain piece.
        plain: the number of plain pieces.
        interleaved: whether the elements of a pair are neighbours.
        rotary_dim: elements of the head that are rotated.
        step: the most elements of a run that are copied at once.
        table_step: the same of cos and sin.
    """

    pairs: int
    rotated: int
    width: int
    plain: int
    interleaved: bool
    rotary_dim: int
    step: int
    table_step: int

    @property
    def count(self) -> int:
        """All pieces of a head."""
        return self.rotated + self.plain


def pieces_of(call: AppendCall, head_dim: int, rotary_dim: int) -> Pieces:
    """The pieces of a head of k and q, or, with rotary_dim 0, of v."""
    most, half, rest = 16 // call.dtype.itemsize, rotary_dim // 2, head_dim - rotary_dim
    pairs = math.gcd(most // 2 if call.interleaved else most, half)
    width = math.gcd(most, rotary_dim, rest)
    return Pieces(
        pairs=pairs,
        rotated=half // pairs,
        width=width,
        plain=rest // width,
        interleaved=call.interleaved,
        rotary_dim=rotary_dim,
        step=_at_once(call, call.dtype) if call.aligned else 1,
        table_step=_at_once(call, call.table_dtype) if call.aligned_tables and call.table_dtype is not None else 1,
    )


def _at_once(call: AppendCall, dtype: torch.dtype) -> int:
    """The elements of 16 bytes; on AMD at most 4, as TileLang 0.1.15 cannot guard longer loads there."""
    return min(16 // dtype.itemsize, 4) if call.arch.startswith("gfx") else 16 // dtype.itemsize
