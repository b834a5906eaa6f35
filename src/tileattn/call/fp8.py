"""8-bit floating-point inputs: the descales that belong to them, and a quantisation that makes both.

A tensor of :data:`FP8` elements holds a value divided by a *descale*, so that the 8 bits are spent on the values that
occur: an element stands for ``float(x) * descale``. There is one descale for each batch element and kv head, of q as
well (the query heads of a group share it). Names and granularity are those of FlashAttention-3 (Shah et al. 2024, arXiv
2407.08608); its block quantisation, with a descale for each tile, is finer.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn


class Descales(NamedTuple):
    """What the elements of fp8 q, k and v are multiplied by: (batch, kv_heads) each, float32, contiguous."""

    q: Tensor
    k: Tensor
    v: Tensor


class QuantizedFP8(NamedTuple):
    """fp8 tensors and their descales, under the names that :func:`tileattn.attention` gives its arguments.

    q, k, v: float8_e4m3fn, contiguous, of the shapes that were quantised.
    q_descale, k_descale, v_descale: (batch, kv_heads), float32.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    q_descale: Tensor
    k_descale: Tensor
    v_descale: Tensor


def quantize_fp8(q: Tensor, k: Tensor, v: Tensor, *, layout: str = "bshd") -> QuantizedFP8:
    """q, k and v in float8_e4m3fn, and the descales that turn them back: what ``attention`` takes.

    Each head of each batch element is divided by its largest magnitude and multiplied by 448, the largest that the
    format holds; the query heads of a group count as one head. An element is off by at most 1/16 of its magnitude, or
    by 2^-18 of that largest magnitude where this is more. Nothing is synchronised with the host.

    Args:
        q: (batch, seqlen_q, heads, head_dim), float16, bfloat16, float32 or float64, finite; any strides, here and
            below.
        k: (batch, seqlen_k, kv_heads, head_dim); kv_heads divides heads.
        v: (batch, seqlen_k, kv_heads, head_dim_v).
        layout: "bshd" as above, or "bhsd" for tensors (batch, heads, seqlen, head_dim), results included.

    Returns:
        ``(q, k, v, q_descale, k_descale, v_descale)``, a named tuple: ``attention(**quantize_fp8(q, k, v)._asdict())``.
        The descale of a head without a value other than 0 is 1. The results carry no gradient.

    Raises:
        TypeError: a tensor is not floating-point, or is of 8 bits already.
        ValueError: the layout is unknown, a tensor has not 4 dimensions, or kv_heads does not divide heads.
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
    # Query heads of a group become a dimension of their own, which the maximum runs over.
    groups = x.float().unflatten(heads_dim, (kv_heads, -1))
    others = [dim for dim in range(1, 5) if dim != heads_dim]
    amax = groups.abs().amax(others) if x.numel() else groups.new_zeros(x.shape[0], kv_heads)
    # The smallest normal number, where dividing by 448 would underflow; 1, where there is nothing to divide.
    smallest = torch.finfo(torch.float32).tiny
    descale = torch.where(amax > 0, (amax / torch.finfo(FP8).max).clamp(min=smallest), 1.0)
    shape = [x.shape[0], 1, 1, 1, 1]
    shape[heads_dim] = kv_heads
    # Clamped, because a quotient may be a rounding above 448; some devices turn what does not fit into NaN.
    limit = torch.finfo(FP8).max
    scaled = (groups / descale.view(shape)).clamp(-limit, limit).flatten(heads_dim, heads_dim + 1)
    return scaled.to(FP8, memory_format=torch.contiguous_format), descale


def output_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of o for inputs of `dtype`: theirs, but bfloat16 for fp8."""
    return torch.bfloat16 if dtype == FP8 else dtype


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype of scores, softmax, sums and lse for inputs of `dtype`: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def complete(q_descale: Tensor | None, k_descale: Tensor | None, v_descale: Tensor | None, k: Tensor) -> Descales:
    """Descales as backends get them, of those that were given: None is 1, and sizes that are missing are filled in.

    Args:
        q_descale, k_descale, v_descale: float32, broadcastable to (batch, kv_heads), on k's device; or None.
        k: (batch, seqlen_k, kv_heads, head_dim), for the sizes and the device.
    """
    shape = (k.shape[0], k.shape[2])
    given = (q_descale, k_descale, v_descale)
    ones = None
    if q_descale is None or k_descale is None or v_descale is None:
        # Made for every call: a tensor that is kept could be one that a CUDA graph only writes when it is replayed.
        ones = torch.ones(shape, dtype=torch.float32, device=k.device)
    # What is complete already is passed on as it is, without a copy.
    return Descales(*(ones if x is None else x.expand(shape).contiguous() for x in given))  # type: ignore[arg-type]


def dequantize(x: Tensor, descale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values ``float(x) * descale`` in `dtype`: x (batch, seqlen, heads, dim), descale (batch, kv_heads)."""
    group = x.shape[2] // descale.shape[1]
    return x.to(dtype) * descale.to(dtype).repeat_interleave(group, dim=1)[:, None, :, None]
