"""Attention of packed sequences with transformers' arguments for FlashAttention (``cu_seq_lens_q``, ...)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...api.varlen import varlen_attention

Length = int | Tensor | None


def attend_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: tuple[Tensor | None, Tensor | None],
    max_lengths: tuple[Length, Length],
    **options: Any,
) -> Tensor:
    """Attention of packed sequences.

    Args:
        q: (batch, seqlen, heads, head_dim); the batch elements, one after another, are one row of packed tokens.
        k: (batch, seqlen, kv_heads, head_dim).
        v: (batch, seqlen, kv_heads, head_dim_v).
        cu_seqlens: of the queries and of the keys, (sequences + 1,).
        max_lengths: upper bounds of the sequences' numbers of queries and of keys; None: the number of tokens.
        options: keyword arguments of :func:`tileattn.varlen_attention`.

    Returns:
        o (batch, seqlen, heads, head_dim_v).

    Raises:
        ValueError: only one of the two cu_seqlens is given.
    """
    cu_seqlens_q, cu_seqlens_k = cu_seqlens
    if cu_seqlens_q is None or cu_seqlens_k is None:
        missing = "cu_seq_lens_q" if cu_seqlens_q is None else "cu_seq_lens_k"
        raise ValueError(f"packed sequences need both cu_seq_lens_q and cu_seq_lens_k, got no {missing}")
    q_rows, k_rows, v_rows = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
    starts = (cu_seqlens_q.to(torch.int32), cu_seqlens_k.to(torch.int32))
    bounds = (_bound(max_lengths[0], q_rows), _bound(max_lengths[1], k_rows))
    o = varlen_attention(q_rows, k_rows, v_rows, *starts, *bounds, **options)
    assert isinstance(o, Tensor)
    unpacked: Tensor = o.unflatten(0, q.shape[:2])
    return unpacked


def _bound(length: Length, rows: Tensor) -> int:
    """An upper bound of the sequences' lengths. A tensor on a GPU is not read: that would synchronise with the GPU."""
    if isinstance(length, Tensor):
        length = int(length) if length.device.type == "cpu" else None
    return rows.shape[0] if length is None else length
