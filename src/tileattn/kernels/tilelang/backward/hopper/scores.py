"""What the three kernels for Hopper do with a tile of scores, in registers of the consumer warpgroups.

P = exp2(S)             of the modified and masked scores, in place
dS = P * (dP - delta)   times the modification's slope, in 16 bits
"""

from __future__ import annotations

import tilelang.language as T

from ...tile import softmax
from .. import tile


@T.macro
def scores_to_probabilities(plan, w, scores, lse2):
    """P, in the place of S."""
    c = scores.scale * softmax.LOG2E if plan.slopes is None else 1.0
    if plan.slopes is not None:
        tile.modify(w.acc_s, w.early, scores)
    if scores.masked:
        tile.hide(w.acc_s, scores)
    tile.probabilities(w.acc_s, lse2, c, scores)


@T.macro
def gradients_of_scores(plan, w, scores, delta, ds, times_slope):
    """dS, of the scaled scores, in 16 bits.

    Args:
        delta: of the tile's queries.
        ds: the fragment that takes dS.
        times_slope: brings dS there, where scores are modified: see :func:`times_slope_in_place`.
    """
    tile.drop_gradients(w.acc_s, w.acc_dp, scores)
    if plan.slopes is None:
        for i, j in T.Parallel(scores.rows, scores.columns):
            ds[i, j] = w.acc_s[i, j] * (w.acc_dp[i, j] - scores.of_query(delta, i, j))
    else:
        if plan.slopes.probability_is_kept():
            tile.score_gradients(w.acc_s, w.acc_dp, delta, scores)
        for index in plan.early:
            tile.score_gradients(w.early[index], w.acc_dp, delta, scores)
        times_slope()


@T.macro
def times_slope_in_place(plan, w, scores, ds):
    """dS of the scaled scores, from that of the modified ones."""
    slope = plan.slopes.program.slope
    gradient = tile.kept(slope, w.early, w.acc_s)
    if slope.late is not None:
        tile.times_late(gradient, gradient, slope.late, scores)
    T.copy(gradient, ds)
