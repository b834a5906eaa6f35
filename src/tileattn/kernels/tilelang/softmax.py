"""The online softmax on fragments, shared by all schedules (Milakov & Gimelshein 2018, arXiv 1805.02867).

For each row a kernel keeps ``m``, the largest score so far, ``l``, the sum of ``exp2(c * (s - m))``, and ``acc_o``, the
sum of ``exp2(c * (s - m)) v``, where ``c`` turns scores into powers of two (``scale * log2 e``). A new tile of scores
raises ``m``; ``l`` and ``acc_o`` shrink by ``alpha = exp2(c * (m_old - m_new))`` and the tile is added.

Fragments, float32: ``acc_s`` (block_M, block_N), ``acc_o`` (block_M, head_dim_v); ``m``, ``l``, ``alpha``, ``base``,
``row_sum`` (block_M,).
"""

import math

import tilelang.language as T

LOG2E = math.log2(math.e)
LN2 = math.log(2.0)


@T.macro
def reset(m, l, acc_o):
    """Before the first tile: no key seen."""
    T.fill(m, -T.infinity("float32"))
    T.fill(l, 0)
    T.fill(acc_o, 0)


@T.macro
def update(acc_s, m, l, alpha, base, row_sum, c, block_M, block_N):
    """Takes in one tile: scores in ``acc_s`` become weights; ``alpha`` says by how much ``acc_o`` must shrink."""
    T.copy(m, alpha)
    # m = max(m, max_j s_j)
    T.reduce_max(acc_s, m, dim=1, clear=False)
    # A row that has seen no key keeps m = -inf; exponents are then taken from 0, and all weights are 0.
    for i in T.Parallel(block_M):
        base[i] = T.if_then_else(m[i] == -T.infinity("float32"), 0.0, m[i] * c)
    # p_j = exp2(c * (s_j - m))
    for i, j in T.Parallel(block_M, block_N):
        acc_s[i, j] = T.exp2(acc_s[i, j] * c - base[i])
    # alpha = exp2(c * (m_old - m))
    for i in T.Parallel(block_M):
        alpha[i] = T.exp2(alpha[i] * c - base[i])
    # l = alpha * l + sum_j p_j
    T.reduce_sum(acc_s, row_sum, dim=1)
    for i in T.Parallel(block_M):
        l[i] = l[i] * alpha[i] + row_sum[i]


@T.macro
def rescale(acc_o, alpha, block_M, head_dim_v):
    """acc_o = alpha * acc_o, before the tile's weighted values are added."""
    for i, d in T.Parallel(block_M, head_dim_v):
        acc_o[i, d] *= alpha[i]


@T.macro
def add_sink(m, l, alpha, base, sink_log2, c, block_M):
    """The sink joins the denominator as one more score (in log2 units) that has no value vector.

    Leaves ``base`` as the exponents' base and ``alpha`` as the factor for ``acc_o``, like :func:`update`.
    """
    for i in T.Parallel(block_M):
        base[i] = T.max(m[i] * c, sink_log2)
    for i in T.Parallel(block_M):
        base[i] = T.if_then_else(base[i] == -T.infinity("float32"), 0.0, base[i])
    for i in T.Parallel(block_M):
        alpha[i] = T.exp2(m[i] * c - base[i])
    for i in T.Parallel(block_M):
        l[i] = l[i] * alpha[i] + T.exp2(sink_log2 - base[i])


@T.macro
def finish(l, base, alpha, acc_o, block_M, head_dim_v):
    """acc_o becomes o, and l the log-sum-exp in natural logarithm; rows without keys give 0 and -inf."""
    for i in T.Parallel(block_M):
        alpha[i] = T.if_then_else(l[i] == 0.0, 0.0, alpha[i] / l[i])
    for i, d in T.Parallel(block_M, head_dim_v):
        acc_o[i, d] *= alpha[i]
    # lse = ln2 * (log2 l + base)
    for i in T.Parallel(block_M):
        l[i] = (T.log2(l[i]) + base[i]) * LN2
