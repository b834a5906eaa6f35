"""Standard attention: the definition, with every score in memory.

For each batch element b and each query head h, with N queries, S keys, and the kv head g = h // (heads / kv_heads):

    scores[i, j] = scale * <q[b, i, h], k[b, j, g]>                          (N, S)
    scores[i, j] = score_mod(scores[i, j], b, h, position of i, j)           for each score modification, in order
    scores[i, j] = -inf                          where the mask does not allow (b, h, position of i, j)
    lse[i]       = log(exp(sink[h]) + sum over j of exp(scores[i, j]))       without a sink: the sum alone
    o[i]         = sum over j of exp(scores[i, j] - lse[i]) * v[b, j, g]     (N, head_dim_v)

With dropout each probability exp(scores[i, j] - lse[i]) is multiplied by dropout[i, j], which is 0 where it is dropped
and 1 / (1 - p) where it is not, before it meets its value; lse knows nothing of it.

exp overflows float32 at 89. So the maximum m[i] of the row is taken out first, which changes nothing in o:

    p[i, j] = exp(scores[i, j] - m[i])
    l[i]    = exp(sink[h] - m[i]) + sum over j of p[i, j]
    lse[i]  = m[i] + log(l[i])
    o[i]    = (sum over j of p[i, j] * v[b, j, g]) / l[i]

This is attention as in Vaswani et al. 2017 (arXiv 1706.03762), section 3.2.1. The N x S matrix of scores is what
FlashAttention does away with: at 16384 tokens it is half a gigabyte for each head in 16-bit floats, and a GPU spends
its time moving it, not multiplying.

`standard_attention` has 11 positional arguments: its signature is public, and shows each tensor by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..call.fp8 import accumulator, output_dtype
from ..variant.masks import Mask
from ..variant.program import computed_in

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
    """Attention by its definition; memory grows with seqlen_q * seqlen_k.

    Args:
        q: (batch, seqlen_q, heads, head_dim), any floating-point dtype.
        k: (batch, seqlen_k, kv_heads, head_dim); kv_heads divides heads.
        v: (batch, seqlen_k, kv_heads, head_dim_v).
        mask: which keys a query sees; None: all.
        score_mods: functions (score, b, h, q, k) -> score of the scaled score, applied in order.
        sink: (heads,), a logit for each head that joins the denominator of the softmax and has no value.
        scale: factor of the inner product; None: 1 / sqrt(head_dim).
        q_descale, k_descale, v_descale: (batch, kv_heads), float32: what the elements of fp8 q, k and v are multiplied
            by; None: 1.
        dropout: (batch, heads, seqlen_q, seqlen_k), what each probability is multiplied by: 0 or 1 / (1 - p); None: 1.

    Returns:
        o (batch, seqlen_q, heads, head_dim_v) in q's dtype, or bfloat16 for fp8, 0 in a row that sees no key; and lse
        (batch, heads, seqlen_q) in float32 (float64 for float64 inputs), natural logarithm, sink included, -inf in a
        row that sees no key, without a sink.
    """
    q_bh, k_bh, v_bh = heads_first(q, k, v, (q_descale, k_descale, v_descale))
    mask, score_mods = computed_in(q_bh.dtype, mask, score_mods)
    # There is nothing to tile here: one tile of all rows and all keys.
    scores = tile_scores(q_bh, k_bh, slice(0, q.shape[1]), slice(0, k.shape[1]), score_mods, scale)
    if mask is not None and k.shape[1] > 0:  # a mask's tensors have no element to read where there is no key
        b, h, q_pos, k_pos = positions(q_bh, k_bh, slice(0, q.shape[1]), slice(0, k.shape[1]))
        scores = scores.masked_fill(~mask.allows(b, h, q_pos, k_pos), -torch.inf)
    logits = scores
    if sink is not None:
        # One more key, the same for all queries, whose value is zero.
        column = sink.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
        logits = torch.cat([scores, column], dim=-1)
    if logits.shape[-1] == 0:  # a maximum of nothing; lse depends on the tensors all the same
        logits = torch.cat([scores, scores.new_full((*scores.shape[:3], 1), -torch.inf)], dim=-1)
    m = logits.amax(dim=-1, keepdim=True)
    # A row that sees no key has m = -inf, and -inf - (-inf) is NaN. Subtract 0 instead: then all exp(-inf) are 0 ...
    # A row with a score of +inf gets l = lse = inf in this way, and o = NaN.
    m = torch.where(m.isinf(), 0.0, m)
    p = torch.exp(scores - m)
    l = torch.exp(logits - m).sum(dim=-1, keepdim=True)
    # ... and so is l, by which o must not be divided.
    divisor = torch.where(l == 0, 1.0, torch.where(l == torch.inf, torch.nan, l))
    o = (dropped(p, dropout) @ v_bh) / divisor
    lse = torch.where(l == 0, -torch.inf, m + torch.log(torch.where(l == 0, 1.0, l))).squeeze(-1)
    return o.transpose(1, 2).to(output_dtype(q.dtype)), lse


def dropped(p: Tensor, dropout: Tensor | None) -> Tensor:
    """Probabilities, some of which are dropped and the others enlarged."""
    return p if dropout is None else p * dropout.to(p.dtype)


def heads_first(
    q: Tensor, k: Tensor, v: Tensor, descales: Sequence[Tensor | None] = (None, None, None)
) -> tuple[Tensor, Tensor, Tensor]:
    """(batch, seqlen, heads, dim) -> (batch, heads, seqlen, dim), accumulator's dtype, K/V heads repeated for GQA.

    Kernels do not repeat K and V in memory (query head h reads kv head ``h // group``); it is done here so that the
    rest reads as if every query head had its own. So it is with descales (batch, kv_heads), by which heads are
    multiplied: kernels put those of q and k into the scale, and that of v into the division by l.
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

    q and k are (batch, heads, seqlen, dim). The query in row i has position ``i + seqlen_k - seqlen_q``: the last query
    stands at the last key ("bottom-right"), as it does when queries continue a sequence whose keys are cached. With
    more queries than keys the first positions are negative.
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

    q (batch, heads, seqlen_q, head_dim) and k (batch, heads, seqlen_k, head_dim) have one dtype, which is the result's.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return modified(scale * (q[:, :, rows] @ k[:, :, keys].mT), positions(q, k, rows, keys), score_mods)


def modified(scores: Tensor, where: tuple[Tensor, Tensor, Tensor, Tensor], score_mods: Sequence[ScoreFn]) -> Tensor:
    """What the score modifications make of scaled scores (batch, heads, rows, keys) at the positions `where`."""
    for score_mod in score_mods:
        # A function that ignores the score may depend on less than b, h, q and k, or be one number.
        found = torch.as_tensor(score_mod(scores, *where), device=scores.device)
        scores = found.to(scores.dtype).expand(scores.shape)
    return scores
