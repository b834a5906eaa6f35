"""The forward pass of the torch backend.

On a CPU, PyTorch's fused attention computes each block of rows, where it expresses the variant (`fused.py`); else the
loop of FlashAttention-2 (Dao 2023, arXiv 2307.08691) does, in plain operations (`loop.py`). Both visit only the keys
that the mask lets a block of rows see, and compute the mask only outside those that all its rows see. No tensor grows
with seqlen_q * seqlen_k. Autograd sees none of it: the backward pass is `backward.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...call.dropout import Dropout
from ...variant.masks import Mask
from . import fused, loop
from .mask import KeyRange, ScoreMods, Variant, key_ranges, row_blocks
from .softmax import join_sink

# (q of some rows, all k, all v, variant, rows, their keys, scale) -> o, lse of the rows.
Attend = Callable[[Tensor, Tensor, Tensor, Variant, slice, KeyRange, float], tuple[Tensor, Tensor]]


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
    variant = Variant.of(q, k, mask, score_mods, dropout, first)
    if 0 in (q.shape[0], q.shape[1], k.shape[1]):
        o, lse = loop.without_keys(q, v, variant.dtype)
    else:
        found = _fused(q, k, v, variant, scale) if fused.expresses(variant) else None
        o, lse = _looped(q, k, v, variant, scale) if found is None else found
    if sink is not None:
        o, lse = join_sink(o, lse, sink)
    return o.contiguous(), lse.contiguous()


def _looped(q: Tensor, k: Tensor, v: Tensor, variant: Variant, scale: float) -> tuple[Tensor, Tensor]:
    block_M = loop.block_rows(variant)
    return _by_blocks(loop.attend, q, k, v, variant, block_M, key_ranges(variant, block_M), scale)


def _fused(q: Tensor, k: Tensor, v: Tensor, variant: Variant, scale: float) -> tuple[Tensor, Tensor] | None:
    """None where not all scores are finite, which PyTorch's operator does not tell from rows without keys."""
    surely_finite = fused.are_few(q, k) and not fused.may_overflow(q, k, scale)
    if not surely_finite and fused.has_infinite(q, k, scale):
        return None
    head_dim_v = v.shape[3]
    q, k, v = fused.equal_head_dims(q, k, v)
    if fused.in_one_call(variant, scale):
        o, lse = fused.one_call(q, k, v, scale, causal=variant.mask is not None)
        if surely_finite:
            return o[..., :head_dim_v], lse
    else:
        block_M, ranges = fused.cheapest_blocks(variant, head_dim=q.shape[3])
        o, lse = _by_blocks(fused.attend, q, k, v, variant, block_M, ranges, scale)
    return None if fused.has_failed(lse, q, k, scale) else (o[..., :head_dim_v], lse)


def _by_blocks(
    attend: Attend,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    variant: Variant,
    block_M: int,
    ranges: Sequence[Sequence[KeyRange]],
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Attention of all rows, a block at a time; all batch elements at once if they have the same ranges."""
    elements = []
    for element, of_element in enumerate(ranges):
        batch = slice(element, element + 1) if len(ranges) > 1 else variant.batch
        part = dataclasses.replace(variant, batch=batch)
        blocks = [
            attend(q[batch, rows], k[batch], v[batch], part, rows, seen, scale)
            for rows, seen in zip(row_blocks(variant.seqlen_q, block_M), of_element)
        ]
        elements.append((_cat([o for o, _ in blocks], 1), _cat([lse for _, lse in blocks], 2)))
    return _cat([o for o, _ in elements], 0), _cat([lse for _, lse in elements], 0)


def _cat(parts: Sequence[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)
