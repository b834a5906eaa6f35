"""Packed sequences on the torch backend: one after the other, each as a call of one batch element.

The lengths are read to the host. What lies behind the last sequence is not read at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...call.dropout import Dropout
from ...call.facts import Gradients, Packed
from ...call.inputs import Inputs
from ...call.sequences import Sequence as OneOf
from ...call.sequences import sequences
from ...variant.masks import Mask
from ...variant.scores import Bias, PackedBias
from .backward import Needs, add_gradients
from .forward import forward
from .mask import ScoreMods, Variant
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
    """o (1, total_q, heads, head_dim_v) in q's dtype and lse (1, heads, total_q); 0 and -inf where no sequence is."""
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
    """The gradients, as `backward` has them, of a packed call; 0 where no sequence is."""
    q, k, v, sink, _, dropout, packed, _ = inputs
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
        variant = Variant.of(of_sequence.q, of_sequence.k, mask, mods, dropout, number)
        outputs = (o[:, rows], lse[..., rows], do[:, rows], None if dlse is None else dlse[..., rows])
        *found, of_sink = add_gradients(of_sequence, *outputs, variant, _watched_in(mods, watched), needs, scale)
        for total, part, place in zip((dq, dk, dv), found, (rows, keys, keys)):
            if total is not None:
                total[:, place] = part
        if of_sink is not None:
            dsink = of_sink if dsink is None else dsink + of_sink
    if sink is not None and needs.sink:
        dsink = torch.zeros_like(sink) if dsink is None else dsink.to(sink.dtype)
    return Gradients(dq, dk, dv, dsink, tuple(None if x is None else x.gradient() for x in watched))


def _of_sequence(mod: Any, sequence: OneOf) -> Any:
    """A modification as the sequence has it by itself."""
    if not isinstance(mod, PackedBias):
        return mod
    index = mod.part(sequence.number, *(side.stop - side.start for side in sequence[1:]))
    tensor: Any = mod.tensor
    return Bias(tensor.part(index) if isinstance(tensor, Watched) else tensor[index])


def _watched_in(mods: ScoreMods, watched: Sequence[Watched | None]) -> list[Watched]:
    """What the modifications of one sequence read: parts of biases beside the tensors that all sequences share."""
    parts = [mod.tensor for mod in mods if isinstance(mod, Bias) and isinstance(mod.tensor, Watched)]
    return [x for x in watched if x is not None] + parts
