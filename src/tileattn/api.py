"""The public functions: they check arguments, name the variant, choose a backend and run it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import ops
from .dispatch import select
from .masks import Mask
from .validation import check_arguments, check_variant
from .variant import encode, normalize

MaskLike = Mask | Callable[..., Any]
ScoreModLike = Callable[..., Any] | Sequence[Callable[..., Any]]


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: MaskLike | None = None,
    score_mod: ScoreModLike | None = None,
    causal: bool = False,
    scale: float | None = None,
    sink: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    layout: str = "bshd",
    return_lse: bool = False,
    deterministic: bool = False,
    backend: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Exact attention: ``softmax(score_mod(scale * q k^T) + mask) v``, without the matrix of scores in memory.

    Args:
        q: queries (batch, seqlen_q, heads, head_dim); float16 or bfloat16 for the GPU kernels, float32 and float64 as
            well on the torch backend. Any strides with a contiguous last dimension, here and below; nothing is copied.
        k: keys (batch, seqlen_k, kv_heads, head_dim). ``heads % kv_heads == 0``: grouped-query attention, in which
            query head ``h`` uses key/value head ``h // (heads // kv_heads)``.
        v: values (batch, seqlen_k, kv_heads, head_dim_v); head_dim_v may differ from head_dim.
        mask: a mask of :mod:`tileattn.masks` or a function ``mask(b, h, q, k) -> bool``; None sees all keys.
        score_mod: a function ``score_mod(score, b, h, q, k)``, a modification of :mod:`tileattn.scores`, or a
            sequence of them, applied in order to the scaled scores.
        causal: short for ``mask=Causal()``; with a mask, both hold. Aligned bottom-right: the last query sees the
            last key.
        scale: of the scores; None means ``head_dim ** -0.5``.
        sink: float tensor (heads,): one logit per head that joins the softmax's denominator only.
        dropout_p: probability of dropping a weight; only 0.0 so far.
        layout: "bshd" as above, or "bhsd" for tensors (batch, heads, seqlen, head_dim), o included.
        return_lse: also return the log-sum-exp of the scores, sink included, in natural logarithm.
        deterministic: ask for bitwise equal results from run to run; the forward pass always gives them.
        backend: "tilelang" or "torch" to run there or raise; None takes the first that accepts the call.

    Returns:
        o (batch, seqlen_q, heads, head_dim_v) in q's dtype; with return_lse, ``(o, lse)`` with lse (batch, heads,
        seqlen_q) in float32 (float64 for float64 inputs). A row that sees no key has ``o = 0`` and ``lse = -inf``.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it, what was given and what is accepted.
        NotImplementedError: no backend (or not the named one) runs the call; the message says why.

    Algorithm: FlashAttention-2 (Dao 2023, arXiv 2307.08691).
    """
    if layout == "bhsd":
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    check_arguments(q, k, v, sink, dropout_p, layout, scale)
    normal_mask, mods = normalize(mask, score_mod, causal)
    if normal_mask is not None or mods:
        check_variant(normal_mask, mods, q, k)
    variant, operands = encode(normal_mask, mods)
    if scale is None:
        scale = 1.0 / math.sqrt(q.shape[3])

    if _is_traced(q):
        args = (q, k, v, sink, variant, operands.tensors, operands.ints, operands.floats, scale, backend)
        o, lse = ops.forward(*args)
    else:
        needs_grad = torch.is_grad_enabled() and _requires_grad((q, k, v, sink, *operands.tensors))
        call = ops.make_call(q, k, v, sink, variant, needs_grad)
        o, lse = select(call, backend).forward(call, q, k, v, sink, operands, scale)
    if layout == "bhsd":
        o = o.transpose(1, 2)
    return (o, lse) if return_lse else o


def _is_traced(q: torch.Tensor) -> bool:
    """Whether something other than plain eager execution looks on: torch.compile, export, a dispatch mode, a subclass."""
    return (
        torch.compiler.is_compiling()
        or type(q) not in (torch.Tensor, torch.nn.Parameter)
        or torch._C._len_torch_dispatch_stack() > 0
    )


def _requires_grad(tensors: tuple[torch.Tensor | None, ...]) -> bool:
    for tensor in tensors:
        if tensor is not None and tensor.requires_grad:
            return True
    return False
