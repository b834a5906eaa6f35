"""The online softmax: joins the states of tiles, and merges the results of parts of the keys.

Rows without keys have m = -inf. There 0 is subtracted instead of m, because -inf - (-inf) is NaN. Rows with a score of
+inf subtract 0, too, which gives l = inf, lse = inf and o = NaN.

Source: Milakov and Gimelshein 2018 (arXiv 1805.02867), Dao 2023 (arXiv 2307.08691).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class RowState(NamedTuple):
    """The state of some rows after some of their keys.

    m: the maximum of the scores, (..., rows). l: the sum of exp(score - m), (..., rows). o: the sum of
    exp(score - m) * v, (..., rows, head_dim_v), not divided by l.
    """

    m: Tensor
    l: Tensor
    o: Tensor


def exp_scores(scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """m, p = exp(scores - m) and l of a tile of scores (..., rows, keys)."""
    m = scores.amax(dim=-1)
    p = torch.exp(scores - _finite(m)[..., None])
    return m, p, p.sum(dim=-1)


def join(x: RowState, y: RowState) -> RowState:
    """The state after the scores of both x and y: l and o of each are made relative to the larger m, then added."""
    m = torch.maximum(x.m, y.m)
    in_x, in_y = torch.exp(x.m - _finite(m)), torch.exp(y.m - _finite(m))
    return RowState(m, in_x * x.l + in_y * y.l, in_x[..., None] * x.o + in_y[..., None] * y.o)


def finish(state: RowState) -> tuple[Tensor, Tensor]:
    """o = o / l and lse = m + log(l); 0 and -inf in rows without keys, NaN in rows with a score that is NaN."""
    m, l, o = state
    l = l.masked_fill(l == 0, 1.0)
    # With l = inf, o may be finite if dropout has dropped all scores of +inf.
    return o / l.masked_fill(l == torch.inf, torch.nan)[..., None], m + torch.log(l)


def merge(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Merges (o, lse) of parts of the keys; o is (batch, rows, heads, dim) and lse (batch, heads, rows).

    o = sum of exp(lse_part - lse) * o_part, computed in lse's dtype and returned in o's.
    """
    if len(parts) == 1:
        return parts[0]
    lse = torch.logsumexp(torch.stack([part_lse for _, part_lse in parts]), dim=0)
    o = sum(torch.exp(part_lse - _finite(lse)).transpose(1, 2)[..., None] * part_o for part_o, part_lse in parts)
    return o.to(parts[0][0].dtype), lse


def join_sink(o: Tensor, lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """o and lse after adding `sink` (heads,), a score without a value, to the softmax's denominator."""
    with_sink = torch.logaddexp(lse, sink.to(lse.dtype)[:, None])
    # A sink of +inf makes o NaN, like a score of +inf.
    weight = torch.exp(lse - _finite(with_sink)).masked_fill(with_sink == torch.inf, torch.nan)
    return (o * weight.transpose(1, 2)[..., None]).to(o.dtype), with_sink


def _finite(m: Tensor) -> Tensor:
    return m.masked_fill(m.isinf(), 0.0)
