"""The forward pass of the torch backend.

On a CPU, PyTorch's fused attention computes each block of rows if it supports the mask and score modifications
(`fused.py`). Otherwise FlashAttention-2's loop (Dao 2023, arXiv 2307.08691) runs in PyTorch operations (`loop.py`).
Both skip keys that no row of the block sees, and evaluate the mask only for keys that not all rows see. No tensor grows
with seqlen_q * seqlen_k. Autograd records nothing; `backward.py` is the backward pass.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...call.dropout import Dropout
from ...variant.masks import Mask
from . import fused, loop
from .mask import KeyRange, ScoreMatrix, ScoreMods, row_blocks
from .softmax import join_sink
from .visits import Visits

# (q of a block of rows, all k, all v, score matrix, rows, their range of keys, scale) -> o and lse of the rows.
Attend = Callable[[Tensor, Tensor, Tensor, ScoreMatrix, slice, KeyRange, float], tuple[Tensor, Tensor]]


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None,
    score_mods: ScoreMods,
    sink: Tensor | None,
    scale: float,
    dropout: Dropout | None = None,
    first: int = 0,
) -> tuple[Tensor, Tensor]:
    """o (batch, seqlen_q, heads, head_dim_v), q's dtype, and lse (batch, heads, seqlen_q); both contiguous.

    q (batch, seqlen_q, heads, head_dim), k (batch, seqlen_k, kv_heads, head_dim), v (batch, seqlen_k, kv_heads,
    head_dim_v), any strides; sink (heads,). `first` is the number of the first batch element.
    """
    matrix = ScoreMatrix.of(q, k, mask, score_mods, dropout, first)
    if 0 in (q.shape[0], q.shape[1], k.shape[1]):
        o, lse = loop.without_keys(q, v, matrix.dtype)
    else:
        result = _fused(q, k, v, matrix, scale) if fused.expresses(matrix) else None
        o, lse = _looped(q, k, v, matrix, scale) if result is None else result
    if sink is not None:
        o, lse = join_sink(o, lse, sink)
    return o.contiguous(), lse.contiguous()


def _looped(q: Tensor, k: Tensor, v: Tensor, matrix: ScoreMatrix, scale: float) -> tuple[Tensor, Tensor]:
    block_M = loop.block_rows(matrix)
    return _by_blocks(loop.attend, q, k, v, matrix, block_M, Visits(matrix, block_M).keys(block_M), scale)


def _fused(q: Tensor, k: Tensor, v: Tensor, matrix: ScoreMatrix, scale: float) -> tuple[Tensor, Tensor] | None:
    """o and lse by PyTorch's operator, or None if scores are not finite, which it confuses with masked rows."""
    surely_finite = fused.are_few(q, k) and not fused.may_overflow(q, k, scale)
    if not surely_finite and fused.has_infinite(q, k, scale):
        return None
    head_dim_v = v.shape[3]
    q, k, v = fused.equal_head_dims(q, k, v)
    if fused.in_one_call(matrix, scale):
        o, lse = fused.one_call(q, k, v, scale, causal=matrix.mask is not None)
        if surely_finite:
            return o[..., :head_dim_v], lse
    else:
        block_M, ranges = fused.cheapest_blocks(matrix, head_dim=q.shape[3])
        o, lse = _by_blocks(fused.attend, q, k, v, matrix, block_M, ranges, scale)
    return None if fused.has_failed(lse, q, k, scale) else (o[..., :head_dim_v], lse)


def _by_blocks(
    attend: Attend,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    matrix: ScoreMatrix,
    block_M: int,
    ranges: Sequence[Sequence[KeyRange]],
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Attention of all rows, a block at a time. Batch elements with the same key ranges are computed at once."""
    elements = []
    for element, of_element in enumerate(ranges):
        batch = slice(element, element + 1) if len(ranges) > 1 else matrix.batch
        part = dataclasses.replace(matrix, batch=batch)
        blocks = [
            attend(q[batch, rows], k[batch], v[batch], part, rows, seen, scale)
            for rows, seen in zip(row_blocks(matrix.seqlen_q, block_M), of_element)
        ]
        elements.append((_cat([o for o, _ in blocks], 1), _cat([lse for _, lse in blocks], 2)))
    return _cat([o for o, _ in elements], 0), _cat([lse for _, lse in elements], 0)


def _cat(parts: Sequence[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)
