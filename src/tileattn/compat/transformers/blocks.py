"""Steps of continuous batching that read transformers' paged cache in place, by :func:`tileattn.decode`.

A layer's cache is a tensor (tokens, kv_heads, head_dim) of blocks, and `read_index` holds the place of each key of each
request, packed. A layer that sees all keys reads whole blocks of consecutive places. So every `block_size`-th entry of
a request's part of `read_index` names a block, and these are its page table.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...api.decode import decode
from ...runtime.few_queries import fit_in_a_tile

Lengths = tuple[Tensor, Tensor, int, int]  # cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k


class _Step(NamedTuple):
    """The page table of a step, and what it was made from, of the layers that have the same keys."""

    read_index: Tensor
    cu_seqlens_k: Tensor
    table: Tensor
    seqlens_k: Tensor


# For each cache, the last step of each group of layers: all layers of a group share the page table.
_steps: weakref.WeakKeyDictionary[Any, dict[int, _Step]] = weakref.WeakKeyDictionary()


def are_steps(
    cache: Any,
    q: Tensor,
    key: Tensor,
    max_seqlen_q: int,
    *,
    layer_idx: int,
    read_index: list[Tensor] | None,
    write_index: list[Tensor] | None,
) -> bool:
    """Whether all requests have few new tokens, and the layer sees all their keys.

    Args:
        cache: transformers' PagedAttentionCache.
        q: (tokens, heads, head_dim).
        key: (1, kv_heads, tokens, head_dim).
        max_seqlen_q: an upper bound of the requests' numbers of new tokens.
        layer_idx: the layer.
        read_index: for each group of layers, where the keys of all requests are; empty if all of them are new.
        write_index: for each group of layers, where the new keys are written.
    """
    group, _ = cache.layer_index_to_group_indices[layer_idx]
    return (
        read_index is not None
        and write_index is not None
        and cache.sliding_windows[layer_idx] == 1
        and read_index[group].numel() > 0
        and fit_in_a_tile(max_seqlen_q, q.shape[1], key.shape[1])
        and not (torch.is_grad_enabled() and (q.requires_grad or key.requires_grad))
    )


def attend_blocks(
    cache: Any,
    q: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Lengths,
    indices: Mapping[str, Any],
    **options: Any,
) -> Tensor:
    """Writes the new keys and values into the cache, and computes causal attention to all keys of each request.

    Args:
        cache: transformers' PagedAttentionCache.
        q: (tokens, heads, head_dim), packed.
        key: (1, kv_heads, tokens, head_dim).
        value: (1, kv_heads, tokens, head_dim).
        lengths: the cumulative lengths of queries and keys, int32 (requests + 1,), and bounds of the longest.
        indices: layer_idx, read_index and write_index, as for :func:`are_steps`.
        options: keyword arguments of :func:`tileattn.decode`.

    Returns:
        o (tokens, heads, head_dim).
    """
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k = lengths
    group, number = cache.layer_index_to_group_indices[indices["layer_idx"]]
    caches = cache.key_cache[number], cache.value_cache[number]
    for rows, new in zip(caches, (key, value), strict=True):
        rows.index_copy_(0, indices["write_index"][group], new.transpose(1, 2).squeeze(0))
    step = _step(cache, group, indices["read_index"][group], cu_seqlens_k, max_seqlen_k)
    k_pages, v_pages = (rows.unflatten(0, (-1, cache.block_size)) for rows in caches)
    o = decode(
        q, k_pages, v_pages, step.seqlens_k, page_table=step.table, cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max_seqlen_q, **options,
    )  # fmt: skip
    assert isinstance(o, Tensor)
    return o


def _step(cache: Any, group: int, read_index: Tensor, cu_seqlens_k: Tensor, max_seqlen_k: int) -> _Step:
    """The page table, made once for the layers of a group.

    The tensors are new ones in each step, though transformers writes all steps into the same memory: so an equal
    tensor is one of the same step. In a CUDA graph each layer makes its own, for a graph is replayed in other steps.
    """
    steps: dict[int, _Step] = {}
    if not torch.compiler.is_compiling() and not _is_captured(read_index):
        steps = _steps.setdefault(cache, steps)
    found = steps.get(group)
    if found is not None and found.read_index is read_index and found.cu_seqlens_k is cu_seqlens_k:
        return found
    firsts = torch.arange(0, max_seqlen_k, cache.block_size, device=read_index.device)
    places = (cu_seqlens_k[:-1, None] + firsts).clamp(max=read_index.shape[0] - 1)
    table = (read_index[places] // cache.block_size).to(torch.int32)
    step = steps[group] = _Step(read_index, cu_seqlens_k, table, cu_seqlens_k.diff())
    return step


def _is_captured(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
