"""Decoding on a CPU, sequence by sequence, each over its own keys.

Few queries take FlashAttention-2's loop (`loop.py`), in which the queries of a group of heads are rows of one matrix,
so that K and V are read once; a tile of K or V is converted to float32 while it is in the processor's cache. Many
queries, a prefill chunk, take the forward pass of the torch backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ....call.decoding import DecodeInputs, DecodeSizes
from ....call.fp8 import accumulator
from ....variant.masks import Mask
from ....variant.scores import Bias, PackedBias
from .. import loop
from ..forward import forward
from ..mask import KeyRange, ScoreMatrix, ScoreMods, key_ranges
from ..softmax import RowState, finish, join, join_sink
from .cache import Keys, sequences
from .cache import Sequence as CachedSequence

# Elements of the keys of a tile. A tile that is gathered from pages or converted to float32 is read again: it must stay
# in the processor's cache.
TILE = 2**21
COPIED_TILE = 2**19
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
    for each in sequences(inputs, sizes):
        q = inputs.q[each.batch : each.batch + 1, each.rows]
        mods = [of_sequence(mod, each) for mod in score_mods]
        o_rows, lse_rows = _attend(q, Keys(inputs, each.number), each, mask, mods, inputs.sink, scale, splits or 1)
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
    seen = None if 0 in (q.shape[1], seqlen_k) else key_ranges(matrix, q.shape[1])[0][0]
    # Pages of keys that no row sees may be none: the forward pass takes a sequence's keys whole.
    whole = seen is not None and (keys.table is None or (seen.lo, seen.hi) == (0, seqlen_k))
    if seen is None or seen.lo == seen.hi:
        o, lse = loop.without_keys(q, keys.v, dtype)
    elif q.shape[1] >= MANY_QUERIES and splits == 1 and whole:
        k, v = keys(slice(0, seqlen_k))
        return forward(q, k, v, mask, score_mods, sink, scale, None, sequence.number)
    else:
        o, lse = _over_keys(q, keys, matrix, seen, scale, splits)
    return (o, lse) if sink is None else join_sink(o, lse, sink)


def _over_keys(
    q: Tensor, keys: Keys, matrix: ScoreMatrix, seen: KeyRange, scale: float, splits: int
) -> tuple[Tensor, Tensor]:
    """Attention over the keys that are seen, some, in parts that are merged in their order."""
    tile = COPIED_TILE if keys.table is not None or q.dtype != matrix.dtype else TILE
    block_N = max(tile // (keys.k.shape[2] * keys.k.shape[3]), 16)
    length = -(-matrix.seqlen_k // splits)
    state: RowState | None = None
    for begin in range(0, matrix.seqlen_k, length):
        lo, hi = max(begin, seen.lo), min(begin + length, seen.hi)
        if lo < hi:
            tiles = [slice(start, min(start + block_N, hi)) for start in range(lo, hi, block_N)]
            part = loop.states(q, keys, tiles, matrix, slice(0, matrix.seqlen_q), seen, scale)
            state = part if state is None else join(state, part)
    assert state is not None
    o, lse = finish(state)
    return o.transpose(1, 2), lse  # rounded to q's dtype once, after the sink
