"""Decoding on a CPU with a FixedSplit: the bits of a row depend on its own query, keys, values and position alone.

Every row is computed by itself, over parts of exactly `keys` keys that begin at the multiples of `keys`, merged in
their order. So all operations on a row have shapes that do not depend on the call: matrix products and vectorised
functions sum and round in an order that depends on the shape. Where a part reaches beyond the keys that are seen, it
holds zeros, whose weight is exactly 0; a part in which a row sees nothing changes no bit of the row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ....call.decoding import DecodeInputs, DecodeSizes, FixedSplit
from ....call.fp8 import accumulator
from ....variant.masks import Mask
from ..mask import KeyRange, ScoreMatrix, ScoreMods, key_ranges
from ..softmax import RowState, exp_scores, finish, join, join_sink
from .cache import Keys, sequences
from .sequences import outputs


def decode(
    inputs: DecodeInputs,
    sizes: DecodeSizes,
    mask: Mask | None,
    score_mods: ScoreMods,
    scale: float,
    splits: FixedSplit,
) -> tuple[Tensor, Tensor]:
    """o and lse of a call, as :class:`tileattn.runtime.dispatch.Decode` returns them."""
    o, lse = outputs(inputs)
    for each in sequences(inputs, sizes):
        q = inputs.q[each.batch : each.batch + 1, each.rows]
        if 0 in (each.seqlen_q, each.seqlen_k):
            states: list[RowState | None] = [None] * each.seqlen_q
        else:
            matrix = ScoreMatrix(
                mask, score_mods, slice(0, 1), sizes.heads, each.seqlen_q, each.seqlen_k, accumulator(q.dtype),
                q.device, first=each.number,
            )  # fmt: skip
            states = _states(q, Keys(inputs, each.number), matrix, scale, splits.keys)
        for row, state in zip(range(each.rows.start, each.rows.stop), states):
            o[each.batch, row], lse[each.batch, :, row] = _finished(state, inputs, lse.dtype)
    return o, lse


def _finished(state: RowState | None, inputs: DecodeInputs, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """o (heads, head_dim_v) and lse (heads,) of a row."""
    heads, head_dim_v = inputs.q.shape[2], inputs.v_cache.shape[3]
    if state is None:
        o, lse = torch.zeros(1, heads, 1, head_dim_v, dtype=dtype), torch.full((1, heads, 1), -torch.inf, dtype=dtype)
    else:
        o, lse = finish(state)
    o = o.transpose(1, 2)
    if inputs.sink is not None:
        o, lse = join_sink(o, lse, inputs.sink)
    return o[0, 0], lse[0, :, 0]


def _states(q: Tensor, keys: Keys, matrix: ScoreMatrix, scale: float, length: int) -> list[RowState | None]:
    """The state of each row after all parts; None if there is no key that any row may see."""
    ((seen,),) = key_ranges(matrix, matrix.seqlen_q)
    kv_heads, head_dim_v = keys.v.shape[2:]
    # (kv_heads, group, head_dim) of each row, in memory of its own
    rows = [(row.to(matrix.dtype) * scale).unflatten(0, (kv_heads, -1)).contiguous() for row in q[0].unbind(0)]
    states: list[RowState | None] = [None] * len(rows)
    k = torch.empty(kv_heads, length, q.shape[3], dtype=matrix.dtype)
    v = torch.empty(kv_heads, length, head_dim_v, dtype=matrix.dtype)
    for begin in range(seen.lo // length * length, seen.hi, length):
        part = KeyRange(max(begin, seen.lo), min(begin + length, seen.hi), 0, 0)
        _fill(k, v, keys, part, begin)
        for number, row in enumerate(rows):
            state = _part(row, k, v, matrix, number, slice(begin, begin + length), part)
            before = states[number]
            states[number] = state if before is None else join(before, state)
    return states


def _fill(k: Tensor, v: Tensor, keys: Keys, part: KeyRange, begin: int) -> None:
    """Copies the keys and values of a part to k and v (kv_heads, length, dim), with zeros around them."""
    for into, cached in zip((k, v), keys(slice(part.lo, part.hi))):
        into[:, : part.lo - begin] = 0
        into[:, part.lo - begin : part.hi - begin] = cached[0].transpose(0, 1)
        into[:, part.hi - begin :] = 0


def _part(row: Tensor, k: Tensor, v: Tensor, matrix: ScoreMatrix, number: int, keys: slice, part: KeyRange) -> RowState:
    """The state of one row after one part of the keys."""
    heads, rows = matrix.heads, slice(number, number + 1)
    # S = scale * Q K^T, (1, heads, 1, length)
    scores = matrix.modified(torch.bmm(row, k.mT).view(1, heads, 1, -1), rows, keys)
    position = matrix.arange(keys)
    hidden = (position < part.lo) | (position >= part.hi)
    if matrix.mask is not None:
        hidden = hidden | matrix.forbidden(rows, keys)
    m, p, l = exp_scores(scores.masked_fill(hidden, -torch.inf))
    # O = P V
    o = torch.bmm(p.view(k.shape[0], -1, p.shape[-1]), v).view(1, heads, 1, -1)
    return RowState(m, l, o)
