"""8-bit floating-point inputs: their descales, and the quantisation that produces both.

A tensor of :data:`FP8` elements holds values divided by a *descale*: an element x stands for ``float(x) * descale``.
The descale adapts the range of the 8-bit format to the values that occur. There is one descale for each batch element
and kv head, for q as well: the query heads of a group share one. Names and granularity are those of FlashAttention-3
(Shah et al. 2024, arXiv 2407.08608). The paper's block quantisation, with a descale for each tile, is finer.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn


class Descales(NamedTuple):
    """The factors of the elements of fp8 q, k and v: (batch, kv_heads) each, float32, contiguous."""

    q: Tensor
    k: Tensor
    v: Tensor


class QuantizedFP8(NamedTuple):
    """The result of :func:`quantize_fp8`. Field names are argument names of :func:`tileattn.attention`.

    q, k, v: float8_e4m3fn, contiguous, in the shapes of the tensors that were quantised.
    q_descale, k_descale, v_descale: (batch, kv_heads), float32.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    q_descale: Tensor
    k_descale: Tensor
    v_descale: Tensor


def quantize_fp8(q: Tensor, k: Tensor, v: Tensor, *, layout: str = "bshd") -> QuantizedFP8:
    """Quantises q, k and v to float8_e4m3fn, with the descales that :func:`tileattn.attention` needs.

    Each head of each batch element is divided by its largest magnitude and multiplied by 448, the largest finite value
    of the format. The query heads of a group are quantised as one head. The error of an element is at most 1/16 of its
    magnitude or 2^-18 of the head's largest magnitude, whichever is larger. There is no host-device synchronisation.

    Args:
        q: (batch, seqlen_q, heads, head_dim), float16, bfloat16, float32 or float64, finite. q, k and v may have any
            strides.
        k: (batch, seqlen_k, kv_heads, head_dim); ``heads`` must be a multiple of ``kv_heads``.
        v: (batch, seqlen_k, kv_heads, head_dim_v).
        layout: "bshd" as above, or "bhsd" for tensors (batch, heads, seqlen, head_dim), results included.

    Returns:
        ``(q, k, v, q_descale, k_descale, v_descale)``, a named tuple: ``attention(**quantize_fp8(q, k, v)._asdict())``.
        A head that is all zeros has descale 1. The results carry no gradient.

    Raises:
        TypeError: a tensor is not floating-point, or already has 8 bits.
        ValueError: the layout is unknown, a tensor does not have 4 dimensions, or the numbers of heads do not fit.
    """
    if layout != "bshd" and layout != "bhsd":
        raise ValueError(f'layout must be "bshd" or "bhsd", got {layout!r}')
    heads = 2 if layout == "bshd" else 1
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not x.dtype.is_floating_point or x.dtype.itemsize == 1:
            raise TypeError(f"{name} must be float16, bfloat16, float32 or float64, got {x.dtype}")
        if x.ndim != 4:
            raise ValueError(f"{name} must have 4 dimensions, got shape {tuple(x.shape)}")
    kv_heads = k.shape[heads]
    if kv_heads == 0 or q.shape[heads] % kv_heads or v.shape[heads] != kv_heads:
        raise ValueError(
            f"the heads of q must be a multiple of those of k and v, got {q.shape[heads]}, {kv_heads} and "
            f"{v.shape[heads]} (layout={layout!r})"
        )
    with torch.no_grad():
        (q8, q_descale), (k8, k_descale), (v8, v_descale) = (_quantize(x, heads, kv_heads) for x in (q, k, v))
    return QuantizedFP8(q8, k8, v8, q_descale, k_descale, v_descale)


def _quantize(x: Tensor, heads_dim: int, kv_heads: int) -> tuple[Tensor, Tensor]:
    """One tensor in fp8, and its descales (batch, kv_heads)."""
    # The query heads of a group become a separate dimension; the maximum is taken over it too.
    groups = x.float().unflatten(heads_dim, (kv_heads, -1))
    others = [dim for dim in range(1, 5) if dim != heads_dim]
    amax = groups.abs().amax(others) if x.numel() else groups.new_zeros(x.shape[0], kv_heads)
    # The clamp keeps the quotient by 448 from underflowing. The descale is 1 where all values are 0.
    smallest = torch.finfo(torch.float32).tiny
    descale = torch.where(amax > 0, (amax / torch.finfo(FP8).max).clamp(min=smallest), 1.0)
    shape = [x.shape[0], 1, 1, 1, 1]
    shape[heads_dim] = kv_heads
    # A rounded quotient may exceed 448, which some devices convert to NaN.
    limit = torch.finfo(FP8).max
    scaled = (groups / descale.view(shape)).clamp(-limit, limit).flatten(heads_dim, heads_dim + 1)
    return scaled.to(FP8, memory_format=torch.contiguous_format), descale


def output_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of o for inputs of `dtype`: the same, or bfloat16 for fp8."""
    return torch.bfloat16 if dtype == FP8 else dtype


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype of scores, softmax, sums and lse for inputs of `dtype`: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def complete(q_descale: Tensor | None, k_descale: Tensor | None, v_descale: Tensor | None, k: Tensor) -> Descales:
    """The descales that backends get: None becomes ones, and the others are expanded to (batch, kv_heads).

    Args:
        q_descale, k_descale, v_descale: float32, broadcastable to (batch, kv_heads), on k's device; or None.
        k: (batch, seqlen_k, kv_heads, head_dim), for the sizes and the device.
    """
    shape = (k.shape[0], k.shape[2])
    given = (q_descale, k_descale, v_descale)
    ones = None
    if q_descale is None or k_descale is None or v_descale is None:
        # Not cached: a tensor that was created during the capture of a CUDA graph is only written when it is replayed.
        ones = torch.ones(shape, dtype=torch.float32, device=k.device)
    # A descale that already has this shape is not copied.
    return Descales(*(ones if x is None else x.expand(shape).contiguous() for x in given))  # type: ignore[arg-type]


def dequantize(x: Tensor, descale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values ``float(x) * descale`` in `dtype`: x (batch, seqlen, heads, dim), descale (batch, kv_heads)."""
    group = x.shape[2] // descale.shape[1]
    return x.to(dtype) * descale.to(dtype).repeat_interleave(group, dim=1)[:, None, :, None]
