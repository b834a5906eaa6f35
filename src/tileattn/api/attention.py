"""The public function :func:`attention`.

It normalises and checks the arguments. An eager call without score modification, sink and dropout, whose mask is none
of the user's functions, takes the short path of :mod:`tileattn.runtime.prepared`; others go through
:mod:`tileattn.runtime.run`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from ..call.scalars import as_float
from ..call.validation import check_arguments, check_descales, refuse_unknown, without_unknown
from ..runtime.dispatch import named
from ..runtime.operators import NO_DESCALES
from ..runtime.prepared import attention_forward
from ..runtime.run import MaskLike, ScoreModLike, as_bshd, as_dropout_p, autocast, checked_choices, is_plain, run
from ..variant.constants import constants_of
from ..variant.key import normalize
from ..variant.masks import KeyPadding, Mask, check_key_padding

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .signatures import AttentionOptions


# The overloads are for type checkers: the return type depends on return_lse. The full signature follows them.
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
        q: queries (batch, seqlen_q, heads, head_dim). GPU kernels take float16 and bfloat16; Triton's also take
            float32, those of sm_90a also float8_e4m3fn. The torch backend also takes float64. k and v have q's dtype.
            q, k and v may have any strides with a contiguous last dimension. Inputs are not copied, except v in
            float8_e4m3fn.
        k: keys (batch, seqlen_k, kv_heads, head_dim). ``heads`` must be a multiple of ``kv_heads`` (grouped-query
            attention): query head ``h`` uses key/value head ``h // (heads // kv_heads)``.
        v: values (batch, seqlen_k, kv_heads, head_dim_v); head_dim_v may differ from head_dim.
        mask: a mask of :mod:`tileattn.masks` or a function ``mask(b, h, q, k) -> bool``; None sees all keys.
        key_padding_mask: bool tensor (batch, seqlen_k), True where a key may be seen.
            ``torch.nn.MultiheadAttention`` uses the same name for the opposite. The padding mask is combined with
            ``mask`` and ``causal`` by "and". It is short for :class:`tileattn.KeyPadding`, which can be built once and
            used in several calls.
        score_mod: a function ``score_mod(score, b, h, q, k)``, a modification of :mod:`tileattn.scores`, or a
            sequence of them, applied in order to the scaled scores.
        causal: short for ``mask=Causal()``; with a mask, both hold. Causal masks are aligned bottom-right: the last
            query sees the last key. (PyTorch's ``is_causal``, which is aligned top-left, is an argument of
            :func:`tileattn.scaled_dot_product_attention`.)
        scale: finite factor of the scores; None means ``head_dim ** -0.5``. Each numeric argument may be a Python
            number, a numpy number, or a 0-dim CPU tensor without a gradient. A bool is not accepted as a number.
        sink: float tensor (heads,): one logit per head that joins the softmax's denominator only.
        dropout_p: the probability, from 0 to 1, with which each softmax weight is dropped; kept weights are divided
            by ``1 - dropout_p``. Dropout applies in every call with a nonzero dropout_p: pass 0 when not training. A
            seed from torch's generator of the device determines which weights are dropped
            (:mod:`tileattn.call.dropout`). lse is computed without dropout. Inductor, the default backend of
            ``torch.compile``, has its own generator: after the same ``torch.manual_seed``, compiled code drops other
            weights than eager code.
        layout: "bshd" as above, or "bhsd" for tensors (batch, heads, seqlen, head_dim), o included. The first eager
            call in "bshd" whose shapes are likely bhsd warns: more than 128 key/value heads, and 17 to 128 queries.
        return_lse: whether to also return the log-sum-exp (natural logarithm) of the scores, sink included.
        deterministic: whether gradients must be bitwise equal from run to run, as with
            ``torch.use_deterministic_algorithms(True)``. The forward pass is always deterministic.
        backend: "tilelang", "triton", "torch" or "mma". The named backend runs the call or raises; None takes the
            first that accepts the call. "mma" may be followed by a rung and options, as in "mma:split_q,stages=1"
            (docs/ladder.md).
        q_descale: for float8_e4m3fn only: positive float32 tensor that broadcasts to (batch, kv_heads); None is 1. An
            element x of q stands for ``float(x) * descale``. The query heads of a group share one descale. See
            :func:`tileattn.quantize_fp8`.
        k_descale: the same for k.
        v_descale: the same for v.
        **unknown: not accepted. Any other name raises a TypeError that suggests the right argument.

    Returns:
        o (batch, seqlen_q, heads, head_dim_v) in q's dtype, or in bfloat16 for float8_e4m3fn. With return_lse,
        ``(o, lse)``, where lse is (batch, heads, seqlen_q) in float32 (float64 for float64 inputs). A row that
        sees no key has ``o = 0`` and ``lse = -inf`` (or the sink). NaN and infinities in q, and in keys and values
        that a row sees, give what eager PyTorch gives. Values that a mask hides must be finite (docs/numerics.md).

        o and lse are differentiable once, in q, k, v, sink and the floating-point tensors of score modifications;
        calls in float8_e4m3fn are not. The backward pass recomputes the probabilities, so memory stays linear in the
        lengths. Under ``torch.autocast``, q, k and v are cast, as for PyTorch's own attention.

        Without gradients and dropout, few queries (at most 16) over many keys (at least 512) run the kernels of
        :func:`tileattn.decode`.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it, what was given and what is accepted.
        NotImplementedError: no backend, or not the named one, runs the call; the message says why.

    Algorithm: FlashAttention-2 (Dao 2023, arXiv 2307.08691).
    """
    if unknown:
        refuse_unknown(attention, unknown)
    if torch._C._is_any_autocast_enabled():
        q, k, v = autocast(q), autocast(k), autocast(v)
    if type(dropout_p) is not float:  # False == 0.0
        dropout_p = as_dropout_p(dropout_p)
    if scale is not None and type(scale) is not float:  # True == 1.0, which may have a prepared pass
        scale = as_float("scale", scale)
    if key_padding_mask is not None:
        mask = _with_padding(mask, key_padding_mask)
    descales = None if q_descale is k_descale is v_descale is None else (q_descale, k_descale, v_descale)
    constants: tuple[Any, ...] | None = None
    tensors: list[torch.Tensor] | None = None
    if score_mod is None and sink is None and dropout_p == 0.0 and is_plain(q, k, v):
        if mask is not None:
            grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
            tensors = None if grad else []
            constants = constants_of(mask, tensors)
        is_prepared = mask is None or constants is not None
    else:
        is_prepared = False
    if is_prepared:
        given = (causal, scale, return_lse, deterministic, backend)
        o, lse = attention_forward(q, k, v, descales, layout, mask, constants, tensors, given)  # type: ignore[arg-type]
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
    """Validates a backend name before any call.

    Raises:
        ValueError: no backend has that name, or its options are wrong.
    """
    if backend is not None:
        named(backend)


def _with_padding(mask: MaskLike | None, key_padding_mask: torch.Tensor) -> Mask:
    check_key_padding("key_padding_mask", key_padding_mask)
    padding, (given, _) = KeyPadding(key_padding_mask), normalize(mask, None, False)
    return padding if given is None else given & padding
