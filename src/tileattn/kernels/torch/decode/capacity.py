"""Decoding without the host's knowledge of the lengths: all sequences at once, over the whole capacity, with masks.

It is what runs on a GPU where no kernel does. Nothing waits for the device, so it works in CUDA graphs, and its time
grows with the capacity. Keys past a length, and keys that no row of a sequence sees, have weight 0; their values are
cleared, for unused rows may hold NaN. Table entries are clamped. What is wrong with lengths, and with entries of keys
that are seen, goes to the device's status (:mod:`tileattn.call.cache_status`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....call import cache_fields, cache_status
from ....call.decoding import DecodeInputs, DecodeSizes
from ....call.fp8 import accumulator
from ....variant.masks import Mask
from ..mask import ScoreMods
from ..recorder import Recorder
from ..softmax import RowState, exp_scores, finish, join, join_sink

# The most elements of a tile of scores, and of the keys of a tile: 128 MiB each in float32.
MAX_TILE = 2**25


class _Rows(NamedTuple):
    """The queries of all sequences, padded to one length.

    q: (batch, rows, heads, head_dim). position: (batch, 1, rows, 1). exists: bool, of position's shape. lengths:
    (batch,), within the capacity.
    """

    q: Tensor
    position: Tensor
    exists: Tensor
    lengths: Tensor


def decode(
    inputs: DecodeInputs, sizes: DecodeSizes, mask: Mask | None, score_mods: ScoreMods, scale: float
) -> tuple[Tensor, Tensor]:
    """o and lse of a call, as :class:`tileattn.runtime.dispatch.Decode` returns them.

    The number of splits is of no use here: the tiles' size depends on the capacity alone.
    """
    cache_status.raise_pending()
    errors = Recorder(inputs.q.device)
    _check(inputs, sizes, errors)
    rows, dtype = _rows(inputs, sizes), accumulator(inputs.q.dtype)
    state = _state(inputs, sizes, rows, mask, score_mods, scale, errors)
    if state is None:
        shape, device = (sizes.batch, sizes.heads, rows.q.shape[1]), inputs.q.device
        lse = torch.full(shape, -torch.inf, dtype=dtype, device=device)
        o = torch.zeros(*shape, inputs.v_cache.shape[3], dtype=dtype, device=device)
    else:
        o, lse = finish(state)
    o = o.transpose(1, 2)
    if inputs.sink is not None:
        o, lse = join_sink(o, lse, inputs.sink)
    if inputs.cu_seqlens_q is not None:
        o, lse = _packed(o, lse, inputs.cu_seqlens_q, inputs.q.shape[1])
    o = o.to(inputs.q.dtype)
    if o.is_cuda:
        cache_status.report(o.device)
    return (o.contiguous() if inputs.out is None else inputs.out.copy_(o)), lse.contiguous()


def _check(inputs: DecodeInputs, sizes: DecodeSizes, errors: Recorder) -> None:
    """Records wrong lengths of keys and of packed queries."""
    lengths, ends = inputs.seqlens_k, inputs.cu_seqlens_q
    errors.record(cache_fields.SEQLENS_K, (lengths < 0) | (lengths > sizes.capacity))
    if ends is not None:
        wrong = (ends[1:] < ends[:-1]) | (ends[1:] > inputs.q.shape[1])
        wrong[:1] |= ends[:1] != 0
        errors.record(cache_fields.CU_SEQLENS_Q, wrong)
        errors.record(cache_fields.MAX_SEQLEN_Q, ends.diff() > sizes.max_seqlen_q)


def _state(
    inputs: DecodeInputs,
    sizes: DecodeSizes,
    rows: _Rows,
    mask: Mask | None,
    score_mods: ScoreMods,
    scale: float,
    errors: Recorder,
) -> RowState | None:
    """The state of all rows after all keys; None if there is nothing to compute."""
    dtype, device = accumulator(inputs.q.dtype), inputs.q.device
    batch, count, heads, _ = rows.q.shape
    kv_heads = sizes.kv_heads
    if 0 in (batch, count, inputs.k_cache.shape[0]):
        return None
    # The queries of a group of heads become rows of their kv head: (batch, kv_heads, group * rows, head_dim).
    scaled = (rows.q.to(dtype) * scale).unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    b = torch.arange(batch, device=device)[:, None, None, None]
    h = torch.arange(heads, device=device)[:, None, None]
    state = None
    for keys, wrong, k, v in _tiles(inputs, sizes, _keys_at_once(sizes, count, rows.q.shape[3])):
        index = (b, h, rows.position, keys)
        seen = rows.exists & (keys < rows.lengths[:, None, None, None])
        if mask is not None:
            seen = seen & torch.as_tensor(mask.allows(*index), device=device)
        # S = scale * Q K^T
        scores = _modified((scaled @ k.transpose(1, 2).to(dtype).mT).view(batch, heads, count, -1), score_mods, index)
        m, p, l = exp_scores(scores.masked_fill(~seen, -torch.inf))
        # O = P V, without the values that no row sees
        used = seen.expand(batch, -1, -1, -1).any(dim=1).any(dim=1)
        if wrong is not None:
            errors.record(cache_fields.PAGE_TABLE, wrong & used, b[:, 0, 0].expand(used.shape))
        v = v.to(dtype).masked_fill(~used[:, :, None, None], 0.0)
        o = (p.view(batch, kv_heads, -1, p.shape[-1]) @ v.transpose(1, 2)).view(batch, heads, count, -1)
        tile = RowState(m, l, o)
        state = tile if state is None else join(state, tile)
    return state


def _modified(scores: Tensor, score_mods: ScoreMods, index: tuple[Tensor, ...]) -> Tensor:
    for score_mod in score_mods:
        modified: Any = torch.as_tensor(score_mod(scores, *index), device=scores.device)
        scores = modified.to(scores.dtype).expand(scores.shape)
    return scores


def _rows(inputs: DecodeInputs, sizes: DecodeSizes) -> _Rows:
    """The padded queries. Wrong lengths are clamped, so that no index leaves a tensor."""
    q, ends = inputs.q, inputs.cu_seqlens_q
    lengths = inputs.seqlens_k.clamp(0, sizes.capacity)
    row = torch.arange(sizes.max_seqlen_q, device=q.device)
    if ends is None:
        seqlens_q: Tensor = torch.full_like(lengths, q.shape[1])
    else:
        seqlens_q = ends.diff().clamp(0, sizes.max_seqlen_q)
        at = (ends[:-1, None] + row).clamp(0, max(q.shape[1] - 1, 0))
        q = q[0, at] if q.shape[1] else q.new_zeros(sizes.batch, sizes.max_seqlen_q, *q.shape[2:])
    position = (lengths - seqlens_q)[:, None] + row
    return _Rows(q, position[:, None, :, None], (row < seqlens_q[:, None])[:, None, :, None], lengths)


def _packed(o: Tensor, lse: Tensor, ends: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """o (1, total, heads, dim) and lse (1, heads, total) of padded rows; 0 and -inf for rows of no sequence."""
    batch, longest = o.shape[:2]
    if 0 in (batch, longest, total):
        return o.new_zeros(1, total, *o.shape[2:]), lse.new_full((1, lse.shape[1], total), -torch.inf)
    token = torch.arange(total, device=o.device)
    sequence = torch.searchsorted(ends[1:], token, right=True).clamp(max=batch - 1)
    row = token - ends[sequence]
    exists = (token < ends[-1]) & (row >= 0) & (row < longest)
    row = row.clamp(0, longest - 1)
    of_tokens = o[sequence, row].masked_fill(~exists[:, None, None], 0.0)
    lse_of_tokens = lse.transpose(1, 2)[sequence, row].masked_fill(~exists[:, None], -torch.inf)
    return of_tokens[None], lse_of_tokens.T[None]


def _keys_at_once(sizes: DecodeSizes, rows: int, head_dim: int) -> int:
    """Keys of a tile: as many as MAX_TILE allows, whole pages, at least 1."""
    of_one_key = sizes.batch * max(sizes.heads * rows, sizes.kv_heads * head_dim)
    page = max(sizes.page_size, 1)
    return max(MAX_TILE // of_one_key // page, 1) * page


def _tiles(
    inputs: DecodeInputs, sizes: DecodeSizes, step: int
) -> Iterator[tuple[Tensor, Tensor | None, Tensor, Tensor]]:
    """Tiles of keys: their positions (keys,), whether their pages are wrong (batch, keys), k and v (batch, keys, ...).

    k and v are (batch, keys, kv_heads, dim). Contiguous caches have no pages.
    """
    table, (pages, tokens) = inputs.page_table, inputs.k_cache.shape[:2]
    for begin in range(0, sizes.capacity, step):
        end = min(begin + step, sizes.capacity)
        keys = torch.arange(begin, end, device=inputs.q.device)
        if table is None:
            yield keys, None, inputs.k_cache[:, begin:end], inputs.v_cache[:, begin:end]
            continue
        entries = table[:, begin // tokens : -(-end // tokens)]  # begin and end are multiples of the page size
        numbers = entries.clamp(0, pages - 1)
        k, v = (cache[numbers].flatten(1, 2) for cache in (inputs.k_cache, inputs.v_cache))
        yield keys, (numbers != entries).repeat_interleave(tokens, dim=1), k, v
