"""The online softmax on tiles (Milakov and Gimelshein 2018, arXiv 1805.02867), in kernels that walk over keys.

Scores are in units of log2(e), so that exp is exp2. For each row a kernel keeps the maximum m, the sum l of
exp2(S - m), and the output O before division by l.

NaN and infinities: the search for the maximum leaves NaN out, but l has its weight. A score of +inf makes l infinite,
which makes o NaN and lse infinite. So decisions are made from l, not from m.
"""

import triton
import triton.language as tl

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def finite(m):
    """The maximum, or 0 where it is infinite.

    With 0, a row that has seen no key has exponentials of 0, and a row with a score of +inf has l = inf, not NaN.
    """
    return tl.where(tl.abs(m) == float("inf"), 0.0, m)


@triton.jit
def weights(s, m, l, unit):
    """Scores, in units of `unit`, become weights: P, the factor alpha of the output so far, the new maxima and sums."""
    m_new = tl.maximum(m, tl.max(s, 1) * unit)
    shift = finite(m_new)
    p = tl.exp2(s * unit - shift[:, None])
    alpha = tl.exp2(m - shift)
    l = l * alpha + tl.sum(p, 1)
    return p, alpha, m_new, l


@triton.jit
def add_sink(acc, m, l, logit):
    """The sink, in units of log2(e), joins the denominator as one more score that has no value vector."""
    m_new = finite(tl.maximum(m, logit))
    alpha = tl.exp2(m - m_new)
    l = l * alpha + tl.exp2(logit - m_new)
    return acc * alpha[:, None], m_new, l


@triton.jit
def natural_lse(m, l):
    """The log-sum-exp in natural logarithm; -inf of a row without keys."""
    return (m + tl.log2(l)) * LN2


@triton.jit
def divisor(l):
    """What O is divided by.

    l = 0: a row without keys, whose o is 0. l = inf: o is NaN, also where an infinite sink has made O finite.
    """
    return tl.where(l == 0, 1.0, tl.where(l == float("inf"), float("nan"), l))
