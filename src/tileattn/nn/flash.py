"""FlashAttention 1 and 2 as modules that run :mod:`tileattn.reference`: plain PyTorch, meant to be read.

The memory of both passes is linear in seqlen. The forward pass saves q, k, v, o and one number per row, lse. From
these the backward pass recomputes the probabilities, a tile at a time. For speed, take a module that runs
:func:`tileattn.attention`: its kernels compute the same algorithm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..call.dropout import draw_seed, keep_mask, weight_of_kept
from ..call.fp8 import accumulator
from ..reference import flash_attention_1, flash_attention_2, flash_attention_2_backward
from ..reference.standard import ScoreFn
from ..reference.tiled import Dropout
from ..variant.masks import Mask
from ..variant.scores import Bias
from .base import SelfAttention, check_positive

# torch.compile raises with this text under `fullgraph=True`; otherwise it leaves the loop uncompiled.
_NOT_TRACED = (
    "the gradients of FlashAttentionV1 and V2 with attn_mask are not traced: leave fullgraph=True out, compute without "
    "gradients, or take MaskedAttention"
)


class _Loop(Protocol):
    """A forward pass of :mod:`tileattn.reference.tiled`."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask | None,
        score_mods: Sequence[ScoreFn] = (),
        *,
        dropout: Dropout | None,
        block_M: int,
        block_N: int,
    ) -> tuple[Tensor, Tensor]: ...


class _TiledAttention(torch.autograd.Function):
    """Runs one of the two forward loops, and the one backward loop (:mod:`tileattn.reference.backward`).

    Autograd does not record inside `forward`, so each tile is freed after its iteration.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        mask: Mask | None,
        dropout_p: float,
        loop: _Loop,
        block_size: int,
    ) -> Tensor:
        ctx.mask, ctx.dropout_p, ctx.block_size = mask, dropout_p, block_size
        seed = draw_seed(q.device) if dropout_p else None
        # The loops compute in float32; autocast would cast their matrix products to 16 bits.
        with torch.autocast(q.device.type, enabled=False):
            dropout = _dropout(seed, dropout_p, q)
            o, lse = loop(q, k, v, mask, _score_mods(bias), dropout=dropout, block_M=block_size, block_N=block_size)
        ctx.save_for_backward(q, k, v, bias, o, lse, seed)
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bias, o, lse, seed = ctx.saved_tensors
        with torch.autocast(do.device.type, enabled=False):
            dropout = _dropout(seed, ctx.dropout_p, q)
            dq, dk, dv, _, of_tensors = flash_attention_2_backward(
                do, q, k, v, o, lse, ctx.mask, _score_mods(bias), dropout=dropout,
                tensors=(bias,) if ctx.needs_input_grad[3] else (), block_M=ctx.block_size, block_N=ctx.block_size,
            )  # fmt: skip
        return dq, dk, dv, *(of_tensors or (None,)), None, None, None, None


def _score_mods(bias: Tensor | None) -> tuple[ScoreFn, ...]:
    return () if bias is None else (Bias(bias),)


def _dropout(seed: Tensor | None, p: float, q: Tensor) -> Dropout | None:
    """The factors of a tile's probabilities, by :mod:`tileattn.call.dropout`: one seed gives both passes the same."""
    if seed is None:
        return None
    batch, heads, weight, dtype = q.shape[0], q.shape[2], weight_of_kept(p), accumulator(q.dtype)
    return lambda rows, keys: keep_mask(seed, p, batch, heads, rows, keys).to(dtype) * weight


class _FlashAttention(SelfAttention):
    """Base class of the two modules: it adds the size of the tiles. The modules take no cache.

    Args:
        embed_dim, num_heads, num_kv_heads, dropout, bias, causal, device, dtype: as :class:`SelfAttention`.
        block_size: rows of Q, and of K and V, in a tile; 1 or more.
    """

    loop: _Loop

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        block_size: int = 64,
        num_kv_heads: int | None = None,
        dropout: float = 0.0,
        bias: bool = True,
        causal: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        block_size = check_positive("block_size", block_size)
        super().__init__(
            embed_dim,
            num_heads,
            num_kv_heads=num_kv_heads,
            dropout=dropout,
            bias=bias,
            causal=causal,
            device=device,
            dtype=dtype,
        )
        self.block_size = block_size

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        if bias is not None and torch.compiler.is_dynamo_compiling() and torch.is_grad_enabled():
            torch._dynamo.graph_break(msg=_NOT_TRACED)
        o: Tensor = _TiledAttention.apply(q, k, v, bias, mask, self.dropout_p, self.loop, self.block_size)
        return o, None

    def _kept(self, qkv: int, rows: int, seqlen: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
        # A tile has at most block_size rows and keys, and is there for all heads at once.
        size, block = accumulator(dtype).itemsize, min(self.block_size, seqlen)
        return qkv, 0, rows * size, rows // seqlen * block * block * size

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, block_size={self.block_size}"


class FlashAttentionV1(_FlashAttention):
    """FlashAttention: K/V tiles in the outer loop, Q tiles in the inner loop. Visits every tile, masked or not.

    Args:
        embed_dim, num_heads, num_kv_heads, dropout, bias, causal, device, dtype: as :class:`SelfAttention`.
        block_size: rows of Q, and of K and V, in a tile; 1 or more.

    Source: Dao et al. 2022 (arXiv 2205.14135), algorithm 1; :func:`tileattn.reference.flash_attention_1`.
    """

    loop = staticmethod(flash_attention_1)


class CausalEfficiency(NamedTuple):
    """Number of tiles in a causal forward pass; see :meth:`FlashAttentionV2.get_causal_efficiency`.

    visited: tiles that the loop computes. total: tiles of the whole matrix of scores.
    """

    visited: int
    total: int

    @property
    def saving(self) -> float:
        """The fraction of tiles that are skipped: 0 with no tile or one, approaching 1/2 with many."""
        return 1 - self.visited / self.total if self.total else 0.0


class FlashAttentionV2(_FlashAttention):
    """FlashAttention-2: Q tiles in the outer loop, K/V tiles in the inner loop. Fully masked tiles are skipped.

    Args:
        embed_dim, num_heads, num_kv_heads, dropout, bias, causal, device, dtype: as :class:`SelfAttention`.
        block_size: rows of Q, and of K and V, in a tile; 1 or more.

    Source: Dao 2023 (arXiv 2307.08691), algorithm 1; :func:`tileattn.reference.flash_attention_2`.
    """

    loop = staticmethod(flash_attention_2)

    def get_causal_efficiency(self, seqlen: int) -> CausalEfficiency:
        """The number of tiles that causal attention over `seqlen` positions visits, and the number of all tiles.

        The ``n = ceil(seqlen / block_size)`` blocks give ``n * n`` tiles per head. The i-th block of queries (counted
        from 1) sees the first i blocks of keys, so a causal pass visits ``n * (n + 1) / 2`` tiles. The numbers are
        those of a causal pass also where this module is not causal. `saving` is ``(1 - 1 / n) / 2``; if every tile
        takes equally long, it is the fraction of the time that causal attention saves.

        Raises:
            TypeError, ValueError: seqlen is not a positive int.
        """
        seqlen = check_positive("seqlen", seqlen)
        blocks = -(-seqlen // self.block_size)
        return CausalEfficiency(visited=blocks * (blocks + 1) // 2, total=blocks * blocks)
