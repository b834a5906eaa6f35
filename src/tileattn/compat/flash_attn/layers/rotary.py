"""``flash_attn.layers.rotary``: rotary position embeddings, with gradients.

:func:`flash_attn.ops.triton.rotary.apply_rotary` describes the arguments that the functions share. x, qkv and kv have
gradients; cos and sin have none, as in flash-attn. Functions that write to their input return it. Their input may be a
leaf that requires a gradient.

Source: Su et al. 2021 (RoFormer, arXiv 2104.09864).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._absent import absent_names
from ._rotation import Part, rotated

if not TYPE_CHECKING:
    __getattr__ = absent_names(
        __name__,
        {
            "ApplyRotaryEmb": "apply_rotary_emb",
            "ApplyRotaryEmbQKV_": "apply_rotary_emb_qkv_",
            "ApplyRotaryEmbKV_": "apply_rotary_emb_kv_",
        },
    )


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Rotates x: (batch, seqlen, heads, head_dim), or (total, heads, head_dim) with cu_seqlens."""
    if cu_seqlens is None:
        _check("x", x, 4, "(batch, seqlen, heads, head_dim)")
    else:
        _check("x", x, 3, "(total, heads, head_dim)")
    return rotated(x, [((), cos, sin)], interleaved, inplace, seqlen_offsets, cu_seqlens, max_seqlen)


apply_rotary_emb_func = apply_rotary_emb  # the name in earlier versions of flash-attn


def apply_rotary_emb_qkv_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Tensor | None = None,
    sin_k: Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
    num_heads_q: int | None = None,
) -> Tensor:
    """Rotates queries and keys in place; returns qkv.

    Args:
        qkv: (batch, seqlen, 3, heads, head_dim), or with num_heads_q (batch, seqlen, num_heads_q + 2 * kv_heads,
            head_dim).
        cos: (rows, rotary_dim / 2), for the queries, and for the keys if cos_k is None.
        sin: (rows, rotary_dim / 2), for the queries, and for the keys if sin_k is None.
        cos_k: (rows, rotary_dim / 2), for the keys.
        sin_k: (rows, rotary_dim / 2), for the keys.
        interleaved: whether pairs are neighbours (GPT-J); else the elements of two halves (GPT-NeoX).
        seqlen_offsets: added to the positions: an int, or a tensor (batch,).
        num_heads_q: the number of query heads in qkv.
    """
    of_q, of_k = _query_and_key(qkv, num_heads_q)
    parts: list[Part]
    if cos_k is None and sin_k is None:
        parts = [((slice(of_q.start, of_k.stop),), cos, sin)]
    else:
        parts = [((of_q,), cos, sin), ((of_k,), cos if cos_k is None else cos_k, sin if sin_k is None else sin_k)]
    return rotated(qkv, parts, interleaved, True, seqlen_offsets)


def apply_rotary_emb_kv_(
    kv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, seqlen_offsets: int | Tensor = 0
) -> Tensor:
    """Rotates the keys of kv (batch, seqlen, 2, heads, head_dim) in place; returns kv."""
    _check("kv", kv, 5, "(batch, seqlen, 2, heads, head_dim)", 2)
    return rotated(kv, [((slice(0, 1),), cos, sin)], interleaved, True, seqlen_offsets)


def apply_rotary_emb_torch(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotates x (batch, seqlen, heads, head_dim) in its own dtype; differentiable in cos and sin as well.

    The rows of cos and sin are those of x: (seqlen, rotary_dim / 2) or (batch, seqlen, rotary_dim / 2).
    """
    rotary_dim = 2 * cos.shape[-1]
    cos, sin = (torch.cat((t, t), -1) if not interleaved else t.repeat_interleave(2, -1) for t in (cos, sin))
    turning, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    turned = turning * cos.unsqueeze(-2) + rotate_half(turning, interleaved) * sin.unsqueeze(-2)
    return torch.cat((turned, rest), -1)


def rotate_half(x: Tensor, interleaved: bool = False) -> Tensor:
    """Rotates each pair ``(a, b)`` of the last dimension by a right angle, to ``(-b, a)``."""
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def _query_and_key(qkv: Any, num_heads_q: int | None) -> tuple[slice, slice]:
    """The slices of dimension 2 that hold queries and keys."""
    if num_heads_q is None:
        _check("qkv", qkv, 5, "(batch, seqlen, 3, heads, head_dim)", 3)
        return slice(0, 1), slice(1, 2)
    shape = "(batch, seqlen, num_heads_q + 2 * kv_heads, head_dim)"
    _check("qkv", qkv, 4, shape)
    of_kv = qkv.shape[2] - num_heads_q
    if num_heads_q < 1 or of_kv < 2 or of_kv % 2:
        raise ValueError(f"qkv must have shape {shape}, got {tuple(qkv.shape)} with num_heads_q {num_heads_q}")
    return slice(0, num_heads_q), slice(num_heads_q, num_heads_q + of_kv // 2)


def _check(name: str, x: Any, ndim: int, shape: str, parts: int | None = None) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    if x.ndim != ndim or parts not in (None, x.shape[2]):
        raise ValueError(f"{name} must have shape {shape}, got {tuple(x.shape)}")


class RotaryEmbedding(torch.nn.Module):
    """Rotates the queries and keys of an attention layer in place; caches its tables of cos and sin.

    Angles are computed in float32, also if the module was moved to another dtype. The tables have the tensors' dtype.

    Args:
        dim: the number of elements of a head that are rotated; even.
        base: pair ``i`` rotates by ``base ** (-2 i / dim)`` from one position to the next.
        interleaved: whether pairs are neighbours (GPT-J); else the elements of two halves (GPT-NeoX).
        scale_base: scores decay with distance (xPos), more slowly for a larger scale_base. None: no decay.
        device: of the buffers.

    Source: Su et al. 2021 (arXiv 2104.09864); xPos, Sun et al. 2022 (arXiv 2212.10554).
    """

    inv_freq: Tensor
    scale: Tensor | None

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.dim, self.base, self.interleaved, self.scale_base = dim, float(base), interleaved, scale_base
        self.register_buffer("inv_freq", self._compute_inv_freq(device), persistent=False)
        evens = torch.arange(0, dim, 2, device=device, dtype=torch.float32)
        self.register_buffer("scale", None if scale_base is None else (evens / dim + 0.4) / 1.4, persistent=False)
        self._seq_len_cached = 0
        self._cos_cached: Tensor | None = None
        self._sin_cached: Tensor | None = None
        self._cos_k_cached: Tensor | None = None
        self._sin_k_cached: Tensor | None = None

    def forward(
        self,
        qkv: Tensor,
        kv: Tensor | None = None,
        seqlen_offset: int | Tensor = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Rotates queries and keys in place.

        Args:
            qkv: as for :func:`apply_rotary_emb_qkv_`; with kv only the queries, (batch, seqlen, heads, head_dim).
            kv: (batch, seqlen, 2, heads, head_dim), or None.
            seqlen_offset: added to the positions: an int, or a tensor (batch,).
            max_seqlen: the number of positions that the tables must have; needed if seqlen_offset is a tensor.
            num_heads_q: as for :func:`apply_rotary_emb_qkv_`.

        Returns:
            qkv; with kv, ``(q, kv)``.

        Raises:
            ValueError: seqlen_offset is a tensor, max_seqlen is None, and no tables are cached.
        """
        if max_seqlen is not None:
            self._update_cos_sin_cache(max_seqlen, qkv.device, qkv.dtype)
        elif not isinstance(seqlen_offset, Tensor):
            self._update_cos_sin_cache(qkv.shape[1] + seqlen_offset, qkv.device, qkv.dtype)
        cos, sin, cos_k, sin_k = self._cos_cached, self._sin_cached, self._cos_k_cached, self._sin_k_cached
        if cos is None or sin is None:
            raise ValueError("max_seqlen must be given where seqlen_offset is a tensor, got None")
        if kv is None:
            return apply_rotary_emb_qkv_(qkv, cos, sin, cos_k, sin_k, self.interleaved, seqlen_offset, num_heads_q)
        q = apply_rotary_emb(qkv, cos, sin, self.interleaved, inplace=True, seqlen_offsets=seqlen_offset)
        cos_k, sin_k = (cos, sin) if cos_k is None or sin_k is None else (cos_k, sin_k)
        return q, apply_rotary_emb_kv_(kv, cos_k, sin_k, self.interleaved, seqlen_offset)

    def _compute_inv_freq(self, device: torch.device | str | None = None) -> Tensor:
        pairs = torch.arange(0, self.dim, 2, device=device, dtype=torch.float32)
        return self.base ** (-pairs / self.dim)

    def _has_tables(self, seqlen: int, device: torch.device | None, dtype: torch.dtype | None) -> bool:
        cos = self._cos_cached
        if cos is None or seqlen > self._seq_len_cached or (cos.device, cos.dtype) != (device, dtype):
            return False
        return not (self.training and cos.is_inference())  # autograd cannot save an inference tensor

    def _update_cos_sin_cache(
        self, seqlen: int, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> None:
        """Computes tables of at least `seqlen` positions in this dtype, on this device, unless they are cached."""
        if self._has_tables(seqlen, device, dtype):
            return
        inv_freq = self.inv_freq
        if inv_freq.dtype != torch.float32:  # moving the module to another dtype has rounded the buffer
            inv_freq = self._compute_inv_freq(device)
        positions = torch.arange(seqlen, device=device, dtype=torch.float32)
        angles = torch.outer(positions, inv_freq.to(positions.device))
        cos, sin = angles.cos(), angles.sin()
        self._seq_len_cached = seqlen
        if self.scale is None or self.scale_base is None:
            self._cos_cached, self._sin_cached = cos.to(dtype), sin.to(dtype)
            return
        # Exponents count from the middle of the table, so that neither factor overflows; only ratios matter.
        exponents = (positions - seqlen // 2) / self.scale_base
        scale = self.scale.to(positions) ** exponents[:, None]
        self._cos_cached, self._sin_cached = (cos * scale).to(dtype), (sin * scale).to(dtype)
        self._cos_k_cached, self._sin_k_cached = (cos / scale).to(dtype), (sin / scale).to(dtype)
