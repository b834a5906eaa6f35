"""Attention of sequences of different lengths, packed one behind the other without padding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from ..call.facts import Packed
from ..call.scalars import as_float, as_int
from ..call.sequences import check_metadata
from ..call.validation import check_packed_arguments, refuse_unknown, without_unknown
from ..runtime.prepared import varlen_forward
from ..runtime.run import MaskLike, ScoreModLike, as_dropout_p, autocast, checked_choices, is_plain, run

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .signatures import VarlenOptions


# Only type checkers see the overloads: return_lse decides what is returned. The full signature follows them.
@overload
def varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[VarlenOptions],
) -> torch.Tensor: ...
@overload
def varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    return_lse: Literal[True],
    **options: Unpack[VarlenOptions],
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    return_lse: bool,
    **options: Unpack[VarlenOptions],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
@without_unknown
def varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    mask: MaskLike | None = None,
    score_mod: ScoreModLike | None = None,
    causal: bool = False,
    scale: float | None = None,
    sink: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
    deterministic: bool = False,
    backend: str | None = None,
    **unknown: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Exact attention within each of several packed sequences: :func:`tileattn.attention` of each by itself.

    Sequence ``i`` has the rows ``cu_seqlens_q[i] : cu_seqlens_q[i + 1]`` of q and ``cu_seqlens_k[i] :
    cu_seqlens_k[i + 1]`` of k and v. To masks and score modifications the sequences are the batch: ``b`` is a
    sequence's number, positions count within it and are aligned bottom-right by its own lengths; so that of their
    tensors a dimension for the batch has the size ``sequences``, one for rows or keys ``max_seqlen_q`` or
    ``max_seqlen_k`` (a :class:`tileattn.Bias` may have more). Lengths may be 0, on either side.

    Args:
        q: queries (total_q, heads, head_dim); dtypes as in :func:`tileattn.attention`, but for float8_e4m3fn. Any
            strides with a contiguous last dimension, here and below.
        k: keys (total_k, kv_heads, head_dim), ``heads % kv_heads == 0``.
        v: values (total_k, kv_heads, head_dim_v).
        cu_seqlens_q: int32 (sequences + 1,), contiguous, on q's device: 0, then the sums of the lengths so far. The
            last value may be less than total_q: rows behind it belong to no sequence, whatever they hold.
        cu_seqlens_k: the same of k and v.
        max_seqlen_q: the longest length, or any upper bound of it, as an int, so that nothing waits for the device.
        max_seqlen_k: the same of k and v.
        mask: as in :func:`tileattn.attention`, and so are the following.
        score_mod: see there.
        causal: see there; aligned bottom-right in each sequence. There is no ``is_causal``.
        scale: see there.
        sink: see there.
        dropout_p: see there. What is dropped depends on the seed, and on the sequence's number and the places within
            it, not on where it lies.
        return_lse: see there.
        deterministic: see there.
        backend: see there.
        **unknown: nothing; any other name raises a TypeError that says which one is meant.

    Returns:
        o (total_q, heads, head_dim_v) in q's dtype; with return_lse, ``(o, lse)`` with lse (heads, total_q) in float32
        (float64 for float64 inputs). Rows that see no key have ``o = 0`` and ``lse = -inf`` (or the sink); rows of no
        sequence ``o = 0``, ``lse = -inf`` and gradients of 0. Differentiable as :func:`tileattn.attention` is.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it, what was given and what is accepted. The
            *values* of cu_seqlens are checked at once where the host can read them, on a CPU. On a GPU nothing waits
            for them: if one is wrong, nothing outside of the tensors is touched, and a later call on packed sequences,
            or :func:`tileattn.check_packed`, raises.
        NotImplementedError: no backend (or not the named one) runs the call; the message says why.
    """
    if unknown:
        refuse_unknown(varlen_attention, unknown)
    if torch._C._is_any_autocast_enabled():
        q, k, v = autocast(q), autocast(k), autocast(v)
    if type(dropout_p) is not float:  # False == 0.0
        dropout_p = as_dropout_p(dropout_p)
    if scale is not None and type(scale) is not float:  # True == 1.0, which may have a plan
        scale = as_float("scale", scale)
    packed = Packed(cu_seqlens_q, cu_seqlens_k, as_int(max_seqlen_q), as_int(max_seqlen_k))
    if mask is None and score_mod is None and sink is None and dropout_p == 0.0 and is_plain(q, k, v):
        o, lse = varlen_forward(q, k, v, packed, causal, scale, return_lse, deterministic, backend)
    else:
        check_packed_arguments(q, k, v, sink, dropout_p, scale)
        choices = checked_choices(causal, scale, return_lse, deterministic, backend)
        return_lse = choices.return_lse
        check_metadata(packed, q.device)
        o, lse = run(q[None], k[None], v[None], sink, mask, score_mod, dropout_p, choices, packed=packed)
    o = o.squeeze(0)  # whose derivative is a view, as o[0]'s is not
    if not return_lse:
        return o
    assert lse is not None
    return o, lse.squeeze(0)
