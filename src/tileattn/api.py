"""The public functions: they check arguments, name the variant, choose a backend and run it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import ops
from .dispatch import Forward, prepare_forward, select
from .masks import Mask
from .validation import check_arguments, check_operand_devices, check_variant
from .variant import Operands, encode, normalize

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
    if mask is None and score_mod is None and sink is None and _is_plain(q, k, v):
        o, lse = _plain_forward(q, k, v, causal, scale, dropout_p, layout, return_lse, backend)
    else:
        check_arguments(q, k, v, sink, dropout_p, layout, scale)
        q, k, v = _as_bshd(layout, q, k, v)
        o, lse = _variant_forward(q, k, v, mask, score_mod, causal, scale, sink, return_lse, backend)
    if layout == "bhsd":
        o = o.transpose(1, 2)
    return (o, lse) if return_lse else o  # type: ignore[return-value]


def _as_bshd(layout: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (q, k, v) if layout == "bshd" else (q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))


def _scale(scale: float | None, q: torch.Tensor) -> float:
    return 1.0 / math.sqrt(q.shape[3]) if scale is None else float(scale)


def _variant_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: MaskLike | None,
    score_mod: ScoreModLike | None,
    causal: bool,
    scale: float | None,
    sink: torch.Tensor | None,
    return_lse: bool,
    backend: str | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Any call, on checked q, k, v and sink (bshd)."""
    normal_mask, mods = normalize(mask, score_mod, causal)
    check_variant(normal_mask, mods, q, k)
    variant, operands = encode(normal_mask, mods)
    check_operand_devices(operands.tensors, q)
    scale = _scale(scale, q)
    needs_grad = torch.is_grad_enabled() and _requires_grad((q, k, v, sink, *operands.tensors))
    traced = _is_traced(q)
    if needs_grad or not traced:
        call = ops.make_call(q, k, v, sink, variant, needs_grad=needs_grad, return_lse=return_lse)
        if traced:  # sizes may be symbols, which no cache can hold
            forward = select(call, backend).prepare(call, q.shape, k.shape, scale)
        else:
            forward = prepare_forward(call, backend, q.shape, k.shape, scale)
        return forward(q, k, v, sink, operands)
    o, lse = ops.forward(q, k, v, sink, variant, operands.tensors, operands.ints, operands.floats, scale, backend)
    return o, lse


# Prepared forward passes of plain calls (no mask but causal, no modification, no sink), by all that they depend on.
_PLANS: dict[tuple[Any, ...], Forward] = {}
_MAX_PLANS = 4096
_NO_OPERANDS = Operands()


def _plain_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    scale: float | None,
    dropout_p: float,
    layout: str,
    return_lse: bool,
    backend: str | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A plain eager call. Checks and choices are made once for equal metadata: a launch should cost the host little."""
    grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    try:
        key = (
            q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype,
            q.device, k.device, v.device, (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16,
            causal, scale, dropout_p, layout, return_lse, backend, grad,
        )  # fmt: skip
        forward = _PLANS.get(key)
    except (TypeError, RuntimeError):  # an option that cannot be hashed, a tensor without strides: the checks say which
        _plan(q, k, v, causal, scale, dropout_p, layout, return_lse, backend, grad)
        raise
    if forward is None:
        forward = _plan(q, k, v, causal, scale, dropout_p, layout, return_lse, backend, grad)
        if len(_PLANS) >= _MAX_PLANS:  # sizes may vary without end
            _PLANS.clear()
        _PLANS[key] = forward
    q, k, v = _as_bshd(layout, q, k, v)
    return forward(q, k, v, None, _NO_OPERANDS)


def _plan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    scale: float | None,
    dropout_p: float,
    layout: str,
    return_lse: bool,
    backend: str | None,
    needs_grad: bool,
) -> Forward:
    check_arguments(q, k, v, None, dropout_p, layout, scale)
    q, k, v = _as_bshd(layout, q, k, v)
    variant, _ = encode(normalize(None, None, causal)[0], ())
    scale = _scale(scale, q)
    call = ops.make_call(q, k, v, None, variant, needs_grad=needs_grad, return_lse=return_lse)
    return prepare_forward(call, backend, q.shape, k.shape, scale)


def _is_plain(q: Any, k: Any, v: Any) -> bool:
    """Whether q, k and v are plain tensors in plain eager execution."""
    return (
        not _is_traced(q)
        and type(k) is torch.Tensor
        and type(v) is torch.Tensor
        and not torch._C._are_functorch_transforms_active()
    )


def _is_traced(q: Any) -> bool:
    """Whether anything but plain eager execution looks on: torch.compile, export, a dispatch mode, a subclass."""
    return torch.compiler.is_compiling() or type(q) is not torch.Tensor or torch._C._len_torch_dispatch_stack() > 0


def _requires_grad(tensors: tuple[torch.Tensor | None, ...]) -> bool:
    return any(tensor is not None and tensor.requires_grad for tensor in tensors)
