"""The online softmax: a softmax-weighted sum of values along a row whose scores arrive in parts.

A softmax seems to read the row twice: once for its maximum (without which exp overflows) and once for the sum. Milakov
and Gimelshein 2018 (arXiv 1805.02867) compute both in one pass. FlashAttention (Dao et al. 2022, arXiv 2205.14135)
accumulates the weighted sum of the values in the same pass. The state of a row after the scores s[0], ..., s[n-1] is m,
l and o. **The invariant** defines them:

    m = max over j < n of s[j]
    l = sum over j < n of exp(s[j] - m)
    o = sum over j < n of exp(s[j] - m) * v[j]                   a vector of head_dim_v numbers, not yet divided by l

When scores s[n], ..., s[n'-1] arrive, the maximum may grow from m to m'. l and o were computed relative to m. Multiply
both by

    alpha = exp(m - m')                                          at most 1: it cannot overflow

to make them relative to m', since exp(s - m) * exp(m - m') = exp(s - m'). Then add the new terms, and the invariant
holds for n'. At the end of the row the factors exp(m) cancel:

    softmax(s) @ v = o / l
    lse            = log(sum over j of exp(s[j])) = m + log(l)

In exact arithmetic the result equals the softmax over the whole row; only the rounding differs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from .standard import dropped


class RowState(NamedTuple):
    """The state of some rows after a part of their scores; the module's docstring defines m, l and o.

    m, l: (..., rows). o: (..., rows, head_dim_v), not divided by l. All have the dtype of the scores.
    """

    m: Tensor
    l: Tensor
    o: Tensor

    @staticmethod
    def empty(rows: Tensor, head_dim_v: int) -> RowState:
        """The state before the first score: m = -inf, l = 0, o = 0. `rows` (..., rows, any) gives shape and dtype."""
        m = rows.new_full(rows.shape[:-1], -torch.inf)
        return RowState(m=m, l=torch.zeros_like(m), o=rows.new_zeros(*m.shape, head_dim_v))

    def update(self, scores: Tensor, v: Tensor, dropout: Tensor | None = None) -> RowState:
        """The state after the next scores (..., rows, n) and their values (..., n, head_dim_v).

        Dropout (..., rows, n) multiplies the probabilities in o only. l, and with it lse, sums all probabilities.
        """
        # m cancels in the result, so it needs no gradient.
        m = torch.maximum(self.m, scores.amax(dim=-1)).detach()
        alpha = torch.exp(self.m - finite(m))
        p = torch.exp(scores - finite(m)[..., None])
        o = alpha[..., None] * self.o + dropped(p, dropout) @ v
        return RowState(m=m, l=alpha * self.l + p.sum(dim=-1), o=o)

    def finish(self, sink: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """o (..., rows, head_dim_v) and lse (..., rows) of the whole rows.

        A sink (broadcastable to the rows) is one more score without a value: it is added to l, not to o.
        """
        m, l, o = self
        if sink is not None:
            m = torch.maximum(self.m, sink).detach()
            alpha = torch.exp(self.m - finite(m))
            l, o = alpha * self.l + torch.exp(sink - finite(m)), alpha[..., None] * self.o
        # A row without keys has l = 0 and m = -inf. Its o is divided by 1, not by l.
        one_where_empty = torch.where(l == 0, 1.0, l)
        # A score of +inf makes l = inf. Then o must be NaN, also where dropout or the sink has removed that score.
        divisor = torch.where(l == torch.inf, torch.nan, one_where_empty)
        return o / divisor[..., None], m + torch.log(one_where_empty)


def finite(m: Tensor) -> Tensor:
    """The maximum to subtract from the scores: m, or 0 where m is infinite.

    A row without keys has m = -inf, and -inf - (-inf) is NaN. Subtracting 0 gives exp(-inf - 0) = 0, the probability of
    a masked key. A row with a score of +inf gets exp(inf - 0) = inf, so lse = inf and o = NaN, like
    :func:`torch.logsumexp` and :func:`torch.softmax`.
    """
    return m.masked_fill(m.isinf(), 0.0)


def online_softmax(scores: Iterable[Tensor], values: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    """softmax(scores) @ values and the log-sum-exp of the scores, in one pass over their parts.

    Args:
        scores: consecutive parts (..., rows, n) of the rows; n may differ from part to part.
        values: the part (..., n, head_dim_v) of the values for each part of the scores.

    Returns:
        o (..., rows, head_dim_v) and lse (..., rows).

    Raises:
        ValueError: there is no part.
    """
    state = None
    for part, v in zip(scores, values):
        state = RowState.empty(part, v.shape[-1]) if state is None else state
        state = state.update(part, v)
    if state is None:
        raise ValueError("online_softmax needs at least one part, to know the shape of the rows")
    return state.finish()
