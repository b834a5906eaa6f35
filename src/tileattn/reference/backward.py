"""The backward pass of FlashAttention, tile by tile: the probabilities are computed again, never kept.

For one row i of queries, with S = score_mod(scale Q K^T) where the mask allows it, P = exp(S - lse) and O = P V:

    dV  = P^T dO
    dP  = dO V^T
    dS  = P * (dP - delta),      delta_i = sum_d dO_id O_id - dlse_i
    dQ  = scale * (dS * S') K,   S' the derivative of the score modification
    dK  = scale * (dS * S')^T Q

``delta`` comes from the softmax: what raises one probability of a row lowers the others, by their share of
``sum_j P_ij dP_ij``, which is ``sum_d dO_id O_id`` (Dao et al. 2022, appendix B.2) and so is known before any tile is
visited. The gradient of lse joins it, as d lse / d S = P. A sink is a key whose value is zero: dP of it is 0.

Dropout multiplies P by Z, which is 0 or 1 / (1 - p), before it meets V. So dV = (Z * P)^T dO and dP = Z * (dO V^T); O
changes with it, which leaves delta as it is.

The loop is that of FlashAttention-2 (Dao 2023, algorithm 2): **K/V outside, Q inside**. dK and dV of a tile of keys
stay in registers; dQ is added to in memory, by all tiles of keys. Tiles that the mask hides are not visited.
FlashAttention's (2022, algorithm 4) is the same loop: it keeps the maximum and the sum of a row where this keeps their
lse, computes delta anew in every tile, and runs the tiles of keys of a head one after another.

`flash_attention_2_backward` has 15 positional arguments, as its signature is public: those of the forward pass, what it
returned, and the gradients of that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..variant.key import encode
from ..variant.masks import Mask
from ..variant.program import computed_in, restore
from .standard import ScoreFn, dropped, heads_first, modified, positions, tile_scores
from .tiled import Dropout, blocks, key_ranges, masked, of_tile


class Gradients(NamedTuple):
    """Of q, k, v, the sink and the tensors that the score modifications read, each in its own shape and dtype."""

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
        o, lse: what the forward pass returned.
        tensors: those that the score modifications read and whose gradients are wanted, such as a bias.
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
    # What is read of a tensor in 16 bits is read from a copy in the dtype of sums, and so is its gradient added up.
    wide = [x.detach().to(torch.promote_types(x.dtype, q_bh.dtype)).requires_grad_() for x in tensors]
    mask, score_mods = _reading(mask, score_mods, tensors, wide, q_bh.dtype)
    dtensors = [torch.zeros_like(x) for x in wide]
    visible = [(rows, *key_ranges(q_bh, k_bh, rows, mask)) for rows in blocks(0, seqlen_q, block_M)]
    for keys in blocks(0, seqlen_k, block_N):  # on a GPU: a thread block for each
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
    # Query heads that share keys and values add to their gradients.
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
    """The mask, and the modifications with these tensors' copies in their place, computing in `dtype`."""
    mask, _ = computed_in(dtype, mask, ())
    key, operands = encode(None, score_mods)
    copy_of = {id(tensor): copy for tensor, copy in zip(tensors, copies)}
    operands.tensors = [copy_of.get(id(tensor), tensor) for tensor in operands.tensors]
    return mask, restore(key, operands, dtype)[1]


def _recomputed(
    q: Tensor, k: Tensor, rows: slice, keys: slice, score_mods: Sequence[ScoreFn], scale: float
) -> tuple[Tensor, Tensor]:
    """The tile's scaled scores, and the modified ones as a function of them, for autograd."""
    raw = tile_scores(q, k, rows, keys, (), scale).detach().requires_grad_()
    with torch.enable_grad():
        return raw, modified(raw, positions(q, k, rows, keys), score_mods)


def _probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    """exp(scores - lse), 0 in rows that see no key, whose lse is -inf."""
    return torch.exp(scores - torch.where(lse == -torch.inf, 0.0, lse)[..., None])


def _through_score_mods(raw: Tensor, scores: Tensor, ds: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The gradients of the scaled scores and of the modifications' tensors, given that of the modified scores.

    Autograd differentiates the modification, on one tile. A kernel computes with dual numbers instead.
    """
    if scores is raw:
        return [ds, *map(torch.zeros_like, tensors)]
    if not scores.requires_grad:  # it depends on neither
        return [torch.zeros_like(raw), *map(torch.zeros_like, tensors)]
    found: Sequence[Tensor | None] = torch.autograd.grad(scores, (raw, *tensors), ds, allow_unused=True)
    return [torch.zeros_like(x) if grad is None else grad for grad, x in zip(found, (raw, *tensors), strict=True)]


def _sink_gradient(sink: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """Its probability times (0 - delta), summed over batch and rows: its value is zero, and so is its dP."""
    p = _probabilities(sink.to(lse.dtype)[None, :, None, None], lse)
    return -(p * delta[..., None]).sum(dim=(0, 2, 3)).to(sink.dtype)
