"""The backward pass of FlashAttention, tile by tile. The probabilities are recomputed from lse, not kept.

With S = score_mod(scale Q K^T) where the mask allows the key (else -inf), P = exp(S - lse) and O = P V, for row i:

    dV  = P^T dO
    dP  = dO V^T
    dS  = P * (dP - delta),      delta_i = sum_d dO_id O_id - dlse_i
    dQ  = scale * (dS * S') K,   S' the derivative of the score modification
    dK  = scale * (dS * S')^T Q

``delta`` comes from the derivative of the softmax, dS_ij = P_ij (dP_ij - sum_j' P_ij' dP_ij'). The sum equals
``sum_d dO_id O_id`` (Dao et al. 2022, appendix B.2), so delta is computed before any tile is visited. Since
d lse / d S = P, the gradient of lse is subtracted from delta. A sink is a key whose value is zero, so its dP is 0.

Dropout multiplies P by Z, which is 0 or 1 / (1 - p), before the product with V. So dV = (Z * P)^T dO and
dP = Z * (dO V^T). The formula of delta stays the same, because O contains Z.

The loop is that of FlashAttention-2 (Dao 2023, algorithm 2): **K/V outside, Q inside**. dK and dV of a tile of keys
stay in registers. dQ is in memory; each tile of keys adds its part. Fully masked tiles are skipped. FlashAttention
(2022, algorithm 4) uses the same loop with three differences: it saves the maximum and the sum of each row instead of
lse, it recomputes delta in every tile, and it runs the tiles of keys of a head one after another.

`flash_attention_2_backward` has 15 positional arguments because its signature is public: the arguments and results of
the forward pass, and the gradients of the results.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..variant.key import encode
from ..variant.masks import Mask
from ..variant.program import computed_in, restore
from ..variant.sparse.blocks import for_tensors
from .standard import ScoreFn, dropped, heads_first, modified, positions, tile_scores
from .tiled import Dropout, blocks, key_ranges, masked, of_tile


class Gradients(NamedTuple):
    """Gradients of q, k, v, the sink and the score modifications' tensors, each with its tensor's shape and dtype."""

    q: Tensor
    k: Tensor
    v: Tensor
    sink: Tensor | None
    tensors: tuple[Tensor, ...]


def flash_attention_2_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    mask: Mask | None = None,
    score_mods: Sequence[ScoreFn] = (),
    sink: Tensor | None = None,
    scale: float | None = None,
    tensors: Sequence[Tensor] = (),
    dlse: Tensor | None = None,
    dropout: Dropout | None = None,
    block_M: int = 64,
    block_N: int = 64,
) -> Gradients:
    """The gradients of attention.

    Args:
        do: (batch, seqlen_q, heads, head_dim_v), the gradient of o.
        q, k, v, mask, score_mods, sink, scale, dropout: as `flash_attention_2`.
        o, lse: the results of the forward pass.
        tensors: tensors that the score modifications read and that need gradients, such as a bias.
        dlse: (batch, heads, seqlen_q), the gradient of lse; None: 0.
        block_M, block_N: rows of Q, and of K and V, in a tile.
    """
    seqlen_q, seqlen_k, kv_heads = q.shape[1], k.shape[1], k.shape[2]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q_bh, k_bh, v_bh = heads_first(q, k, v)
    do_bh, o_bh = (x.transpose(1, 2).to(q_bh.dtype) for x in (do, o))
    delta = (do_bh * o_bh).sum(dim=-1)
    if dlse is not None:
        delta = delta - dlse
    dq, dk, dv = torch.zeros_like(q_bh), torch.zeros_like(k_bh), torch.zeros_like(v_bh)
    # The score modifications read copies of the tensors in the dtype of sums, in which the gradients are summed, too.
    wide = [x.detach().to(torch.promote_types(x.dtype, q_bh.dtype)).requires_grad_() for x in tensors]
    mask, score_mods = _reading(for_tensors(mask, q, k), score_mods, tensors, wide, q_bh.dtype)
    dtensors = [torch.zeros_like(x) for x in wide]
    visible = [(rows, *key_ranges(q_bh, k_bh, rows, mask)) for rows in blocks(0, seqlen_q, block_M)]
    for keys in blocks(0, seqlen_k, block_N):  # on a GPU, one thread block per iteration
        for rows, (lo, hi), (full_lo, full_hi) in visible:
            if keys.stop <= lo or keys.start >= hi:
                continue
            raw, scores = _recomputed(q_bh, k_bh, rows, keys, score_mods, scale)
            seen = scores.detach()
            if keys.start < full_lo or keys.stop > full_hi:
                seen = masked(seen, mask, positions(q_bh, k_bh, rows, keys))
            p = _probabilities(seen, lse[:, :, rows])
            z = of_tile(dropout, rows, keys)
            dv[:, :, keys] += dropped(p, z).mT @ do_bh[:, :, rows]
            dp = dropped(do_bh[:, :, rows] @ v_bh[:, :, keys].mT, z)
            ds = p * (dp - delta[:, :, rows, None])
            draw, *parts = _through_score_mods(raw, scores, ds, wide)
            for total, part in zip(dtensors, parts, strict=True):
                total += part
            dq[:, :, rows] += scale * (draw @ k_bh[:, :, keys])
            dk[:, :, keys] += scale * (draw.mT @ q_bh[:, :, rows])
    dsink = None if sink is None else _sink_gradient(sink, lse, delta)
    # dk and dv are summed over the query heads that share a kv head.
    dk, dv = (x.unflatten(1, (kv_heads, -1)).sum(dim=2) for x in (dk, dv))
    dq, dk, dv = (x.transpose(1, 2).to(like.dtype) for x, like in ((dq, q), (dk, k), (dv, v)))
    return Gradients(dq, dk, dv, dsink, tuple(total.to(x.dtype) for total, x in zip(dtensors, tensors)))


def _reading(
    mask: Mask | None,
    score_mods: Sequence[ScoreFn],
    tensors: Sequence[Tensor],
    copies: Sequence[Tensor],
    dtype: torch.dtype,
) -> tuple[Mask | None, Sequence[ScoreFn]]:
    """The mask and the score modifications, computing in `dtype`; the modifications read `copies`, not `tensors`."""
    mask, _ = computed_in(dtype, mask, ())
    key, operands = encode(None, score_mods)
    copy_of = {id(tensor): copy for tensor, copy in zip(tensors, copies)}
    operands.tensors = [copy_of.get(id(tensor), tensor) for tensor in operands.tensors]
    return mask, restore(key, operands, dtype)[1]


def _recomputed(
    q: Tensor, k: Tensor, rows: slice, keys: slice, score_mods: Sequence[ScoreFn], scale: float
) -> tuple[Tensor, Tensor]:
    """The tile's scaled scores, as a leaf of autograd's graph, and the modified scores as a function of them."""
    raw = tile_scores(q, k, rows, keys, (), scale).detach()
    if not score_mods:  # without a leaf: in an autograd.Function, torch.compile of PyTorch 2.11 refuses to make one
        return raw, raw
    raw.requires_grad_()
    with torch.enable_grad():
        return raw, modified(raw, positions(q, k, rows, keys), score_mods)


def _probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    """exp(scores - lse); 0 in rows that see no key, where lse is -inf."""
    return torch.exp(scores - torch.where(lse == -torch.inf, 0.0, lse)[..., None])


def _through_score_mods(raw: Tensor, scores: Tensor, ds: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The gradients of the scaled scores and of the modifications' tensors, given `ds`, that of the modified scores.

    Autograd differentiates the modifications, on one tile. Kernels use dual numbers instead.
    """
    if scores is raw:
        return [ds, *map(torch.zeros_like, tensors)]
    if not scores.requires_grad:  # the modified scores depend on neither `raw` nor `tensors`
        return [torch.zeros_like(raw), *map(torch.zeros_like, tensors)]
    gradients: Sequence[Tensor | None] = torch.autograd.grad(scores, (raw, *tensors), ds, allow_unused=True)
    return [torch.zeros_like(x) if grad is None else grad for grad, x in zip(gradients, (raw, *tensors), strict=True)]


def _sink_gradient(sink: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """The sink's probability times (0 - delta), summed over batch and rows; a sink's dP is 0."""
    p = _probabilities(sink.to(lse.dtype)[None, :, None, None], lse)
    return -(p * delta[..., None]).sum(dim=(0, 2, 3)).to(sink.dtype)
