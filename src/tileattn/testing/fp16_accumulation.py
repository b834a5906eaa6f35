"""Eager attention that accumulates in float16: one more reference of the tolerance rule, for kernels that do so.

The rule (:mod:`tileattn.testing.numerics`) allows twice the error of eager PyTorch, which accumulates in float32. A
kernel that accumulates in float16 has a larger error by design, but only from the rounding of its instructions. For
such a kernel the rule gets this additional eager run. It rounds after each 16 terms, as ``mma.m16n8k16`` with float16
sums does, and has no other error.

- S is rounded after each 16 elements of the head dim: relative to the sum so far, 2^-11.
- ``scale * log2(e)``, the row's maximum times that, and their difference are float16: a score that is 8 below the
  maximum (in base 2) is off by up to 2^-9, and its probability by 0.14 %.
- The hardware's float16 exponential is rounded down, here to the next float16 below. (PTX allows ``ex2.approx.f16`` a
  relative error of 2^-9.9; on an H200 a score just below the maximum has the probability 1 - 2^-11, not 1.)
- O is rounded after each 16 keys, to 2^-11 of the sum so far, which after n steps is off by about sqrt(n) of them.
- l, the sum of the probabilities, is a product with ones: rounded likewise, but only over a tile's keys, as the tiles'
  sums are added up in float32. Where no few keys dominate, as with a small scale, lse errs by this more than by all
  else: one rounding of l = 16.6 moves it by up to 2^-7 / 16.6 = 0.0005.

This run uses the final maximum, whereas a kernel raises it step by step. The rule's factor of 2 covers that.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..variant.masks import Mask

STEP = 16


@torch.no_grad()
def eager_fp16_accumulation(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, scale: float, tile: int
) -> tuple[Tensor, Tensor]:
    """O (batch, seqlen_q, heads, head_dim) in float16 and lse (batch, heads, seqlen_q) in float32.

    Args:
        q: float16 (batch, seqlen_q, heads, head_dim).
        k: float16 (batch, seqlen_k, kv_heads, head_dim).
        v: the same shape as k.
        mask: of positions alone, such as Causal, or None.
        scale: of the scores, not negative.
        tile: keys whose probabilities are added up in float16, before float32 takes over; a multiple of 16.
    """
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2).float() for x in (q, k, v))
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = q.new_zeros(*q.shape[:3], k.shape[2])
    for i in range(0, q.shape[3], STEP):
        scores = _rounded(scores + q[..., i : i + STEP] @ k[..., i : i + STEP].mT)
    if mask is not None:
        scores = scores.masked_fill(~_allowed(mask, q.shape[2], k.shape[2], q.device), -torch.inf)
    # At least a little, as 0 times the -inf of hidden scores is NaN.
    factor = float(_rounded(torch.tensor(max(scale * math.log2(math.e), 1e-7))))
    top = _rounded(scores.amax(dim=-1, keepdim=True) * factor)
    empty = top == -torch.inf
    p = _rounded_down(torch.exp2(_rounded(scores * factor - top.masked_fill(empty, 0.0))))
    o, total, of_tile = torch.zeros_like(q), torch.zeros_like(top), torch.zeros_like(top)
    for i in range(0, k.shape[2], STEP):
        o = _rounded(o + p[..., i : i + STEP] @ v[:, :, i : i + STEP])
        if i % tile == 0:
            total, of_tile = total + of_tile, torch.zeros_like(top)
        of_tile = _rounded(of_tile + p[..., i : i + STEP].sum(dim=-1, keepdim=True))
    total += of_tile
    lse = ((top + total.log2()) * math.log(2.0)).squeeze(-1)
    o = torch.where(empty, 0.0, o / total)
    return o.transpose(1, 2).half(), lse


def _rounded(x: Tensor) -> Tensor:
    return x.half().float()


def _rounded_down(x: Tensor) -> Tensor:
    nearest = x.half()
    below = torch.nextafter(nearest, torch.zeros_like(nearest))
    return torch.where(nearest.float() > x, below, nearest).float()


def _allowed(mask: Mask, seqlen_q: int, seqlen_k: int, device: torch.device) -> Tensor:
    rows = torch.arange(seqlen_q, device=device)[:, None] + seqlen_k - seqlen_q
    return torch.as_tensor(mask.allows(0, 0, rows, torch.arange(seqlen_k, device=device)[None])).expand(
        seqlen_q, seqlen_k
    )
