"""Attention of new queries over a cache of keys and values: :func:`decode` and :func:`decode_plan`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from ..call.decode_validation import check_decode_arguments, check_decode_options, check_plan, check_tree_mask
from ..call.decoding import DecodeInputs, DecodePlan, Splits
from ..call.inputs import NO_OPERANDS
from ..call.scalars import as_flag, as_float, as_int
from ..call.validation import check_dense, refuse_unknown, without_unknown
from ..runtime import prepared_decode
from ..runtime.decoding import DecodeOptions, make_plan, prepared, run_phase, with_variant
from ..runtime.decoding import run as run_decode
from ..runtime.run import MaskLike, ScoreModLike, autocast, is_plain, scale_or_default
from ..runtime.tables import kept

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .signatures import DecodeKeywords


# The overloads are for type checkers: the return type depends on return_lse. The full signature follows them.
@overload
def decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seqlens_k: torch.Tensor,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[DecodeKeywords],
) -> torch.Tensor: ...
@overload
def decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seqlens_k: torch.Tensor,
    *,
    return_lse: Literal[True],
    **options: Unpack[DecodeKeywords],
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seqlens_k: torch.Tensor,
    *,
    return_lse: bool,
    **options: Unpack[DecodeKeywords],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
@without_unknown
def decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seqlens_k: torch.Tensor,
    *,
    page_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    causal: bool = True,
    mask: MaskLike | None = None,
    score_mod: ScoreModLike | None = None,
    tree_mask: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    scale: float | None = None,
    splits: Splits = None,
    plan: DecodePlan | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    backend: str | None = None,
    **unknown: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Exact attention of the last queries of sequences over a cache of their keys and values.

    The cache already holds the keys and values of these queries (:func:`tileattn.append_kv` writes them), and
    ``seqlens_k`` counts them: the queries of a sequence are its last positions. Row ``i`` of ``q_len`` queries stands
    at position ``seqlens_k[b] - q_len + i``. Masks and score modifications get these positions, and the sequence's
    number as ``b``. In their tensors a key dimension has the size of the capacity; a row dimension (of a
    :class:`tileattn.Bias`) has the call's rows: q_len, or max_seqlen_q.

    There is no host-device synchronisation: lengths and page tables stay on the device, and one CUDA graph serves all
    lengths.

    Args:
        q: queries (batch, q_len, heads, head_dim); or packed, (total_q, heads, head_dim) with cu_seqlens_q. float16 or
            bfloat16; the torch backend also takes float32 and float64. Any strides with a contiguous last dimension, as
            the caches.
        k_cache: keys (batch, capacity, kv_heads, head_dim), or with page_table pages of them (pages, page_size,
            kv_heads, head_dim), in q's dtype. Any page size. ``heads`` must be a multiple of ``kv_heads``: query head
            ``h`` uses head ``h // (heads // kv_heads)`` of the cache. The two caches may be views of one buffer. Rows
            that no sequence has may hold anything, also NaN.
        v_cache: values, of k_cache's shape; head_dim_v may differ from head_dim.
        seqlens_k: int32 (batch,), contiguous, on q's device: the keys of each sequence, the call's own included; 0 for
            a sequence without keys.
        page_table: int32 (batch, pages_per_sequence), on q's device: key ``j`` of sequence ``b`` is token
            ``j % page_size`` of page ``page_table[b, j // page_size]``. Entries past a sequence's length are never
            followed and may hold anything, such as -1. Sequences may share pages.
        cu_seqlens_q: int32 (batch + 1,), contiguous, on q's device, for packed queries: 0, then the cumulative
            numbers of queries. Prefill chunks and decoding rows may be mixed. Rows of q behind its last value belong to
            no sequence.
        max_seqlen_q: an int, with cu_seqlens_q: the most queries of a sequence or any upper bound.
        causal: whether a query sees only the keys up to its position; with a mask, both hold.
        mask: as in :func:`tileattn.attention`. Pages that a window hides from all rows are not read.
        score_mod: as in :func:`tileattn.attention`.
        tree_mask: bool (batch or 1, q_len, q_len), for speculative decoding (packed: max_seqlen_q for q_len): row ``i``
            sees the call's own key ``j`` where ``tree_mask[b, i, j]``, and all earlier keys. It replaces ``causal``;
            with a mask, both hold.
        sink: float tensor (heads,): one logit per head that joins the softmax's denominator only.
        scale: finite factor of the scores; None means ``head_dim ** -0.5``.
        splits: how the keys of a sequence are split among the GPU's blocks. None: for speed. An int: in so many parts.
            :class:`tileattn.FixedSplit`: at fixed keys, so that the bits of a row are batch-invariant.
        plan: what :func:`tileattn.decode_plan` returned for a call with these lengths, sizes and options; the layers of
            a model share one. None plans within the call.
        return_lse: whether to also return the log-sum-exp (natural logarithm) of the scores, sink included.
        out: where o is written, of o's shape and dtype, with a contiguous last dimension. It must not share memory with
            another tensor of the call.
        backend: as in :func:`tileattn.attention`.
        **unknown: not accepted. Any other name raises a TypeError that suggests the right argument.

    Returns:
        o (batch, q_len, heads, head_dim_v) in q's dtype, or (total_q, heads, head_dim_v). With return_lse,
        ``(o, lse)``, where lse is (batch, heads, q_len), or (heads, total_q), in float32 (float64 for float64). A row
        that sees no key, or belongs to no sequence, has ``o = 0`` and ``lse = -inf`` (a row that sees no key has the
        sink as lse, if there is one).

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it, what was given and what is accepted. On a CPU
            the *values* of seqlens_k, cu_seqlens_q and page_table are checked at once. On a GPU that would take a
            synchronisation: kernels touch nothing outside of the tensors, and a later call, or
            :func:`tileattn.check_caches`, raises.
        NotImplementedError: a tensor requires grad (and grad mode is on): decode has no gradients. Or no backend, or
            not the named one, runs the call. Caches in float8 and latent caches (MLA) are not taken yet.

    Algorithm: FlashAttention-2 with split keys (Dao et al. 2023, "Flash-Decoding"), over pages (Kwon et al. 2023, arXiv
    2309.06180).
    """
    if unknown:
        refuse_unknown(decode, unknown)
    check_plan(plan)
    if torch._C._is_any_autocast_enabled():
        q = autocast(q)  # not the caches: they would be copied
    key, variant = None, None
    if tree_mask is None and is_plain(q, k_cache, v_cache):
        is_varied = mask is not None or score_mod is not None
        variant = prepared_decode.numbers_of(mask, score_mod, causal) if is_varied else ("", NO_OPERANDS)
    if variant is not None:
        given = (variant[0], max_seqlen_q, causal, scale, splits, return_lse, backend)
        key = prepared_decode.key_of(q, k_cache, v_cache, seqlens_k, page_table, cu_seqlens_q, sink, out, given)
    phase = None if key is None else prepared_decode.PHASES.get(key)
    if phase is not None:
        row, row_out = (q, out) if cu_seqlens_q is None else (q[None], None if out is None else out[None])
        assert variant is not None
        fields = (row, k_cache, v_cache, seqlens_k, page_table, cu_seqlens_q, sink, variant[1], row_out)
        o, lse = run_phase(phase, prepared_decode.inputs_of(fields), plan)
    else:
        return_lse = as_flag("return_lse", return_lse)
        tensors = (q, k_cache, v_cache, seqlens_k, page_table, cu_seqlens_q, sink, out)
        inputs, options = _checked(
            tensors, max_seqlen_q, causal, mask, score_mod, tree_mask, scale, splits, return_lse, backend
        )
        o, lse = run_decode(inputs, options, plan)
        if key is not None:
            kept(prepared_decode.PHASES, key, prepared(inputs, options))
    if cu_seqlens_q is not None:
        o = o.squeeze(0)
        lse = None if lse is None else lse.squeeze(0)
    if out is not None:
        o = out
    if not return_lse:
        return o
    assert lse is not None
    return o, lse


def decode_plan(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seqlens_k: torch.Tensor,
    *,
    page_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    causal: bool = True,
    mask: MaskLike | None = None,
    score_mod: ScoreModLike | None = None,
    tree_mask: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    scale: float | None = None,
    splits: Splits = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> DecodePlan:
    """Deals the work of :func:`tileattn.decode` to the GPU's blocks, on the device, for all layers of a step.

    The plan depends on the lengths, the sizes, the options and the tensors that say which keys a mask can reach. It
    does not depend on the values of q and the caches, so the layers of a model whose calls agree in all of that share
    one plan. It must be made again when `seqlens_k`, `cu_seqlens_q` or the mask's tensors change. `decode` compares
    sizes, options and the mask's numbers with its own and raises if they differ; values on the device it cannot.

    Args:
        q: as for :func:`tileattn.decode`, and so are all arguments below; the values of q and the caches are not read.
        k_cache: see :func:`tileattn.decode`.
        v_cache: see :func:`tileattn.decode`.
        seqlens_k: see :func:`tileattn.decode`.
        page_table: see :func:`tileattn.decode`.
        cu_seqlens_q: see :func:`tileattn.decode`.
        max_seqlen_q: see :func:`tileattn.decode`.
        causal: see :func:`tileattn.decode`.
        mask: see :func:`tileattn.decode`.
        score_mod: see :func:`tileattn.decode`.
        tree_mask: see :func:`tileattn.decode`.
        sink: see :func:`tileattn.decode`.
        scale: see :func:`tileattn.decode`.
        splits: see :func:`tileattn.decode`.
        return_lse: see :func:`tileattn.decode`; a plan serves calls with and without.
        backend: see :func:`tileattn.decode`.

    Returns:
        A plan for ``decode(..., plan=)``. Its tensor is None for a backend that needs no plan.

    Raises:
        TypeError, ValueError, NotImplementedError: as :func:`tileattn.decode`. NotImplementedError also under
            torch.compile: the plan is made outside of the graph, and is an argument of it.
    """
    if torch._C._is_any_autocast_enabled():
        q = autocast(q)
    return_lse = as_flag("return_lse", return_lse)
    tensors = (q, k_cache, v_cache, seqlens_k, page_table, cu_seqlens_q, sink, None)
    inputs, options = _checked(
        tensors, max_seqlen_q, causal, mask, score_mod, tree_mask, scale, splits, return_lse, backend
    )
    return make_plan(inputs, options)


def _checked(
    tensors: tuple[Any, ...],
    max_seqlen_q: Any,
    causal: Any,
    mask: Any,
    score_mod: Any,
    tree_mask: Any,
    scale: Any,
    splits: Any,
    return_lse: bool,
    backend: str | None,
) -> tuple[DecodeInputs, DecodeOptions]:
    """The inputs and options of a call, or an error that says what is wrong with them."""
    q, k_cache, v_cache, seqlens_k, page_table, cu_seqlens_q, sink, out = tensors
    max_seqlen_q = as_int(max_seqlen_q)
    check_decode_arguments(q, k_cache, v_cache, seqlens_k, page_table, cu_seqlens_q, max_seqlen_q)
    scale = None if scale is None else as_float("scale", scale)
    splits = check_decode_options(q, sink, scale, splits)
    packed = cu_seqlens_q is not None
    longest = max_seqlen_q if packed else q.shape[1]
    if tree_mask is not None:
        check_tree_mask(tree_mask, seqlens_k.shape[0], longest, q.device)
    if out is not None:
        check_dense("out", out, q.ndim, "o's dimensions")
    q, out = (x[None] if packed and x is not None else x for x in (q, out))
    inputs = DecodeInputs(q, k_cache, v_cache, seqlens_k, page_table, cu_seqlens_q, sink, NO_OPERANDS, out)
    variant, inputs = with_variant(inputs, longest, mask, score_mod, as_flag("causal", causal), tree_mask)
    return inputs, DecodeOptions(variant, scale_or_default(scale, q), longest, splits, return_lse, backend)
