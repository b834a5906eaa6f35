"""Decoding on a CPU, sequence by sequence, each over its own keys.

Few queries take FlashAttention-2's loop over blocks of keys, in which the queries of a group of heads are rows of one
matrix, so that K and V are read once, a tile at a time: first the scores of a block, from all tiles of K, then O, from
all tiles of V. A tile that is gathered from pages or converted to float32 is used while it is in the processor's cache.
Where nothing is to be copied, and all rows see all keys, PyTorch's fused attention computes them (`fused.py`). Many
queries, a prefill chunk, take the forward pass of the torch backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ....call.decoding import DecodeInputs, DecodeSizes
from ....call.fp8 import accumulator
from ....variant.masks import Causal, Mask
from ....variant.scores import Bias, PackedBias
from .. import loop
from ..forward import forward
from ..mask import KeyRange, ScoreMatrix, ScoreMods, key_ranges
from ..softmax import RowState, exp_scores, finish, join, join_sink
from . import fused
from .cache import Keys, sequences
from .cache import Sequence as CachedSequence

# Scores that are computed at once: of all rows and a block of keys.
SCORES = 2**19
# From this many queries on, PyTorch's fused attention is faster than the loop.
MANY_QUERIES = 32


def decode(
    inputs: DecodeInputs,
    sizes: DecodeSizes,
    mask: Mask | None,
    score_mods: ScoreMods,
    scale: float,
    splits: int | None,
) -> tuple[Tensor, Tensor]:
    """o and lse of a call, as :class:`tileattn.runtime.dispatch.Decode` returns them."""
    o, lse = outputs(inputs)
    buffers: dict[str, Tensor] = {}
    for each in sequences(inputs, sizes):
        q = inputs.q[each.batch : each.batch + 1, each.rows]
        mods = [of_sequence(mod, each) for mod in score_mods]
        keys = Keys(inputs, each.number, buffers)
        o_rows, lse_rows = _attend(q, keys, each, mask, mods, inputs.sink, scale, splits or 1)
        o[each.batch : each.batch + 1, each.rows] = o_rows
        lse[each.batch : each.batch + 1, :, each.rows] = lse_rows
    return o, lse


def outputs(inputs: DecodeInputs) -> tuple[Tensor, Tensor]:
    """o, or `inputs.out`, and lse of a call; rows of no sequence have 0 and -inf."""
    q, out = inputs.q, inputs.out
    o = q.new_empty(*q.shape[:3], inputs.v_cache.shape[3]) if out is None else out
    if inputs.cu_seqlens_q is not None:
        o.zero_()
    lse = q.new_full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=accumulator(q.dtype))
    return o, lse


def of_sequence(mod: Any, sequence: CachedSequence) -> Any:
    """A score modification for one sequence: a bias becomes the sequence's part of it."""
    if type(mod) is Bias and mod.tensor.shape[0] > 1:  # attention of few queries
        return Bias(mod.tensor[sequence.number : sequence.number + 1])
    if not isinstance(mod, PackedBias):
        return mod
    return Bias(mod.tensor[mod.part(sequence.number, sequence.seqlen_q, sequence.seqlen_k)])


def _attend(
    q: Tensor,
    keys: Keys,
    sequence: CachedSequence,
    mask: Mask | None,
    score_mods: Sequence[Any],
    sink: Tensor | None,
    scale: float,
    splits: int,
) -> tuple[Tensor, Tensor]:
    """o (1, seqlen_q, heads, head_dim_v) and lse (1, heads, seqlen_q) of one sequence."""
    seqlen_k, dtype = sequence.seqlen_k, accumulator(q.dtype)
    matrix = ScoreMatrix(
        mask, score_mods, slice(0, 1), q.shape[2], q.shape[1], seqlen_k, dtype, q.device, first=sequence.number
    )
    seen = None if 0 in (q.shape[1], seqlen_k) else _seen(matrix)
    # Pages of keys that no row sees may be none: the forward pass takes a sequence's keys whole.
    whole = seen is not None and (keys.table is None or (seen.lo, seen.hi) == (0, seqlen_k))
    if seen is None or seen.lo == seen.hi:
        o, lse = loop.without_keys(q, keys.v, dtype)
    elif q.shape[1] >= MANY_QUERIES and splits == 1 and whole:
        k, v = keys(slice(0, seqlen_k))
        return forward(q, k, v, mask, score_mods, sink, scale, None, sequence.number)
    else:
        o, lse = _fused(q, keys, matrix, seen, scale, splits) or _over_keys(q, keys, matrix, seen, scale, splits)
    return (o, lse) if sink is None else join_sink(o, lse, sink)


def _seen(matrix: ScoreMatrix) -> KeyRange:
    """The keys that the rows see; without the work of :func:`key_ranges` where they are all."""
    if matrix.mask is None or (type(matrix.mask) is Causal and matrix.seqlen_q == 1):
        return KeyRange(0, matrix.seqlen_k, 0, matrix.seqlen_k)
    return key_ranges(matrix, matrix.seqlen_q)[0][0]


def _fused(
    q: Tensor, keys: Keys, matrix: ScoreMatrix, seen: KeyRange, scale: float, splits: int
) -> tuple[Tensor, Tensor] | None:
    """As :func:`_over_keys`, by PyTorch's fused attention; None where it cannot, or its result may be wrong."""
    everything = slice(seen.lo, seen.hi)
    if matrix.score_mods or splits > 1 or seen.partial(everything) or not keys.are_views(matrix.dtype):
        return None
    k, v = keys(everything)
    return fused.attend(q, k, v, scale) if k.shape == v.shape else None


def _over_keys(
    q: Tensor, keys: Keys, matrix: ScoreMatrix, seen: KeyRange, scale: float, splits: int
) -> tuple[Tensor, Tensor]:
    """Attention over the keys that are seen, some, in parts that are merged in their order."""
    keys.check(slice(seen.lo, seen.hi))
    # The queries of a group of heads become rows of their kv head: (kv_heads, group * rows, head_dim).
    scaled = (q[0].to(matrix.dtype) * scale).unflatten(1, (keys.k.shape[2], -1)).permute(1, 2, 0, 3).flatten(1, 2)
    block_N = max(SCORES // (matrix.heads * matrix.seqlen_q), 16)
    length = -(-matrix.seqlen_k // splits)
    state: RowState | None = None
    for begin in range(0, matrix.seqlen_k, length):
        lo, hi = max(begin, seen.lo), min(begin + length, seen.hi)
        for start in range(lo, hi, block_N):
            part = _state(scaled, keys, matrix, seen, slice(start, min(start + block_N, hi)))
            state = part if state is None else join(state, part)
    assert state is not None
    o, lse = finish(state)
    return o.transpose(1, 2), lse  # rounded to q's dtype once, after the sink


def _state(scaled: Tensor, keys: Keys, matrix: ScoreMatrix, seen: KeyRange, block: slice) -> RowState:
    """The state of all rows after a block of keys."""
    rows = slice(0, matrix.seqlen_q)
    # S = scale * Q K^T
    packed = scaled.new_empty(*scaled.shape[:2], block.stop - block.start)
    for tile, k in keys.tiles(keys.k, block, matrix.dtype):
        packed[..., tile.start - block.start : tile.stop - block.start] = torch.bmm(scaled, k.mT)
    scores = matrix.modified(packed.view(1, matrix.heads, matrix.seqlen_q, -1), rows, block)
    if seen.partial(block):
        scores = scores.masked_fill(matrix.forbidden(rows, block), -torch.inf)
    # P = exp(S - m), l = the sums of its rows, O = P V
    m, p, l = exp_scores(scores)
    p = p.view(packed.shape)
    o = scaled.new_zeros(*scaled.shape[:2], keys.v.shape[3])
    for tile, v in keys.tiles(keys.v, block, matrix.dtype):
        o.baddbmm_(p[..., tile.start - block.start : tile.stop - block.start], v)
    return RowState(m, l, o.view(1, matrix.heads, matrix.seqlen_q, -1))
