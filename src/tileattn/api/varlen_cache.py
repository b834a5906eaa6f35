"""`varlen_attention` with `seqused_k` or `block_table`: the keys are a cache, and :func:`tileattn.decode` reads them.

With block_table, k and v are the pages. Without, the packed keys are pages of one token: key ``j`` of sequence ``b`` is
page ``cu_seqlens_k[b] + j``, so that nothing is copied.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..call.argument_names import renamed
from ..call.scalars import as_int
from ..call.sequences import check_cu_seqlens, check_max_seqlen, spans_of
from ..call.validation import check_dense, check_int32
from ..runtime.operators import is_traced
from .decode import decode

_NAMES = {"k_cache": "k", "v_cache": "v", "page_table": "block_table"}


class UsedKeys(NamedTuple):
    """The keys of each sequence; the arguments of :func:`tileattn.varlen_attention`."""

    cu_seqlens_k: Tensor | None
    max_seqlen_k: int
    seqused_k: Tensor | None
    block_table: Tensor | None


def attend_used(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, max_seqlen_q: int, used: UsedKeys, **options: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of packed queries to the used keys of each sequence.

    Args:
        q: (total_q, heads, head_dim).
        k: (total_k, kv_heads, head_dim), or pages (pages, page_size, kv_heads, head_dim) with a block table.
        v: the same with head_dim_v.
        cu_seqlens_q: as for :func:`tileattn.varlen_attention`.
        max_seqlen_q: as for :func:`tileattn.varlen_attention`.
        used: the keys of each sequence.
        options: keyword arguments of :func:`tileattn.decode`.

    Returns:
        o, or (o, lse), as :func:`tileattn.varlen_attention`.
    """
    _check(q, k, v, cu_seqlens_q, used)
    names = _NAMES | {"seqlens_k": "the lengths of cu_seqlens_k" if used.seqused_k is None else "seqused_k"}
    try:
        if used.block_table is None:
            pages = k.unsqueeze(1), v.unsqueeze(1)
            table, lengths = _tokens_as_pages(used, k.shape[0])
        else:
            pages, table, lengths = (k, v), used.block_table, _lengths(used)
        return decode(
            q, *pages, lengths, page_table=table, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q, **options
        )
    except (TypeError, ValueError) as error:
        raise renamed(error, names) from None


def _check(q: Any, k: Any, v: Any, cu_seqlens_q: Any, used: UsedKeys) -> None:
    """Raises unless q, k and v have the right dimensions and the lengths are of the right number of sequences."""
    check_dense("q", q, 3, "3 dimensions, (total_q, heads, head_dim)")
    ndim, shape = 3, "(total_k, kv_heads, head_dim)"
    if used.block_table is not None:
        ndim, shape = 4, "(pages, page_size, kv_heads, head_dim) with block_table"
    for name, x in (("k", k), ("v", v)):
        check_dense(name, x, ndim, f"{ndim} dimensions, {shape}")
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        raise NotImplementedError(
            "varlen_attention has no gradients with seqused_k or block_table, and a tensor of the call requires grad: "
            "use torch.no_grad() or detach(), or leave both out"
        )
    check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, q.device)
    sequences = cu_seqlens_q.shape[0] - 1
    if used.cu_seqlens_k is not None:
        check_cu_seqlens("cu_seqlens_k", used.cu_seqlens_k, q.device)
        if used.cu_seqlens_k.shape != cu_seqlens_q.shape:
            got = f"{sequences} and {used.cu_seqlens_k.shape[0] - 1}"
            raise ValueError(f"cu_seqlens_q and cu_seqlens_k must be of one number of sequences, got {got}")
    elif used.seqused_k is None or used.block_table is None:
        raise TypeError("cu_seqlens_k may be None only with block_table and seqused_k; got None without both")
    if used.seqused_k is not None:
        check_int32("seqused_k", used.seqused_k, {"sequences": sequences}, q.device, contiguous=False)


def _lengths(used: UsedKeys) -> Tensor:
    """The keys of each sequence, int32 (sequences,)."""
    if used.seqused_k is not None:
        return used.seqused_k.contiguous()
    assert used.cu_seqlens_k is not None
    return used.cu_seqlens_k.diff()


def _tokens_as_pages(used: UsedKeys, total_k: int) -> tuple[Tensor, Tensor]:
    """A page table of packed keys, (sequences, max_seqlen_k), and the used keys of each sequence."""
    assert used.cu_seqlens_k is not None
    assert used.seqused_k is not None
    ends, longest = used.cu_seqlens_k, as_int(used.max_seqlen_k)
    check_max_seqlen("max_seqlen_k", longest)
    if ends.device.type == "cpu" and not is_traced(ends):
        spans = spans_of("k", ends.tolist(), longest, total_k)
        for number, (span, length) in enumerate(zip(spans, used.seqused_k.tolist(), strict=True)):
            if not 0 <= length <= span.stop - span.start:
                raise ValueError(
                    f"seqused_k must lie in 0 .. the length by cu_seqlens_k, {span.stop - span.start}, got {length} "
                    f"(sequence {number})"
                )
    table = ends[:-1, None] + torch.arange(longest, dtype=torch.int32, device=ends.device)
    # More keys than a sequence has would be those of the next one.
    return table, torch.minimum(used.seqused_k, ends.diff())
