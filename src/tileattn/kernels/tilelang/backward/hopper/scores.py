"""Operations of the three Hopper kernels on a tile of scores, in registers of the consumer warpgroups.

P = exp2(S - lse2)              of the modified and masked scores, in place
dS = P * (dP - delta) * slope   of the scaled scores, in 16 bits
"""

from __future__ import annotations

import tilelang.language as T

from ...tile import softmax
from ...tile.hopper import WARP
from ...tile.matrices import element
from .. import tile
from .query_words import hide_by_bits_or_mask, hide_by_words


@T.macro
def scores_to_probabilities(plan, w, scores, lse2):
    """Replaces S by P."""
    c = scores.scale * softmax.LOG2E if plan.slopes is None else softmax.LOG2E
    if plan.slopes is not None:
        tile.modify(w.acc_s, w.kept, scores)
    if scores.masked:
        if plan.mask_words:
            hide_by_words(plan, w, scores)
        elif plan.bits:
            hide_by_bits_or_mask(w, scores)
        else:
            tile.hide(w.acc_s, scores)
    tile.probabilities(w.acc_s, lse2, c, scores)


@T.macro
def settle(w, columns):
    """Branches on the probabilities, so that ptxas cannot move their computation behind the next wait.

    It moved all but one of 40 exponentials behind the wait for dP. No probability is negative. Looking at every fourth
    of a thread's is enough to hold all.
    """
    signs = T.alloc_var("int32", init=0)
    for n in T.unroll(columns // 16):
        for e in T.unroll(2):
            p = w.acc_s[element(w.thread % WARP, w.thread // WARP, n, 4 * e)]
            signs = signs | T.reinterpret(p, "int32")
    if signs < 0:
        T.evaluate(T.call_extern("handle", "__nanosleep", 0))


@T.macro
def gradients_of_scores(plan, w, scores, delta, ds, times_slope):
    """dS of the scaled scores, in 16 bits.

    Args:
        delta: delta of the tile's queries.
        ds: the fragment for dS.
        times_slope: writes dS if scores are modified, such as :func:`times_slope_in_place`.
    """
    tile.drop_gradients(w.acc_s, w.acc_dp, scores)
    if plan.slopes is None:
        for i, j in T.Parallel(scores.rows, scores.columns):
            ds[i, j] = w.acc_s[i, j] * (w.acc_dp[i, j] - scores.of_query(delta, i, j))
    else:
        if plan.slopes.probability_is_kept():
            tile.score_gradients(w.acc_s, w.acc_dp, delta, scores)
        for index in plan.kept:
            tile.score_gradients(w.kept[index], w.acc_dp, delta, scores)
        times_slope()


@T.macro
def times_slope_in_place(plan, w, scores, ds):
    """dS of the scaled scores, from dS of the modified ones."""
    slope = plan.slopes.program.slope
    gradient = tile.kept_product(slope, w.kept, w.acc_s)
    if slope.recomputed is not None:
        tile.times_recomputed(gradient, gradient, slope.recomputed, scores)
    T.copy(gradient, ds)
