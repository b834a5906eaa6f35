"""PyTorch's fused attention for CPUs, over the keys of a contiguous cache where all rows see all of them.

The operator splits its work among heads and queries, of which a decode call has few, and not among keys. So parts of
the keys are its batch, and are merged: that is faster also with one thread, since a part stays in the processor's
cache. `..fused` says what the operator needs. All scores must be finite, which lse shows afterwards.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import fused
from ..softmax import merge

# Elements of K, or of V, in a part.
PART = 2**17


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor] | None:
    """Attention over all of these keys; None where the operator's result may be wrong.

    Args:
        q: (1, rows, heads, dim).
        k: (1, keys, kv_heads, dim), some keys.
        v: the same.
        scale: of the scores.

    Returns:
        o (1, rows, heads, dim) and lse (1, heads, rows).
    """
    _, keys, kv_heads, _ = k.shape
    rows, heads = q.shape[1:3]
    length = min(max(PART // k[0, 0].numel(), 16), keys)
    whole = keys // length * length
    # The queries of a group of heads become rows of their kv head: (1, kv_heads, group * rows, dim).
    packed = q.unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    o, lse = _parts(packed, k[0, :whole].unflatten(0, (-1, length)), v[0, :whole].unflatten(0, (-1, length)), scale)
    if fused.has_failed(lse, q, k, scale):
        return None
    merged = _merged(o, lse)
    if whole < keys:
        o, lse = _parts(packed, k[:, whole:], v[:, whole:], scale)
        if fused.has_failed(lse, q, k, scale):
            return None
        merged = merge([merged, (o.transpose(1, 2), lse)])
    o, lse = merged
    # (1, group * rows, kv_heads, dim) and (1, kv_heads, group * rows), as they were packed
    o = o.unflatten(1, (-1, rows)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    return o, lse.unflatten(2, (-1, rows)).flatten(1, 2).view(1, heads, rows)


def _parts(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """o (parts, kv_heads, rows, dim) and lse (parts, kv_heads, rows) of all rows over each part of the keys."""
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    o, lse = operator(q.expand(k.shape[0], -1, -1, -1), k.transpose(1, 2), v.transpose(1, 2), scale=scale)
    return o, lse


def _merged(o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """o (1, rows, kv_heads, dim) and lse (1, kv_heads, rows) over all parts: o = sum of exp(lse_part - lse) o_part."""
    total = torch.logsumexp(lse, dim=0, keepdim=True)
    return (torch.exp(lse - total)[..., None] * o).sum(0, keepdim=True).transpose(1, 2), total
