"""The public functions: they check arguments, name the variant, choose a backend and run it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from ..call.scalars import as_float
from ..call.validation import check_arguments, check_descales, refuse_unknown, without_unknown
from ..runtime.dispatch import named
from ..runtime.operators import NO_DESCALES
from ..runtime.prepared import attention_forward
from ..runtime.run import MaskLike, ScoreModLike, as_bshd, as_dropout_p, autocast, checked_choices, is_plain, run
from ..variant.key import normalize
from ..variant.masks import KeyPadding, Mask, check_key_padding

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .signatures import AttentionOptions


# Only type checkers see the overloads: return_lse decides what is returned. The full signature follows them.
@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[AttentionOptions],
) -> torch.Tensor: ...
@overload
def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, return_lse: Literal[True], **options: Unpack[AttentionOptions]
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, return_lse: bool, **options: Unpack[AttentionOptions]
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
@without_unknown
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: MaskLike | None = None,
    key_padding_mask: torch.Tensor | None = None,
    score_mod: ScoreModLike | None = None,
    causal: bool = False,
    scale: float | None = None,
    sink: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    layout: str = "bshd",
    return_lse: bool = False,
    deterministic: bool = False,
    backend: str | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    **unknown: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Exact attention: ``softmax(score_mod(scale * q k^T) + mask) v``, without the matrix of scores in memory.

    Args:
        q: queries (batch, seqlen_q, heads, head_dim); float16 or bfloat16 for the GPU kernels, float32 as well for
            Triton's, float8_e4m3fn for those of sm_90a, float64 on the torch backend; k and v in the same. Any strides
            with a contiguous last dimension, here and below; nothing is copied, but for v in float8_e4m3fn.
        k: keys (batch, seqlen_k, kv_heads, head_dim). ``heads % kv_heads == 0``: grouped-query attention, in which
            query head ``h`` uses key/value head ``h // (heads // kv_heads)``.
        v: values (batch, seqlen_k, kv_heads, head_dim_v); head_dim_v may differ from head_dim.
        mask: a mask of :mod:`tileattn.masks` or a function ``mask(b, h, q, k) -> bool``; None sees all keys.
        key_padding_mask: bool tensor (batch, seqlen_k), True where a key may be seen: the opposite of what
            ``torch.nn.MultiheadAttention`` takes by this name. Joins with ``mask`` and ``causal``; short for
            :class:`tileattn.KeyPadding`, which one makes once for several calls.
        score_mod: a function ``score_mod(score, b, h, q, k)``, a modification of :mod:`tileattn.scores`, or a
            sequence of them, applied in order to the scaled scores.
        causal: short for ``mask=Causal()``; with a mask, both hold. Aligned bottom-right: the last query sees the
            last key. (PyTorch's ``is_causal``, which is aligned top-left, is an argument of
            :func:`tileattn.scaled_dot_product_attention`.)
        scale: of the scores, finite; None means ``head_dim ** -0.5``. Wherever a number is taken, it may be Python's or
            numpy's, or a tensor without dimensions on the CPU and without a gradient. A bool is no number.
        sink: float tensor (heads,): one logit per head that joins the softmax's denominator only.
        dropout_p: the probability, from 0 to 1, with which each weight of the softmax is dropped; those kept are
            divided by ``1 - dropout_p``. In every call where it is not 0: pass 0 when not training. The seed comes from
            torch's generator of the device, and decides alone which are dropped (:mod:`tileattn.call.dropout`); lse
            does not see it. Inductor, the default of ``torch.compile``, has a generator of its own: after the same
            ``torch.manual_seed`` compiled code drops other weights than eager code.
        layout: "bshd" as above, or "bhsd" for tensors (batch, heads, seqlen, head_dim), o included.
        return_lse: also return the log-sum-exp of the scores, sink included, in natural logarithm.
        deterministic: ask for bitwise equal gradients from run to run, as ``torch.use_deterministic_algorithms(True)``
            does; the forward pass always gives equal results.
        backend: "tilelang", "triton", "torch" or "mma" (with a rung and options, as in "mma:split_q,stages=1":
            docs/ladder.md) to run there or raise; None takes the first that accepts the call.
        q_descale: for float8_e4m3fn only: float32 (batch, kv_heads), or broadcastable to it, positive; None is 1. An
            element of q stands for ``float(x) * descale``; the query heads of a group share theirs. See
            :func:`tileattn.quantize_fp8`.
        k_descale: the same for k.
        v_descale: the same for v.
        **unknown: nothing; any other name raises a TypeError that says which one is meant.

    Returns:
        o (batch, seqlen_q, heads, head_dim_v) in q's dtype, or bfloat16 for float8_e4m3fn; with return_lse,
        ``(o, lse)`` with lse (batch, heads, seqlen_q) in float32 (float64 for float64 inputs). A row that
        sees no key has ``o = 0`` and ``lse = -inf``. NaN and infinities in q, and in keys and values that a row sees,
        give what eager PyTorch gives; values that a mask hides must be finite (docs/numerics.md).

        Differentiable, once, in q, k, v, sink and the floating-point tensors of score modifications, through o and lse;
        not in float8_e4m3fn. The backward pass computes the probabilities again, and memory stays linear in the
        lengths. Under ``torch.autocast`` q, k and v are cast, as for PyTorch's own attention.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it, what was given and what is accepted.
        NotImplementedError: no backend (or not the named one) runs the call; the message says why.

    Algorithm: FlashAttention-2 (Dao 2023, arXiv 2307.08691).
    """
    if unknown:
        refuse_unknown(attention, unknown)
    if torch._C._is_any_autocast_enabled():
        q, k, v = autocast(q), autocast(k), autocast(v)
    if type(dropout_p) is not float:  # False == 0.0
        dropout_p = as_dropout_p(dropout_p)
    if scale is not None and type(scale) is not float:  # True == 1.0, which may have a plan
        scale = as_float("scale", scale)
    if key_padding_mask is not None:
        mask = _with_padding(mask, key_padding_mask)
    descales = None if q_descale is k_descale is v_descale is None else (q_descale, k_descale, v_descale)
    if mask is None and score_mod is None and sink is None and dropout_p == 0.0 and is_plain(q, k, v):
        o, lse = attention_forward(q, k, v, descales, layout, causal, scale, return_lse, deterministic, backend)
    else:
        check_arguments(q, k, v, sink, dropout_p, layout, scale)
        choices = checked_choices(causal, scale, return_lse, deterministic, backend)
        return_lse = choices.return_lse
        q, k, v = as_bshd(layout, q, k, v)
        descales = NO_DESCALES if descales is None else descales
        check_descales(descales, q, k)
        o, lse = run(q, k, v, sink, mask, score_mod, dropout_p, choices, descales=descales)
    if layout == "bhsd":
        o = o.transpose(1, 2)
    return (o, lse) if return_lse else o  # type: ignore[return-value]


def check_backend(backend: str | None) -> None:
    """For those who take a backend's name ahead of calls.

    Raises:
        ValueError: there is no backend of that name, or its options are wrong.
    """
    if backend is not None:
        named(backend)


def _with_padding(mask: MaskLike | None, key_padding_mask: torch.Tensor) -> Mask:
    check_key_padding("key_padding_mask", key_padding_mask)
    padding, (given, _) = KeyPadding(key_padding_mask), normalize(mask, None, False)
    return padding if given is None else given & padding
