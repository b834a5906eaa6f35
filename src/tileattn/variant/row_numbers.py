"""Masks and score functions whose queries are numbered by row, from 0, as FlexAttention's are.

tileattn's own positions are aligned bottom-right: row ``i`` is at ``q = i + shift`` with ``shift = seqlen_k -
seqlen_q``. The classes here carry the shift as a run-time number, so another length compiles nothing.
:mod:`tileattn.compat.flex_attention` makes them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .mask_bounds import Range
from .masks import FunctionMask, Mask
from .math import load
from .scores import ScoreMod


@dataclass(frozen=True, eq=False)
class RowMask(Mask):
    """A user's mask function of the query's row: ``mask(b, h, q - shift, k)``.

    Args:
        mask: the function.
        shift: ``seqlen_k - seqlen_q`` of the call.
    """

    mask: FunctionMask
    shift: int

    def allows(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return self.mask.allows(b, h, q - self.shift, k)


@dataclass(frozen=True, eq=False)
class RowScore(ScoreMod):
    """A user's score function of the query's row: ``mod(score, b, h, q - shift, k)``.

    Args:
        mod: the function.
        shift: ``seqlen_k - seqlen_q`` of the call.
    """

    mod: Callable[..., Any]
    shift: int

    def __call__(self, score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return self.mod(score, b, h, q - self.shift, k)


@dataclass(frozen=True, eq=False)
class BlockBounds(Mask):
    """Hides nothing, but says which keys and rows a block-sparse mask visits, so that tiles outside are skipped.

    It is joined by ``&`` to the mask that hides the blocks between the bounds. A tile may begin and end in different
    rows of blocks. So the bounds of a row of blocks also hold for those after it (``first``) or before it (``end``).

    Args:
        first_key, end_key: int32 (batch or 1, heads or 1, rows of blocks): the least key of a visited block in this
            row of blocks or a later one, and the end of the last one in this or an earlier one.
        first_row, end_row: int32 (batch or 1, heads or 1, columns of blocks): the same for rows.
        block_q, block_k: the size of a block, in rows and in keys.
        shift: ``seqlen_k - seqlen_q`` of the call.
    """

    first_key: torch.Tensor
    end_key: torch.Tensor
    first_row: torch.Tensor
    end_row: torch.Tensor
    block_q: int
    block_k: int
    shift: int

    def allows(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return True

    def kv_range(self, b: Any, h: Any, q_lo: Any, q_hi: Any, seqlen_k: Any) -> Range:
        top, bottom = (q_lo - self.shift) // self.block_q, (q_hi - self.shift) // self.block_q
        return load(self.first_key, b, h, top), load(self.end_key, b, h, bottom)

    def q_range(self, b: Any, h: Any, k_lo: Any, k_hi: Any, seqlen_k: Any) -> Range:
        left, right = k_lo // self.block_k, k_hi // self.block_k
        return load(self.first_row, b, h, left) + self.shift, load(self.end_row, b, h, right) + self.shift
