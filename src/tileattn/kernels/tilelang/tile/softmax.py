"""The online softmax on fragments, shared by all schedules (Milakov & Gimelshein 2018, arXiv 1805.02867).

For each row a kernel keeps ``m``, the largest score so far, ``l``, the sum of ``exp2(c * (s - m))``, and ``acc_o``, the
sum of ``exp2(c * (s - m)) v``, where ``c`` turns scores into powers of two (``scale * log2 e``). A new tile of scores
raises ``m``; ``l`` and ``acc_o`` shrink by ``alpha = exp2(c * (m_old - m_new))`` and the tile is added.

NaN and infinity: the search for the maximum leaves NaN out, but ``l`` has its weight. A score of +inf is to give
``l = inf``, and so o = NaN and an infinite log-sum-exp. So decisions are made from ``l``, not from ``m``.

Fragments, float32: ``acc_s`` (block_M, block_N), ``acc_o`` (block_M, head_dim_v); ``m``, ``l``, ``alpha``, ``base``,
``row_sum`` (block_M,).
"""

import math

import tilelang.language as T
from tvm import tirx

LOG2E = math.log2(math.e)
LN2 = math.log(2.0)
# Scores within -c .. c (powers of two), such as those of a soft cap, need no maximum once a base is chosen that leaves
# weights within 2^-110 .. 2^40. Beyond this c they would be too small for float32.
LARGEST_WEIGHT = 40.0
LARGEST_BOUND = 75.0
ROWS = T.GemmWarpPolicy.FullRow  # each warp keeps whole rows of a tile, so that the softmax stays within it


@T.macro
def reset(m, l, acc_o):
    """Before the first tile: no key seen."""
    T.fill(m, -T.infinity("float32"))
    T.fill(l, 0)
    T.fill(acc_o, 0)


@T.macro
def update(acc_s, m, l, alpha, base, row_sum, c, block_M, block_N):
    """Adds one tile: scores in ``acc_s`` become weights; ``alpha`` is the factor that rescales ``acc_o``."""
    raise_maximum(acc_s, m, alpha, base, c, block_M, 0)
    exponentials(acc_s, base, c, block_M, block_N)
    # l = alpha * l + sum_j p_j
    T.reduce_sum(acc_s, row_sum, dim=1)
    for i in T.Parallel(block_M):
        l[i] = l[i] * alpha[i] + row_sum[i]


@T.macro
def raise_maximum(acc_s, m, alpha, base, c, block_M, rescale_threshold, shift=0.0, bounded=False):
    """m = max(m, max_j s_j), but only when it grows by more than ``rescale_threshold`` (log2 units).

    ``base`` and ``alpha`` follow m. ``shift`` is added to all exponents, to put the weights into the range of a narrow
    format. Weights, and so ``l``, are then 2^shift times as large, which dividing by ``l`` undoes.

    ``bounded``: scores lie within -1 .. 1, and later tiles may be added without a maximum (:func:`fix_base`). m is
    then larger than the maximum by whole powers of two, where it has to be.
    """
    T.copy(m, base)  # m_old
    T.reduce_max(acc_s, m, dim=1, clear=False)
    for i in T.Parallel(block_M):
        alpha[i] = (m[i] - base[i]) * c
    # Weights stay below 2^rescale_threshold. From -inf any growth counts; inf - inf is NaN, and no growth.
    for i in T.Parallel(block_M):
        m[i] = T.if_then_else(alpha[i] > rescale_threshold, m[i], base[i])
    if bounded:
        raise_by_powers(m, c)
    # alpha = exp2(c * (m_old - m)): 1, and not nearly 1, where m stays.
    for i in T.Parallel(block_M):
        alpha[i] = T.exp2(T.if_then_else(alpha[i] > rescale_threshold, -alpha[i], 0.0))
    # A row that has seen no key keeps m = -inf; exponents are then taken from 0, and all weights are 0. So they are
    # where m = inf: those scores weigh inf, whereas inf - inf is NaN.
    for i in T.Parallel(block_M):
        if shift > 0:
            base[i] = T.if_then_else(T.abs(m[i]) == T.infinity("float32"), 0.0, m[i] * c - shift)
        else:
            base[i] = T.if_then_else(T.abs(m[i]) == T.infinity("float32"), 0.0, m[i] * c)


@T.macro
def raise_by_powers(m, c):
    """Raises m, until no score within -1 .. 1 weighs more than 2^LARGEST_WEIGHT.

    By whole powers of two: the largest weight then stays one, and rounding to 16 bits leaves it as it is. A row with
    one key has exactly that key's value, and its dq is 0.
    """
    for i in T.Parallel(m.shape[0]):
        # From -inf no sum leads up; above LARGEST_BOUND the maximum is raised in every tile.
        if (c - LARGEST_WEIGHT > m[i] * c) & (m[i] > -T.infinity("float32")) & (c <= LARGEST_BOUND):
            m[i] = m[i] + T.ceil(c - LARGEST_WEIGHT - m[i] * c) / c


@T.macro
def fix_base(m, base, c):
    """Chooses the base of rows that have seen no key, before tiles that are added without a maximum."""
    for i in T.Parallel(m.shape[0]):
        if m[i] == -T.infinity("float32"):
            m[i] = T.max(c - LARGEST_WEIGHT, 0.0) / c
            base[i] = T.max(c - LARGEST_WEIGHT, 0.0)


@T.macro
def forget_fixed(m, l):
    """After :func:`fix_base`: rows that have seen no key to the end have m = -inf again."""
    for i in T.Parallel(m.shape[0]):
        m[i] = T.if_then_else(l[i] == 0.0, -T.infinity("float32"), m[i])


@T.macro
def exponentials(acc_s, base, c, block_M, block_N):
    """p_j = exp2(c * s_j - base)."""
    for i, j in T.Parallel(block_M, block_N):
        acc_s[i, j] = T.exp2(acc_s[i, j] * c - base[i])


def own_columns_layout(block_M):
    """Of a fragment (block_M, 4): element [i, t] in the thread that holds columns 2t and 2t + 1 of each eight in row i.

    This is how the tensor cores leave an accumulator: 16 rows per warp, a row in four neighbouring threads.
    """
    return T.Fragment(
        [block_M, 4],
        forward_thread_fn=lambda i, t: (i // 16) * 32 + (i % 8) * 4 + t,
        forward_index_fn=lambda i, t: (i // 8) % 2,
    )


def per_thread_layout(threads):
    """Of a fragment (threads,): one element in each thread."""
    return T.Fragment([threads], forward_thread_fn=lambda t: t, forward_index_fn=lambda t: 0)


@T.macro
def add_own_columns(acc_s, sums, alpha, block_M, block_N):
    """Adds each thread's own weights; the four threads of a row add their sums after the last tile."""
    for i, t in T.Parallel(block_M, 4):
        sums[i, t] = sums[i, t] * alpha[i]
        for j in T.serial(block_N // 4):
            sums[i, t] += acc_s[i, (j // 2) * 8 + t * 2 + j % 2]


@T.macro
def add_own_half(acc_s, sums, first):
    """The same for half of the columns, from column `first` on, where sums are not rescaled."""
    block_M, block_N = acc_s.shape
    for i, t in T.Parallel(block_M, 4):
        for j in T.serial(block_N // 8):
            sums[i, t] += acc_s[i, (j // 2) * 8 + t * 2 + j % 2 + first]


@T.macro
def minimum_alpha(alpha, min_alpha, threads):
    """The smaller alpha of the two rows, eight apart, that each thread holds."""
    for t in T.Parallel(threads):
        min_alpha[t] = alpha[t // 32 * 16 + t % 32 // 4]
    for t in T.Parallel(threads):
        min_alpha[t] = T.min(min_alpha[t], alpha[t // 32 * 16 + t % 32 // 4 + 8])


@T.macro
def own_sum(sums, own):
    """Of the two sums that each thread holds, that of the first row."""
    for t in T.Parallel(own.shape[0]):
        own[t] = sums[t // 32 * 16 + t % 32 // 4, t % 4]


@T.macro
def rescale_if_needed(acc_o, alpha, min_alpha, thread, block_M, head_dim_v, threads):
    """:func:`rescale`, skipped by warps in which no row's maximum has grown."""
    minimum_alpha(alpha, min_alpha, threads)
    if T.any_sync(min_alpha[thread] < 1.0) != 0:
        rescale(acc_o, alpha, block_M, head_dim_v)


@T.macro
def to_fp8_weights(acc_s, weights, block_M, block_N):
    """Converts each thread's own weights to fp8, in the matrix units' operand layout, with the keys permuted.

    A thread holds columns 2t, 2t + 1 of each eight of an accumulator, but takes 4t .. 4t + 3 of each sixteen of an
    operand. It takes those of two eights; the values' keys are in the same order (transpose_fp8.py).
    """
    for i, j in T.Parallel(block_M, block_N):
        weights[i, j] = acc_s[i, key_of_column(j)]


def key_of_column(j):
    """The key that column j of the fp8 weights, and of the transposed values, stands for."""
    return j // 16 * 16 + j % 4 // 2 * 8 + j % 16 // 4 * 2 + j % 2


@T.macro
def add_product(acc_o, product, block_M, head_dim_v):
    """acc_o += product."""
    for i, d in T.Parallel(block_M, head_dim_v):
        acc_o[i, d] += product[i, d]


@T.macro
def rescale(acc_o, alpha, block_M, head_dim_v):
    """acc_o = alpha * acc_o, before the tile's weighted values are added."""
    for i, d in T.Parallel(block_M, head_dim_v):
        acc_o[i, d] *= alpha[i]


@T.macro
def add_sink(m, l, alpha, base, sink_log2, c, block_M, shift=0.0):
    """The sink joins the denominator as one more score (in log2 units) that has no value vector.

    ``sink_log2`` is the rows' common sink, or a fragment (block_M,) of their own. Leaves ``base`` as the exponents'
    base and ``alpha`` as the factor for ``acc_o``, like :func:`update`.
    ``shift``: see :func:`raise_maximum`.
    """
    for i in T.Parallel(block_M):
        base[i] = T.max(m[i] * c, _of_row(sink_log2, i))
    for i in T.Parallel(block_M):
        base[i] = T.if_then_else(T.abs(base[i]) == T.infinity("float32"), 0.0, base[i])
    for i in T.Parallel(block_M):
        if shift > 0:
            alpha[i] = T.exp2(m[i] * c - shift - base[i])
        else:
            alpha[i] = T.exp2(m[i] * c - base[i])
    for i in T.Parallel(block_M):
        l[i] = l[i] * alpha[i] + T.exp2(_of_row(sink_log2, i) - base[i])


def _of_row(value, i):
    """A row's element of a fragment, or the value of all rows."""
    return value[i] if isinstance(value, tirx.Buffer) else value


@T.macro
def finish(l, base, alpha, acc_o, block_M, head_dim_v, factor=None):
    """acc_o becomes o, and l the log-sum-exp in natural logarithm; rows without keys give 0 and -inf.

    A row with a score of +inf gives NaN, also where dropout has left it weights of 0, or the sink is infinite.

    ``factor``: of o, or None.
    """
    for i in T.Parallel(block_M):
        alpha[i] = T.if_then_else(l[i] == 0.0, 0.0, alpha[i] / l[i])
    for i in T.Parallel(block_M):
        alpha[i] = T.if_then_else(l[i] == T.infinity("float32"), T.log2(-l[i]), alpha[i])  # NaN
    if factor is not None:
        for i in T.Parallel(block_M):
            alpha[i] *= factor
    for i, d in T.Parallel(block_M, head_dim_v):
        acc_o[i, d] *= alpha[i]
    # lse = ln2 * (log2 l + base)
    for i in T.Parallel(block_M):
        l[i] = (T.log2(l[i]) + base[i]) * LN2
