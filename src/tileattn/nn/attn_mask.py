"""Mask tensors of the modules: what `attn_mask` may be, and functions that make such masks.

A boolean `attn_mask` is True where a key is hidden, as in ``torch.nn.MultiheadAttention``. The masks of
:mod:`tileattn.masks` and ``scaled_dot_product_attention`` are True where a key is seen. Where a mask of
:mod:`tileattn.masks` says the same (:class:`tileattn.Causal`, :class:`tileattn.KeyPadding`), it is faster: kernels skip
what it hides, and it takes no memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..api.sdpa import additive
from ..call.scalars import as_int


def as_bias(attn_mask: Any, q: Tensor) -> Tensor:
    """An `attn_mask` of self-attention as what is added to the scores.

    Args:
        attn_mask: as in :meth:`SelfAttention.forward`.
        q: (batch, seqlen, num_heads, head_dim).

    Returns:
        (batch or 1, num_heads or 1, seqlen or 1, seqlen), in float32 or q's dtype.

    Raises:
        TypeError, ValueError: attn_mask is not a tensor, or has a wrong dtype, shape or device.
    """
    mask = checked(attn_mask, q)
    mask = mask.expand(*mask.shape[:-1], q.shape[1])
    return additive(~mask, q.dtype) if mask.dtype == torch.bool else mask


def checked(attn_mask: Any, q: Tensor) -> Tensor:
    """An `attn_mask` with four dimensions, each of which broadcasts to (batch, num_heads, seqlen, seqlen).

    Raises:
        TypeError, ValueError: as `as_bias`.
    """
    if not isinstance(attn_mask, Tensor) or attn_mask.dtype not in (torch.bool, torch.float32, q.dtype):
        got = getattr(attn_mask, "dtype", type(attn_mask).__name__)
        raise TypeError(f"attn_mask must be a tensor in bool, float32 or the projections' {q.dtype}, got {got}")
    batch, seqlen, heads, _ = q.shape
    shape = tuple(attn_mask.shape)
    mask = attn_mask.unsqueeze(1) if attn_mask.ndim == 3 else attn_mask[(None,) * (4 - attn_mask.ndim)]
    full = (batch, heads, seqlen, seqlen)
    if not 2 <= attn_mask.ndim <= 4 or any(size not in (1, most) for size, most in zip(mask.shape, full)):
        raise ValueError(
            f"attn_mask must have shape (seqlen, seqlen), (batch, seqlen, seqlen) or (batch, num_heads, seqlen, "
            f"seqlen), each size as in {full} or 1, got {shape}"
        )
    if mask.device != q.device:
        raise ValueError(f"attn_mask must be on x's device {q.device}, got {mask.device}")
    return mask


def create_padding_mask(lengths: Tensor, max_len: int, device: torch.device | str | None = None) -> Tensor:
    """A boolean `attn_mask` that hides the padding at the end of each sequence.

    Args:
        lengths: int tensor (batch,): the number of positions of each sequence that are not padding.
        max_len: positions of the padded sequences, at least 0.
        device: of the mask; None: that of lengths.

    Returns:
        bool (batch, 1, 1, max_len), True from each sequence's length on: where a key is hidden. Functions in which True
        is a key that is seen, such as ``scaled_dot_product_attention``, take ``~mask``.

    Raises:
        TypeError, ValueError: lengths is not an int tensor with one dimension, or max_len not an int of at least 0.
    """
    dtype: Any = getattr(lengths, "dtype", None)
    if not isinstance(dtype, torch.dtype) or dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        raise TypeError(f"lengths must be an int tensor, got {dtype or type(lengths).__name__}")
    if lengths.ndim != 1:
        raise ValueError(f"lengths must have shape (batch,), got {tuple(lengths.shape)}")
    lengths = lengths.to(lengths.device if device is None else device)
    return (torch.arange(_count("max_len", max_len), device=lengths.device) >= lengths[:, None])[:, None, None]


def create_causal_mask(seqlen: int, device: torch.device | str | None = None) -> Tensor:
    """A boolean `attn_mask` that hides later positions: (seqlen, seqlen), True above the diagonal.

    ``scaled_dot_product_attention``, in which True is a key that is seen, takes ``~mask``.

    Raises:
        TypeError, ValueError: seqlen is not an int of at least 0.
    """
    seqlen = _count("seqlen", seqlen)
    return torch.ones(seqlen, seqlen, dtype=torch.bool, device=device).triu(1)


def _count(name: str, value: Any) -> int:
    value = as_int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int of at least 0, got {value!r}")
    if value < 0:
        raise ValueError(f"{name} must be an int of at least 0, got {value}")
    return value
