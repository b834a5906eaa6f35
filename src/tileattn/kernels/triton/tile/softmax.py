"""The online softmax on tiles (Milakov and Gimelshein 2018, arXiv 1805.02867), in kernels that walk over keys.

Scores are in units of log2(e), so that exp is exp2. For each row a kernel keeps the maximum m, the sum l of
exp2(S - m), and the output O before division by l.

For results in float32 scores are `natural`: S and m keep their units, and S - m alone is multiplied by log2(e). Scores
may be large where differences are small, and multiplying each would round in proportion to it: lse, from which the
backward pass computes P again, would err by three roundings instead of one.

NaN and infinities: the search for the maximum leaves NaN out, but l has its weight. A score of +inf makes l infinite,
which makes o NaN and lse infinite. So decisions are made from l, not from m.
"""

import triton
import triton.language as tl

LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def finite(m):
    """The maximum, or 0 where it is infinite.

    With 0, a row that has seen no key has exponentials of 0, and a row with a score of +inf has l = inf, not NaN.
    """
    return tl.where(tl.abs(m) == float("inf"), 0.0, m)


@triton.jit
def power(difference, natural: tl.constexpr):
    """exp of a difference of scores."""
    if natural:
        return tl.exp2(difference * LOG2E)
    else:
        return tl.exp2(difference)


@triton.jit
def unit_of(factor, natural: tl.constexpr):
    """What s is multiplied by, if `factor` times s are the scores."""
    if natural:
        return factor
    else:
        return factor * LOG2E


@triton.jit
def weights(s, m, l, unit, natural: tl.constexpr = False):
    """Scores, in units of `unit`, become weights: P, the factor alpha of the output so far, the new maxima and sums."""
    m_new = tl.maximum(m, tl.max(s, 1) * unit)
    shift = finite(m_new)
    p = power(s * unit - shift[:, None], natural)
    alpha = power(m - shift, natural)
    l = l * alpha + tl.sum(p, 1)
    return p, alpha, m_new, l


@triton.jit
def add_sink(acc, m, l, logit, natural: tl.constexpr = False):
    """The sink, in the units of m, joins the denominator as one more score that has no value vector."""
    m_new = finite(tl.maximum(m, logit))
    alpha = power(m - m_new, natural)
    l = l * alpha + power(logit - m_new, natural)
    return acc * alpha[:, None], m_new, l


@triton.jit
def natural_lse(m, l, natural: tl.constexpr = False):
    """The log-sum-exp in natural logarithm; -inf of a row without keys."""
    if natural:
        return m + tl.log2(l) * LN2
    else:
        return (m + tl.log2(l)) * LN2


@triton.jit
def divisor(l):
    """What O is divided by.

    l = 0: a row without keys, whose o is 0. l = inf: o is NaN, also where an infinite sink has made O finite.
    """
    return tl.where(l == 0, 1.0, tl.where(l == float("inf"), float("nan"), l))
