"""Standard attention: the definition, with the whole matrix of scores in memory.

For batch element b and query head h, with N queries, S keys and the kv head g = h // (heads / kv_heads):

    scores[i, j] = scale * <q[b, i, h], k[b, j, g]>                          (N, S)
    scores[i, j] = score_mod(scores[i, j], b, h, position of i, j)           for each score modification, in order
    scores[i, j] = -inf                          where the mask does not allow (b, h, position of i, j)
    lse[i]       = log(exp(sink[h]) + sum over j of exp(scores[i, j]))       without a sink: the sum alone
    o[i]         = sum over j of exp(scores[i, j] - lse[i]) * v[b, j, g]     (N, head_dim_v)

Dropout multiplies each probability exp(scores[i, j] - lse[i]) by dropout[i, j] before the product with v. The factor is
0 for a dropped probability and 1 / (1 - p) for a kept one. lse does not depend on dropout.

exp overflows float32 at 89. Therefore the maximum m[i] of the row is subtracted first, which does not change o:

    p[i, j] = exp(scores[i, j] - m[i])
    l[i]    = exp(sink[h] - m[i]) + sum over j of p[i, j]
    lse[i]  = m[i] + log(l[i])
    o[i]    = (sum over j of p[i, j] * v[b, j, g]) / l[i]

Source: Vaswani et al. 2017 (arXiv 1706.03762), section 3.2.1. FlashAttention avoids the N x S matrix of scores: at
16384 tokens it is half a gigabyte for each head in 16-bit floats, and a GPU spends its time on moving the matrix, not
on multiplying.

`standard_attention` has 11 positional arguments because its signature is public and names each tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..call.fp8 import accumulator, output_dtype
from ..variant.masks import Mask
from ..variant.program import computed_in
from ..variant.sparse.blocks import for_tensors

ScoreFn = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def standard_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None = None,
    score_mods: Sequence[ScoreFn] = (),
    sink: Tensor | None = None,
    scale: float | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    dropout: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention by its definition; memory is proportional to seqlen_q * seqlen_k.

    Args:
        q: (batch, seqlen_q, heads, head_dim), any floating-point dtype.
        k: (batch, seqlen_k, kv_heads, head_dim); kv_heads divides heads.
        v: (batch, seqlen_k, kv_heads, head_dim_v).
        mask: which keys a query sees; None: all.
        score_mods: functions (score, b, h, q, k) -> score, applied in order to the scaled score.
        sink: (heads,), one logit per head that joins the denominator of the softmax and has no value.
        scale: factor of the inner product; None: 1 / sqrt(head_dim).
        q_descale, k_descale, v_descale: (batch, kv_heads), float32: factors of the elements of fp8 q, k and v;
            None: 1.
        dropout: (batch, heads, seqlen_q, seqlen_k), factor of each probability: 0 or 1 / (1 - p); None: 1.

    Returns:
        o: (batch, seqlen_q, heads, head_dim_v), in q's dtype, or bfloat16 for fp8. 0 in a row that sees no key.
        lse: (batch, heads, seqlen_q), float32 (float64 for float64 inputs), natural logarithm, sink included. -inf in a
            row that sees no key and has no sink.
    """
    q_bh, k_bh, v_bh = heads_first(q, k, v, (q_descale, k_descale, v_descale))
    mask, score_mods = computed_in(q_bh.dtype, for_tensors(mask, q, k), score_mods)
    # One tile of all rows and all keys: standard attention has no tiling.
    scores = tile_scores(q_bh, k_bh, slice(0, q.shape[1]), slice(0, k.shape[1]), score_mods, scale)
    if mask is not None and k.shape[1] > 0:  # without keys, a mask's tensors may have no element to read
        b, h, q_pos, k_pos = positions(q_bh, k_bh, slice(0, q.shape[1]), slice(0, k.shape[1]))
        scores = scores.masked_fill(~mask.allows(b, h, q_pos, k_pos), -torch.inf)
    logits = scores
    if sink is not None:
        # A sink is one more key with the same logit for all queries and a value of zero.
        column = sink.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
        logits = torch.cat([scores, column], dim=-1)
    if logits.shape[-1] == 0:  # amax needs an element; `scores` stays in the graph so that lse depends on the inputs
        logits = torch.cat([scores, scores.new_full((*scores.shape[:3], 1), -torch.inf)], dim=-1)
    # m cancels in the result. With a gradient, it would give the rounding errors of the whole row to one key.
    m = logits.detach().amax(dim=-1, keepdim=True)
    # A row that sees no key has m = -inf, and -inf - (-inf) is NaN. Subtract 0 instead: every exp(-inf) is then 0.
    # In a row with a score of +inf, subtracting 0 gives l = lse = inf and o = NaN.
    m = torch.where(m.isinf(), 0.0, m)
    p = torch.exp(scores - m)
    l = torch.exp(logits - m).sum(dim=-1, keepdim=True)
    # A row that sees no key has l = 0; divide its o by 1.
    divisor = torch.where(l == 0, 1.0, torch.where(l == torch.inf, torch.nan, l))
    o = (dropped(p, dropout) @ v_bh) / divisor
    lse = torch.where(l == 0, -torch.inf, m + torch.log(torch.where(l == 0, 1.0, l))).squeeze(-1)
    return o.transpose(1, 2).to(output_dtype(q.dtype)), lse


def dropped(p: Tensor, dropout: Tensor | None) -> Tensor:
    """Probabilities after dropout: some are 0, the others are scaled up."""
    return p if dropout is None else p * dropout.to(p.dtype)


def heads_first(
    q: Tensor, k: Tensor, v: Tensor, descales: Sequence[Tensor | None] = (None, None, None)
) -> tuple[Tensor, Tensor, Tensor]:
    """(batch, seqlen, heads, dim) -> (batch, heads, seqlen, dim), in the accumulator's dtype, K/V heads repeated.

    The repetition makes the rest of the reference read as if every query head had its own K and V. Kernels do not
    repeat them in memory: query head h reads kv head ``h // group``. The descales (batch, kv_heads) multiply the heads
    here; kernels multiply the scale by those of q and k, and o by that of v when they divide by l.
    """
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2).to(accumulator(x.dtype)) for x in (q, k, v))
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    q_descale, k_descale, v_descale = (
        1.0 if x is None else x.repeat_interleave(group, dim=1)[:, :, None, None] for x in descales
    )
    return q * q_descale, k * k_descale, v * v_descale


def positions(q: Tensor, k: Tensor, rows: slice, keys: slice) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """b, h, q, k of a tile of scores: int64, shaped to broadcast to (batch, heads, rows, keys).

    q and k are (batch, heads, seqlen, dim). The query in row i has position ``i + seqlen_k - seqlen_q``, so the last
    query has the position of the last key ("bottom-right" alignment). This fits queries that continue a sequence whose
    keys are cached. With more queries than keys, the first positions are negative.
    """

    def counted(start: int, stop: int, axis: int) -> Tensor:
        shape = [1, 1, 1, 1]
        shape[axis] = -1
        return torch.arange(start, stop, device=q.device).reshape(shape)

    offset = k.shape[2] - q.shape[2]
    return (
        counted(0, q.shape[0], 0),
        counted(0, q.shape[1], 1),
        counted(rows.start + offset, rows.stop + offset, 2),
        counted(keys.start, keys.stop, 3),
    )


def tile_scores(
    q: Tensor, k: Tensor, rows: slice, keys: slice, score_mods: Sequence[ScoreFn], scale: float | None
) -> Tensor:
    """Scaled and modified scores of a tile, before the mask: (batch, heads, rows, keys).

    q (batch, heads, seqlen_q, head_dim), k (batch, heads, seqlen_k, head_dim) and the result have the same dtype.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return modified(scale * (q[:, :, rows] @ k[:, :, keys].mT), positions(q, k, rows, keys), score_mods)


def modified(scores: Tensor, where: tuple[Tensor, Tensor, Tensor, Tensor], score_mods: Sequence[ScoreFn]) -> Tensor:
    """Scaled scores (batch, heads, rows, keys) after the score modifications; `where` holds their b, h, q and k."""
    for score_mod in score_mods:
        # A function that ignores the score may return one number, or a tensor that is only broadcastable to the tile.
        result = torch.as_tensor(score_mod(scores, *where), device=scores.device)
        scores = result.to(scores.dtype).expand(scores.shape)
    return scores
