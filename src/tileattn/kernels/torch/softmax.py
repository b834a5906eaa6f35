"""The online softmax: rows whose scores arrive a tile at a time, and parts that are joined afterwards.

Source: Milakov and Gimelshein 2018 (arXiv 1805.02867), Dao 2023 (arXiv 2307.08691). Rows without keys have m = -inf,
and 0 is subtracted there, for -inf - (-inf) is NaN. So it is where a score is +inf: then l = inf, lse = inf, o = NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class RowState(NamedTuple):
    """Of some rows: maximum m and sum l of exp(score - m), both (..., rows); o (..., rows, head_dim_v), not divided."""

    m: Tensor
    l: Tensor
    o: Tensor


def exp_scores(scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """m, p = exp(scores - m) and l of a tile of scores (..., rows, keys)."""
    m = scores.amax(dim=-1)
    p = torch.exp(scores - _finite(m)[..., None])
    return m, p, p.sum(dim=-1)


def join(x: RowState, y: RowState) -> RowState:
    """The state after the scores of both: each in units of exp(its m), brought to the larger unit."""
    m = torch.maximum(x.m, y.m)
    in_x, in_y = torch.exp(x.m - _finite(m)), torch.exp(y.m - _finite(m))
    return RowState(m, in_x * x.l + in_y * y.l, in_x[..., None] * x.o + in_y[..., None] * y.o)


def finish(state: RowState) -> tuple[Tensor, Tensor]:
    """o = o / l and lse = m + log(l); 0 and -inf in rows without keys, NaN in rows with a score that is NaN."""
    m, l, o = state
    l = l.masked_fill(l == 0, 1.0)
    # With l = inf o may be finite if dropout has taken out all scores of +inf.
    return o / l.masked_fill(l == torch.inf, torch.nan)[..., None], m + torch.log(l)


def merge(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """(o, lse) over the keys of all parts, from those of each; o (batch, rows, heads, dim), lse (batch, heads, rows).

    o = sum of exp(lse_part - lse) * o_part, in lse's dtype; the result has o's.
    """
    if len(parts) == 1:
        return parts[0]
    lse = torch.logsumexp(torch.stack([part_lse for _, part_lse in parts]), dim=0)
    o = sum(torch.exp(part_lse - _finite(lse)).transpose(1, 2)[..., None] * part_o for part_o, part_lse in parts)
    return o.to(parts[0][0].dtype), lse


def join_sink(o: Tensor, lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """o and lse after one more score without a value, `sink` (heads,), has joined the denominator."""
    with_sink = torch.logaddexp(lse, sink.to(lse.dtype)[:, None])
    # Also a sink of +inf makes o NaN.
    weight = torch.exp(lse - _finite(with_sink)).masked_fill(with_sink == torch.inf, torch.nan)
    return (o * weight.transpose(1, 2)[..., None]).to(o.dtype), with_sink


def _finite(m: Tensor) -> Tensor:
    return m.masked_fill(m.isinf(), 0.0)
