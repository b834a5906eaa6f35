"""Standard attention with all scores at once, in any dtype and order of summation; the oracle and eager run it.

It is independent of `tileattn.reference`, of every backend and of the masks' tile ranges. Only `Mask.allows` and the
score modifications, as functions on tensors, are shared.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..call.fp8 import FP8
from ..variant.masks import Mask
from ..variant.sparse.blocks import for_tensors


class Attended(NamedTuple):
    """o (bshd), lse, and the tensors of autograd's graph that a backward pass uses, in the order of summation."""

    o: Tensor
    lse: Tensor
    logits: Tensor
    """(batch, heads, seqlen_q, keys, or keys and a sink); 0 in rows without keys."""
    v: Tensor
    """(batch, heads, keys, head_dim_v): repeated for grouped heads."""
    empty: Tensor
    """(batch, heads, seqlen_q): rows without keys."""
    dropout: Tensor | None
    """(batch, heads, seqlen_q, keys): what probabilities are multiplied by."""


def times(x: Tensor, factor: Tensor | None) -> Tensor:
    """The product of x and the factor; x itself if that is None."""
    return x if factor is None else x * factor


def scores_product(q: Tensor, k: Tensor, q_descale: Tensor | None, k_descale: Tensor | None) -> Tensor:
    """``(q_descale * q) @ (k_descale * k)^T`` in the dtype of q and k."""
    return times(q, q_descale) @ times(k, k_descale).mT


def scores_product_in_fp8(q: Tensor, k: Tensor, q_descale: Tensor | None, k_descale: Tensor | None) -> Tensor:
    """The same product computed in fp8; q and k are float32 and hold values of fp8."""
    return times(times(fp8_product(q.to(FP8), k.to(FP8)), q_descale), k_descale)


def multiplies_fp8(device: torch.device) -> bool:
    """Whether `fp8_product` runs on the matrix units of a device: NVIDIA's from compute capability 8.9 on."""
    # AMD's first units for fp8 take another format (fnuz).
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)


def fp8_product(q: Tensor, k: Tensor) -> Tensor:
    """``q @ k^T`` in float32 by PyTorch's own product of fp8 matrices, `torch._scaled_mm`.

    Args:
        q: (batch, heads, seqlen_q, head_dim), float8_e4m3fn, any strides.
        k: (batch, heads, seqlen_k, head_dim).

    Returns:
        (batch, heads, seqlen_q, seqlen_k).
    """
    batch, heads, seqlen_q, _ = q.shape
    seqlen_k = k.shape[2]
    if q.numel() == 0 or k.numel() == 0:
        return q.float() @ k.float().mT
    q, k = _padded(q), _padded(k)
    scores = q.new_empty((batch, heads, q.shape[2], k.shape[2]), dtype=torch.float32)
    one = torch.ones((), dtype=torch.float32, device=q.device)
    for b in range(batch):
        for h in range(heads):
            # With fast accumulation the whole sum over head_dim stays in the matrix unit, which keeps some 13 bits
            # below the largest product: what a fused kernel's scores are. Without, cuBLAS adds up partial sums in
            # float32 beside it.
            scores[b, h] = torch._scaled_mm(
                q[b, h], k[b, h].mT, scale_a=one, scale_b=one, out_dtype=torch.float32, use_fast_accum=True
            )
    return scores[:, :, :seqlen_q, :seqlen_k]


def _padded(x: Tensor) -> Tensor:
    """Contiguous, with zeros behind the last two dimensions up to multiples of 16: `torch._scaled_mm` takes no others.

    So the first matrix has its rows contiguous, and the second, transposed, its columns, which is asked for as well.
    """
    *others, rows, dim = x.shape
    padded = x.new_zeros((*others, -(-rows // 16) * 16, -(-dim // 16) * 16))
    padded[..., :rows, :dim] = x
    return padded


def weighted_sum(logits: Tensor, v: Tensor, dropout: Tensor | None) -> Tensor:
    """(softmax(logits) * dropout) @ v."""
    return times(torch.softmax(logits, dim=-1)[..., : v.shape[2]], dropout) @ v


def weighted_sum_in_fp8(logits: Tensor, v: Tensor, dropout: Tensor | None) -> Tensor:
    """The same with probabilities that are rounded to fp8 before they meet v, and divided by their sum after it."""
    if logits.shape[-1] == 0:  # a maximum of nothing
        return weighted_sum(logits, v, dropout).bfloat16()
    p = torch.exp(logits - logits.amax(dim=-1, keepdim=True))
    rounded = p[..., : v.shape[2]].to(FP8).to(p.dtype)
    return (times(rounded, dropout) @ v / p.sum(dim=-1, keepdim=True)).bfloat16()


def _indices(scores: Tensor, keys: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """b, h, q, k for (batch, heads, seqlen_q, seqlen_k) scores; q is a position, aligned bottom-right."""
    b, h, row = (torch.arange(size, device=scores.device) for size in scores.shape[:3])
    q = row + (scores.shape[3] - scores.shape[2])
    return b[:, None, None, None], h[:, None, None], q[:, None], keys


class AttentionInputs(NamedTuple):
    """The arguments of `oracle_attention`."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask | None
    score_mods: Sequence[Callable[..., Tensor]]
    sink: Tensor | None
    scale: float | None
    descales: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None)
    dropout: Tensor | None = None


def attend(
    inputs: AttentionInputs,
    dtype: torch.dtype,
    order: Callable[[Tensor, int], Tensor],
    product: Callable[[Tensor, Tensor, Tensor | None, Tensor | None], Tensor] = scores_product,
    weighted: Callable[[Tensor, Tensor, Tensor | None], Tensor] = weighted_sum,
) -> Attended:
    """Attention, computed in `dtype`, with the sums over head_dim and over keys in the given order.

    `product(q, k, q_descale, k_descale)` is the scores before the scale, of q and k (batch, heads, seqlen, head_dim)
    and descales that broadcast to them. `weighted(logits, v, dropout)` is the sum of values, weighted by the softmax of
    logits (.., keys, or keys and a sink), times dropout.
    """
    q, k, v, mask, score_mods, sink, scale, descales, dropout = inputs
    group = q.shape[2] // k.shape[2]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    keys = order(torch.arange(k.shape[1], device=k.device), 0)
    q = order(q.to(dtype), 3).transpose(1, 2)
    k = order(order(k.to(dtype), 1), 3).transpose(1, 2).repeat_interleave(group, dim=1)
    v = order(v.to(dtype), 1).transpose(1, 2).repeat_interleave(group, dim=1)
    q_descale, k_descale, v_descale = (
        None if descale is None else descale.to(dtype).repeat_interleave(group, dim=1)[:, :, None, None]
        for descale in descales
    )

    v = times(v, v_descale)
    scores = product(q, k, q_descale, k_descale) * scale
    index = _indices(scores, keys)
    for score_mod in score_mods:
        scores = score_mod(scores, *index).to(dtype).expand(scores.shape)
    if mask is not None:
        seen = for_tensors(mask, inputs.q, inputs.k)
        assert seen is not None
        scores = scores.masked_fill(~seen.allows(*index), -torch.inf)
    logits = scores
    if sink is not None:
        logits = torch.cat([scores, sink.to(dtype)[None, :, None, None].expand(*scores.shape[:3], 1)], dim=-1)
    # A row without keys has no softmax. It gets some other scores first, so that autograd meets no NaN there.
    empty = (logits == -torch.inf).all(dim=-1)
    logits = logits.masked_fill(empty[..., None], 0.0)
    dropout = None if dropout is None else dropout.to(dtype)[..., keys]
    o = weighted(logits, v, dropout).masked_fill(empty[..., None], 0.0)
    lse = torch.logsumexp(logits.to(torch.promote_types(dtype, torch.float32)), dim=-1)
    return Attended(o.transpose(1, 2), lse.masked_fill(empty, -torch.inf), logits, v, empty, dropout)


# Orders of sums: a tensor with one dimension in that order. Their gradients need no sorting, as that of indexing would.


def natural(x: Tensor, dim: int) -> Tensor:
    """As it is."""
    return x


def reverse(x: Tensor, dim: int) -> Tensor:
    """From the last to the first."""
    return x.flip(dim)


def folded(x: Tensor, dim: int) -> Tensor:
    """Every second element, then the others."""
    at = torch.arange(x.shape[dim], device=x.device)
    return x.index_select(dim, torch.cat([at[::2], at[1::2]]))


def shuffled(x: Tensor, dim: int) -> Tensor:
    """At random; the same for the same size."""
    return x.index_select(dim, _permutation(x.shape[dim], x.device))


@functools.lru_cache(maxsize=256)
def _permutation(size: int, device: torch.device) -> Tensor:
    return torch.randperm(size, generator=torch.Generator().manual_seed(size)).to(device)


@functools.lru_cache(maxsize=32)
def random_signs(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """1 and -1 at random, float64; the same for the same shape."""
    drawn = torch.randint(2, shape, generator=torch.Generator().manual_seed(0))
    return (2.0 * drawn.double() - 1.0).to(device)
