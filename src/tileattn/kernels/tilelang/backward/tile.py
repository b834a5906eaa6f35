"""What happens to a tile of scores on the way back, on fragments: shared by the kernels for dk, dv and for dq alone.

    P = exp2(c * S - lse2)             lse2 is +inf for a row that sees no key, and in padding: P = 0 there
    dS = P * (dP - delta)              of the modified scores
    dS' = dS * slope                   of the scaled ones

With dropout Z, which is 0 or the weight of what is kept, dV takes Z * P, and dP becomes Z * dP. P as it was is needed
for dS; so the pattern is computed once, and kept as P's sign until dP has come. Where derivatives are kept beside P, it
has no register to itself so long: there the pattern is computed again.

A tile has keys in its rows and queries in its columns (``keys_first``), or the other way round. ``lse2`` and ``delta``
have one element for each query. What a mask hides has P = 0, and then a gradient of exactly 0, whatever the slope of
its modification is: it may be infinite or NaN where nobody looks.
"""

from __future__ import annotations

import tilelang.language as T
import torch

from ....variant.expression import Expr, dtype_of, nodes
from ..tile import dropout
from ..tile.expressions import Emitter, Key, key_in_tile
from ..tile.mask import Score, width_of_ints
from .slopes import slope_program


class Slopes(Score):
    """The score modification of one kernel and its derivatives, with their uniform values kept in registers."""

    def __init__(self, call, traced, loads) -> None:
        # As in the forward pass, whose probabilities are to be met.
        hardware_tanh = call.dtype == torch.bfloat16 and call.arch.startswith("sm_")
        self.program = slope_program(traced.score, loads, hardware_tanh)
        self.ints = width_of_ints(traced)

    def is_late(self, load: str) -> bool:
        """Whether a derivative that is computed late reads the load of this text."""
        factors = (self.program.slope, *self.program.loads)
        return any(str(node) == load for factor in factors for node in nodes(factor.late))

    def probability_is_kept(self) -> bool:
        """Whether some derivative has no early factor, so that P itself is needed."""
        return any(factor.early is None for factor in (self.program.slope, *self.program.loads))


def kept(factor, early, acc_s):
    """The fragment that holds P, or what comes of it, times a derivative's early factor."""
    return acc_s if factor.early is None else early[factor.early]


def position_in_tile(q_lo, k_lo, i, j, keys_first):
    """Positions of the score in row i and column j of a tile, and where in the tile it is."""
    if keys_first:
        return {"q": key_in_tile(q_lo, j), "k": k_lo + i, "i": i, "j": j}
    return {"q": q_lo + i, "k": key_in_tile(k_lo, j), "i": i, "j": j}


class TileEmitter(Emitter):
    """Emits expressions of a tile's positions, whichever of q and k runs along its columns.

    Of integers that become floats the base class takes those apart that grow steadily with k. Where q runs along the
    columns, the two change their names.
    """

    def _float(self, expr, values):
        if dtype_of(expr) == "int" and isinstance(values.get("q"), Key):
            return super()._float(_swapped(expr), {**values, "q": values["k"], "k": values["q"]})
        return super()._float(expr, values)


def _swapped(expr):
    """The expression with the names of q and k exchanged."""
    if not isinstance(expr, Expr):
        return expr
    if expr.op == "symbol":
        return Expr("symbol", ({"q": "k", "k": "q"}.get(expr.args[0], expr.args[0]),), expr.dtype)
    return Expr(expr.op, tuple(map(_swapped, expr.args)), expr.dtype)


def _of_query(values, i, j, keys_first):
    return values[j] if keys_first else values[i]


@T.macro
def modify(acc_s, early, slopes, registers, emit, scale, b, h, q_lo, k_lo, rows, columns, keys_first):
    """Raw scores become modified ones, in powers of two; the early derivatives are kept."""
    for i, j in T.Parallel(rows, columns):
        for index, expr in enumerate(slopes.program.early):
            early[index][i, j] = T.cast(
                emit(
                    expr,
                    **slopes.values(registers),
                    **position_in_tile(q_lo, k_lo, i, j, keys_first),
                    raw=acc_s[i, j],
                    scale=scale,
                    b=b,
                    h=h,
                ),
                "float32",
            )
        acc_s[i, j] = T.cast(
            emit(
                slopes.program.score,
                **slopes.values(registers),
                **position_in_tile(q_lo, k_lo, i, j, keys_first),
                raw=acc_s[i, j],
                scale=scale,
                b=b,
                h=h,
            ),
            "float32",
        )


@T.macro
def hide(acc_s, visible, b, h, q_lo, k_lo, rows, columns, keys_first):
    """s = -inf where the mask, or the end of the keys or of the queries, forbids it."""
    for i, j in T.Parallel(rows, columns):
        if keys_first:
            seen = visible.sees(b, h, q_lo + j, k_lo + i)
            acc_s[i, j] = T.if_then_else(seen, acc_s[i, j], -T.infinity("float32"))
        else:
            seen = visible.sees(b, h, q_lo + i, k_lo + j)
            acc_s[i, j] = T.if_then_else(seen, acc_s[i, j], -T.infinity("float32"))


@T.macro
def probabilities(acc_s, lse2, c, rows, columns, keys_first):
    """p = exp2(c * s - lse2)."""
    for i, j in T.Parallel(rows, columns):
        acc_s[i, j] = T.exp2(acc_s[i, j] * c - _of_query(lse2, i, j, keys_first))


@T.macro
def weigh(early, acc_s, rows, columns):
    """An early derivative times p."""
    for i, j in T.Parallel(rows, columns):
        # NaN == 0 is false: a probability that is NaN stays.
        early[i, j] = T.if_then_else(acc_s[i, j] == 0.0, 0.0, acc_s[i, j] * early[i, j])


@T.macro
def score_gradients(weights, acc_dp, delta, rows, columns, keys_first):
    """weights * (dp - delta), in place."""
    for i, j in T.Parallel(rows, columns):
        weights[i, j] = weights[i, j] * (acc_dp[i, j] - _of_query(delta, i, j, keys_first))


@T.macro
def times_late(result, gradient, late, slopes, registers, emit, scale, b, h, q_lo, k_lo, rows, columns, keys_first):
    """result = gradient times a late derivative, 0 where the gradient is."""
    for i, j in T.Parallel(rows, columns):
        factor = T.cast(
            emit(
                late,
                **slopes.values(registers),
                **position_in_tile(q_lo, k_lo, i, j, keys_first),
                scale=scale,
                b=b,
                h=h,
            ),
            "float32",
        )
        result[i, j] = T.if_then_else(gradient[i, j] == 0.0, 0.0, gradient[i, j] * factor)


class Pattern:
    """Dropout of one kernel: the words of a head and a tile, and whether the pattern is kept as P's sign."""

    def __init__(self, arg, early) -> None:
        self.words, self.weight, self.is_marked = dropout.allocate(), arg.weight, not early


@T.macro
def mark_dropped(acc_s, pattern, row, k_lo, rows, columns, keys_first, own_warps):
    """Behind the probabilities, in a call with dropout or without. ``own_warps``: in a Hopper schedule."""
    if pattern is not None:
        dropout.enter_tile(pattern.words, row, k_lo)
        if own_warps:
            dropout.share_in_warp(pattern.words)
        if pattern.is_marked:
            dropout.mark(acc_s, pattern.words, rows, columns, keys_first)


@T.macro
def copy_kept(acc_s, p, pattern, rows, columns, keys_first):
    """What dV is made of, but for the weight."""
    if pattern is None:
        T.copy(acc_s, p)
    else:
        if pattern.is_marked:
            dropout.copy_kept(p, acc_s, rows, columns)
        else:
            dropout.drop(p, acc_s, pattern.words, rows, columns, keys_first)


@T.macro
def drop_gradients(acc_s, acc_dp, pattern, rows, columns, keys_first):
    """dP of the dropped probabilities becomes that of all."""
    if pattern is not None:
        if pattern.is_marked:
            dropout.unmark(acc_s, acc_dp, pattern.weight, rows, columns)
        else:
            dropout.drop(acc_dp, acc_dp, pattern.words, rows, columns, keys_first, pattern.weight)
