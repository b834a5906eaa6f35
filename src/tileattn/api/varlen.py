"""Attention within sequences of different lengths, which are packed one after the other without padding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from ..call.facts import Packed
from ..call.scalars import as_float, as_int
from ..call.sequences import check_metadata
from ..call.validation import check_packed_arguments, refuse_unknown, without_unknown
from ..runtime.prepared import varlen_forward
from ..runtime.run import MaskLike, ScoreModLike, as_dropout_p, autocast, checked_choices, is_plain, run
from ..variant.constants import constants_of
from .varlen_cache import UsedKeys, attend_used

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .signatures import VarlenOptions


# The overloads are for type checkers: the return type depends on return_lse. The full signature follows them.
@overload
def varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None,
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
    cu_seqlens_k: torch.Tensor | None,
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
    cu_seqlens_k: torch.Tensor | None,
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
    cu_seqlens_k: torch.Tensor | None,
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
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    backend: str | None = None,
    **unknown: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Exact attention within each of several packed sequences: :func:`tileattn.attention` of each sequence by itself.

    Sequence ``i`` has the rows ``cu_seqlens_q[i] : cu_seqlens_q[i + 1]`` of q and ``cu_seqlens_k[i] :
    cu_seqlens_k[i + 1]`` of k and v. Its lengths may be 0, in q or in k and v.

    Masks and score modifications see the sequences as the batch: ``b`` is a sequence's number. Positions count within
    the sequence and are aligned bottom-right by its own lengths. In the tensors of masks and modifications, a batch
    dimension has size ``sequences``, a row dimension ``max_seqlen_q`` and a key dimension ``max_seqlen_k`` (those of a
    :class:`tileattn.Bias` may be larger).

    Args:
        q: queries (total_q, heads, head_dim). Dtypes as in :func:`tileattn.attention`, except float8_e4m3fn. q, k and v
            may have any strides with a contiguous last dimension.
        k: keys (total_k, kv_heads, head_dim); ``heads`` must be a multiple of ``kv_heads``.
        v: values (total_k, kv_heads, head_dim_v).
        cu_seqlens_q: int32 (sequences + 1,), contiguous, on q's device: 0, then the cumulative lengths. The last value
            may be less than total_q: the rows from there on belong to no sequence, and their contents do not matter.
        cu_seqlens_k: the same for k and v.
        max_seqlen_q: an int, the longest length or any upper bound of it. It is passed by the host to avoid a
            host-device synchronisation.
        max_seqlen_k: the same for k and v.
        mask: as in :func:`tileattn.attention`; so are the arguments below.
        score_mod: see :func:`tileattn.attention`.
        causal: see :func:`tileattn.attention`; aligned bottom-right in each sequence. There is no ``is_causal``.
        scale: see :func:`tileattn.attention`.
        sink: see :func:`tileattn.attention`.
        dropout_p: see :func:`tileattn.attention`. Whether a weight is dropped depends on the seed, the sequence's
            number and the row and key within the sequence, not on where the sequence lies in q and k.
        return_lse: see :func:`tileattn.attention`.
        deterministic: see :func:`tileattn.attention`.
        seqused_k: int32 (sequences,), on q's device: sequence ``i`` has only the first ``seqused_k[i]`` of its keys,
            and its queries stand at the last of these. There are then no gradients and no dropout, and
            :func:`tileattn.decode` computes the call.
        block_table: int32 (sequences, pages_per_sequence), on q's device: k and v are then pages (pages, page_size,
            kv_heads, head_dim), and key ``j`` of sequence ``i`` is token ``j % page_size`` of page ``block_table[i, j
            // page_size]``. The lengths are those of seqused_k or, without it, of cu_seqlens_k; cu_seqlens_k may be
            None with seqused_k. In the tensors of masks and modifications a key dimension has size ``pages_per_sequence
            * page_size``. No gradients and no dropout, as with seqused_k.
        backend: see :func:`tileattn.attention`.
        **unknown: not accepted. Any other name raises a TypeError that suggests the right argument.

    Returns:
        o (total_q, heads, head_dim_v) in q's dtype. With return_lse, ``(o, lse)``, where lse is (heads, total_q) in
        float32 (float64 for float64 inputs). A row that sees no key has ``o = 0`` and ``lse = -inf`` (or the sink). A
        row of no sequence has ``o = 0``, ``lse = -inf`` and gradients of 0. The result is differentiable as that of
        :func:`tileattn.attention`.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it, what was given and what is accepted. On a
            CPU the *values* of cu_seqlens are checked at once. On a GPU that would take a synchronisation: if a value
            is wrong, kernels touch nothing outside of the tensors, and a later call on packed sequences, or
            :func:`tileattn.check_packed`, raises.
        NotImplementedError: no backend, or not the named one, runs the call; the message says why. Or a tensor requires
            grad, grad mode is on and seqused_k or block_table is given.
    """
    if unknown:
        refuse_unknown(varlen_attention, unknown)
    if seqused_k is not None or block_table is not None:
        if as_dropout_p(dropout_p):
            raise ValueError(f"dropout_p must be 0 with seqused_k or block_table, got {dropout_p}")
        if torch._C._is_any_autocast_enabled():
            q, k, v = autocast(q), autocast(k), autocast(v)
        used = UsedKeys(cu_seqlens_k, max_seqlen_k, seqused_k, block_table)
        options: dict[str, Any] = {"mask": mask, "score_mod": score_mod, "causal": causal, "scale": scale, "sink": sink}
        options |= {"return_lse": return_lse, "backend": backend}
        return attend_used(q, k, v, cu_seqlens_q, max_seqlen_q, used, **options)
    if torch._C._is_any_autocast_enabled():
        q, k, v = autocast(q), autocast(k), autocast(v)
    if type(dropout_p) is not float:  # False == 0.0
        dropout_p = as_dropout_p(dropout_p)
    if scale is not None and type(scale) is not float:  # True == 1.0, which may have a prepared pass
        scale = as_float("scale", scale)
    ends_k: Any = cu_seqlens_k  # checked with the rest
    packed = Packed(cu_seqlens_q, ends_k, as_int(max_seqlen_q), as_int(max_seqlen_k))
    constants = None
    if (
        score_mod is None
        and sink is None
        and dropout_p == 0.0
        and is_plain(q, k, v)
        and (mask is None or (constants := constants_of(mask)) is not None)
    ):
        given = (causal, scale, return_lse, deterministic, backend)
        o, lse = varlen_forward(q, k, v, packed, mask, constants, given)  # type: ignore[arg-type]
        return (o, lse) if return_lse else o  # type: ignore[return-value]
    check_packed_arguments(q, k, v, sink, dropout_p, scale)
    choices = checked_choices(causal, scale, return_lse, deterministic, backend)
    check_metadata(packed, q.device)
    o, lse = run(q[None], k[None], v[None], sink, mask, score_mod, dropout_p, choices, packed=packed)
    o = o.squeeze(0)  # not o[0]: the derivative of squeeze is a view
    if not choices.return_lse:
        return o
    assert lse is not None
    return o, lse.squeeze(0)
