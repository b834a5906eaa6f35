"""Attention over two parts of the keys, merged: :func:`merge`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..call.validation import check_dense

_LSE_DTYPES = (torch.float32, torch.float64)


def merge(o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the keys of both parts, from the attention of the same queries over each.

    The parts may come from :func:`tileattn.attention`, :func:`tileattn.varlen_attention` or :func:`tileattn.decode`
    with ``return_lse=True``: a prefix that many sequences share and the rest of each, say, or the keys of two devices.
    A sink must be given to one of the two calls only, for it joins the denominator once.

    Args:
        o_a: output of one part (batch, seqlen_q, heads, head_dim_v), or packed (total_q, heads, head_dim_v). A row that
            saw no key (lse = -inf) has weight exactly 0, and may hold anything.
        lse_a: its log-sum-exp (natural logarithm), float32 or float64: (batch, heads, seqlen_q), or (heads, total_q).
        o_b: the same of the other part, of o_a's shape and dtype.
        lse_b: the same, of lse_a's shape and dtype.

    Returns:
        `o` and `lse`, of the same shapes and dtypes, computed in lse's dtype. o = 0 and lse = -inf in a row that saw no
        key in either part. Both are differentiable in all four arguments.

    Raises:
        TypeError, ValueError: shapes, dtypes or devices do not fit each other.

    Source: the online softmax of Milakov and Gimelshein (2018, arXiv 1805.02867), over two blocks.
    """
    _check(o_a, lse_a, o_b, lse_b)
    # m = max(lse_a, lse_b), or 0 where it is infinite: -inf - (-inf) is NaN. It cancels, so it needs no gradient.
    m = torch.maximum(lse_a, lse_b).detach()
    m = m.masked_fill(m.isinf(), 0.0)
    # w = exp(lse - m), l = w_a + w_b
    w_a, w_b = torch.exp(lse_a - m), torch.exp(lse_b - m)
    l = w_a + w_b
    empty = l == 0
    lse = (m + torch.log(l.masked_fill(empty, 1.0))).masked_fill(empty, -torch.inf)
    # o = (w_a o_a + w_b o_b) / l
    l = l.masked_fill(empty, 1.0)
    o = _weighted(w_a / l, o_a) + _weighted(w_b / l, o_b)
    return o.to(o_a.dtype), lse


def _weighted(weight: Tensor, o: Tensor) -> Tensor:
    """The product weight * o, exactly 0 where the weight is, whatever o holds there."""
    weight = weight.transpose(-1, -2)[..., None]
    return weight * o.to(weight.dtype).masked_fill(weight == 0, 0.0)


def _check(o_a: Any, lse_a: Any, o_b: Any, lse_b: Any) -> None:
    if not isinstance(o_a, Tensor) or o_a.ndim not in (3, 4):
        given = tuple(o_a.shape) if isinstance(o_a, Tensor) else type(o_a).__name__
        raise (ValueError if isinstance(o_a, Tensor) else TypeError)(
            f"o_a must be a tensor (batch, seqlen_q, heads, head_dim_v) or (total_q, heads, head_dim_v), got {given}"
        )
    check_dense("o_a", o_a, o_a.ndim, "o's dimensions")
    check_dense("o_b", o_b, o_a.ndim, "o_a's dimensions")
    if not o_a.dtype.is_floating_point:
        raise TypeError(f"o_a must be a floating-point tensor, got {o_a.dtype}")
    for name, lse in (("lse_a", lse_a), ("lse_b", lse_b)):
        if not isinstance(lse, Tensor) or lse.dtype not in _LSE_DTYPES:
            given = getattr(lse, "dtype", type(lse).__name__)
            raise TypeError(
                f"{name} must be a float32 or float64 tensor, got {given}; it is what return_lse=True gives"
            )
    if o_b.shape != o_a.shape or o_b.dtype != o_a.dtype:
        raise ValueError(
            f"o_a and o_b must have one shape and dtype, got {tuple(o_a.shape)} in {o_a.dtype} and {tuple(o_b.shape)} "
            f"in {o_b.dtype}"
        )
    *batch, rows, heads, _ = o_a.shape
    for name, lse in (("lse_a", lse_a), ("lse_b", lse_b)):
        if tuple(lse.shape) != (*batch, heads, rows):
            raise ValueError(
                f"{name} must have shape {(*batch, heads, rows)} for these outputs, got {tuple(lse.shape)}"
            )
    if lse_a.dtype != lse_b.dtype:
        raise TypeError(f"lse_a and lse_b must have one dtype, got {lse_a.dtype} and {lse_b.dtype}")
    devices = {x.device for x in (o_a, lse_a, o_b, lse_b)}
    if len(devices) > 1:
        raise ValueError(f"all tensors must be on one device, got {', '.join(sorted(map(str, devices)))}")
