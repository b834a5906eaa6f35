"""The online softmax: a softmax-weighted sum of values along a row whose scores arrive a few at a time.

A softmax seems to need the whole row twice: once for its maximum (without which exp overflows), once for the sum.
Milakov and Gimelshein 2018 (arXiv 1805.02867) compute both in one pass; FlashAttention (Dao et al. 2022,
arXiv 2205.14135) carries the weighted sum of the values along in the same way. Three numbers describe the scores
s[0], ..., s[n-1] of a row that have been seen, and **the invariant** says what they are:

    m = max over j < n of s[j]
    l = sum over j < n of exp(s[j] - m)
    o = sum over j < n of exp(s[j] - m) * v[j]                   a vector of head_dim_v numbers, not yet divided by l

When scores s[n], ..., s[n'-1] arrive, the maximum may grow from m to m'. The old sums are in units of exp(m); to be in
units of exp(m') they are multiplied by

    alpha = exp(m - m')                                          at most 1: it cannot overflow

since exp(s - m) * exp(m - m') = exp(s - m'). Then the new terms are added, and the invariant holds for n'. At the end
of the row the units cancel:

    softmax(s) @ v = o / l
    lse            = log(sum over j of exp(s[j])) = m + log(l)

The result is that of the softmax over the whole row, exactly; only the rounding differs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from .standard import dropped


class RowState(NamedTuple):
    """What is known of some rows after a part of their scores: the invariant of this module.

    m, l: (..., rows); o: (..., rows, head_dim_v), not divided by l. All in the dtype of the scores.
    """

    m: Tensor
    l: Tensor
    o: Tensor

    @staticmethod
    def empty(rows: Tensor, head_dim_v: int) -> RowState:
        """The state before any score, for rows like those of `rows` (..., rows, any): an empty maximum, empty sums."""
        m = rows.new_full(rows.shape[:-1], -torch.inf)
        return RowState(m=m, l=torch.zeros_like(m), o=rows.new_zeros(*m.shape, head_dim_v))

    def update(self, scores: Tensor, v: Tensor, dropout: Tensor | None = None) -> RowState:
        """The state after the next scores (..., rows, n) and their values (..., n, head_dim_v).

        Dropout (..., rows, n) multiplies what the values are weighed by; l, and with it lse, is that of all scores.
        """
        # A unit that cancels in the end has no gradient.
        m = torch.maximum(self.m, scores.amax(dim=-1)).detach()
        alpha = torch.exp(self.m - finite(m))
        p = torch.exp(scores - finite(m)[..., None])
        o = alpha[..., None] * self.o + dropped(p, dropout) @ v
        return RowState(m=m, l=alpha * self.l + p.sum(dim=-1), o=o)

    def finish(self, sink: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """o (..., rows, head_dim_v) and lse (..., rows) of the whole rows.

        A sink (broadcastable to the rows) is one more score without a value: it joins l, not o.
        """
        m, l, o = self
        if sink is not None:
            m = torch.maximum(self.m, sink).detach()
            alpha = torch.exp(self.m - finite(m))
            l, o = alpha * self.l + torch.exp(sink - finite(m)), alpha[..., None] * self.o
        # A row without keys has l = 0 and m = -inf; by its l nothing must be divided.
        one_where_empty = torch.where(l == 0, 1.0, l)
        # Where a score is +inf, so is l, and o is NaN, whatever dropout and the sink have left of it.
        divisor = torch.where(l == torch.inf, torch.nan, one_where_empty)
        return o / divisor[..., None], m + torch.log(one_where_empty)


def finite(m: Tensor) -> Tensor:
    """The maximum to subtract: 0 for a row that has seen no key, or a score of +inf.

    Without keys the maximum is -inf, and -inf - (-inf) is NaN, whereas exp(-inf - 0) = 0 is what an unseen key weighs.
    With a score of +inf, exp(inf - 0) = inf makes lse = inf and o = NaN, which are those of :func:`torch.logsumexp` and
    :func:`torch.softmax`.
    """
    return m.masked_fill(m.isinf(), 0.0)


def online_softmax(scores: Iterable[Tensor], values: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    """softmax(all scores) @ all values, and the log-sum-exp, from parts of them read once.

    Args:
        scores: the parts (..., rows, n) of the rows, one after another, of any lengths n.
        values: the parts (..., n, head_dim_v) that belong to them.

    Returns:
        o (..., rows, head_dim_v) and lse (..., rows).
    """
    state = None
    for part, v in zip(scores, values):
        state = RowState.empty(part, v.shape[-1]) if state is None else state
        state = state.update(part, v)
    if state is None:
        raise ValueError("online_softmax needs at least one part, to know the shape of the rows")
    return state.finish()
