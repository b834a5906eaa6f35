"""How the elements of a head are dealt to threads: in pieces of at most 16 bytes. Imports no TileLang.

A rotated piece has some pairs: two runs of elements in the two halves of the rotated part or, where pairs are
neighbours, one run of twice as many elements. A plain piece is one run that is copied.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

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
        wide: whether runs are copied at once, not element by element.
        wide_tables: the same for cos and sin.
        table_itemsize: bytes of an element of cos and sin.
    """

    pairs: int
    rotated: int
    width: int
    plain: int
    interleaved: bool
    rotary_dim: int
    wide: bool
    wide_tables: bool
    table_itemsize: int

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
        wide=call.aligned,
        wide_tables=call.aligned_tables,
        table_itemsize=call.table_dtype.itemsize if call.table_dtype is not None else 0,
    )
