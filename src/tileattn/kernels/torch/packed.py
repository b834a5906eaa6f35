"""Packed sequences on the torch backend: a loop over the sequences, each a call with one batch element.

The lengths are copied to the host. Unused tail rows, after the last sequence, are not read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...call.dropout import Dropout
from ...call.facts import Gradients, Packed
from ...call.inputs import Inputs
from ...call.sequences import SequenceSlices, sequences
from ...variant.masks import Mask
from ...variant.scores import Bias, PackedBias
from .backward import Needs, add_gradients
from .forward import forward
from .mask import ScoreMatrix, ScoreMods
from .score_gradient import Watched


def packed_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None,
    score_mods: ScoreMods,
    sink: Tensor | None,
    scale: float,
    packed: Packed,
    dropout: Dropout | None = None,
) -> tuple[Tensor, Tensor]:
    """o (1, total_q, heads, head_dim_v) in q's dtype and lse (1, heads, total_q); unused rows have 0 and -inf."""
    _, total_q, heads, _ = q.shape
    o = q.new_zeros(1, total_q, heads, v.shape[3])
    lse = q.new_full((1, heads, total_q), -torch.inf, dtype=torch.promote_types(q.dtype, torch.float32))
    for each in sequences(packed, total_q, k.shape[1]):
        number, rows, keys = each
        mods = [_of_sequence(mod, each) for mod in score_mods]
        o[:, rows], lse[..., rows] = forward(
            q[:, rows], k[:, keys], v[:, keys], mask, mods, sink, scale, dropout, number
        )
    return o, lse


def packed_backward(
    inputs: Inputs,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    dlse: Tensor | None,
    mask: Mask | None,
    score_mods: ScoreMods,
    watched: Sequence[Watched | None],
    needs: Needs,
    scale: float,
) -> Gradients:
    """The gradients of a packed call, as `backward` returns them; unused rows have 0."""
    q, k, v, sink, _, dropout, packed, *_ = inputs
    assert packed is not None
    dq, dk, dv = (
        torch.zeros_like(x, memory_format=torch.contiguous_format) if need else None
        for x, need in zip((q, k, v), needs)
    )
    dsink = None
    for each in sequences(packed, q.shape[1], k.shape[1]):
        number, rows, keys = each
        mods = [_of_sequence(mod, each) for mod in score_mods]
        of_sequence = Inputs(q[:, rows], k[:, keys], v[:, keys], sink)
        matrix = ScoreMatrix.of(of_sequence.q, of_sequence.k, mask, mods, dropout, number)
        outputs = (o[:, rows], lse[..., rows], do[:, rows], None if dlse is None else dlse[..., rows])
        *parts, of_sink = add_gradients(of_sequence, *outputs, matrix, _watched_in(mods, watched), needs, scale)
        for total, part, tokens in zip((dq, dk, dv), parts, (rows, keys, keys)):
            if total is not None:
                total[:, tokens] = part
        if of_sink is not None:
            dsink = of_sink if dsink is None else dsink + of_sink
    if sink is not None and needs.sink:
        dsink = torch.zeros_like(sink) if dsink is None else dsink.to(sink.dtype)
    return Gradients(dq, dk, dv, dsink, tuple(None if x is None else x.gradient() for x in watched))


def _of_sequence(mod: Any, sequence: SequenceSlices) -> Any:
    """A score modification for one sequence: a packed bias becomes the sequence's part of it."""
    if not isinstance(mod, PackedBias):
        return mod
    index = mod.part(sequence.number, *(side.stop - side.start for side in sequence[1:]))
    tensor: Any = mod.tensor
    return Bias(tensor.part(index) if isinstance(tensor, Watched) else tensor[index])


def _watched_in(mods: ScoreMods, watched: Sequence[Watched | None]) -> list[Watched]:
    """The watched tensors of one sequence: parts of biases, and the tensors that all sequences share."""
    parts = [mod.tensor for mod in mods if isinstance(mod, Bias) and isinstance(mod.tensor, Watched)]
    return [x for x in watched if x is not None] + parts
