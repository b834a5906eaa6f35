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

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import tilelang.language as T
import torch
from tilelang.language.eager.builder import Builder

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


@dataclass(frozen=True, eq=False)
class ScoreTile:
    """A tile of scores on the way back: what its kernel computes scores with, and where the tile is.

    Attributes:
        scale: of the scores.
        emit: turns the variant's expressions into TileLang's.
        visible: the mask.
        slopes, registers: the score modification with its derivatives, and its uniform values; or None.
        pattern: dropout's, or None.
        rows, columns: of the tile.
        keys_first: whether its rows are keys.
        b, h: its batch element and query head.
        row, q_lo: its first query, as a row of q and as a position, which follows from it if there are lengths.
        k_lo: its first key.
        masked: whether the mask, or an end of the sequences, hides some of it.
        lengths: of queries and keys, or None.
    """

    scale: Any
    emit: Any
    visible: Any
    slopes: Any
    registers: Any
    pattern: Any
    rows: int
    columns: int
    keys_first: bool
    b: Any = None
    h: Any = None
    row: Any = None
    q_lo: Any = None
    k_lo: Any = None
    masked: Any = None
    lengths: tuple[Any, Any] | None = None

    def at(self, **place: Any) -> ScoreTile:
        """The same kernel's tile at another place."""
        if "row" in place and "q_lo" not in place and self.lengths is not None:
            seqlen_q, seqlen_k = self.lengths
            place["q_lo"] = place["row"] + seqlen_k - seqlen_q
        return replace(self, **place)

    def held(self, *names: str) -> ScoreTile:
        """The same tile, some numbers of its place held in variables of the kernel, in this order."""
        found = self
        for name in names:
            found = found.at(**{name: Builder.current().bind(name, getattr(found, name))})
        return found

    def emitted(self, expr: Any, i: Any, j: Any, **raw: Any) -> Any:
        """An expression's value for the score in row i and column j."""
        position = {"q": key_in_tile(self.q_lo, j), "k": self.k_lo + i}
        if not self.keys_first:
            position = {"q": self.q_lo + i, "k": key_in_tile(self.k_lo, j)}
        uniforms = self.slopes.values(self.registers)
        value = self.emit(expr, **uniforms, **position, **raw, i=i, j=j, scale=self.scale, b=self.b, h=self.h)
        return T.cast(value, "float32")

    def seen(self, i: Any, j: Any) -> Any:
        """Whether the mask shows the score in row i and column j."""
        q, k = (j, i) if self.keys_first else (i, j)
        return self.visible.sees(self.b, self.h, self.q_lo + q, self.k_lo + k)

    def of_query(self, values: Any, i: Any, j: Any) -> Any:
        """The element for the query of row i and column j, of values that have one for each query."""
        return values[j] if self.keys_first else values[i]


def score_tile(
    plan: Any, arg: Any, emit: Any, visible: Any, shape: Sequence[int], keys_first: bool, lengths: Any = None
) -> ScoreTile:
    """A kernel's tile of scores, at no place yet, with registers for what all tiles of a head share.

    Args:
        plan: the kernel's static facts.
        arg: its parameters.
        emit, visible, keys_first, lengths: as of :class:`ScoreTile`.
        shape: rows and columns.
    """
    registers = plan.slopes.allocate() if plan.slopes is not None else None
    pattern = Pattern(arg, plan.early) if plan.call.dropout else None
    return ScoreTile(
        arg.scale, emit, visible, plan.slopes, registers, pattern, *shape, keys_first=keys_first, lengths=lengths
    )


@T.macro
def modify(acc_s, early, scores):
    """Raw scores become modified ones, in powers of two; the early derivatives are kept."""
    at = scores.held("b", "h", "q_lo", "k_lo")
    for i, j in T.Parallel(at.rows, at.columns):
        for index, expr in enumerate(at.slopes.program.early):
            early[index][i, j] = at.emitted(expr, i, j, raw=acc_s[i, j])
        acc_s[i, j] = at.emitted(at.slopes.program.score, i, j, raw=acc_s[i, j])


@T.macro
def hide(acc_s, scores):
    """s = -inf where the mask, or the end of the keys or of the queries, forbids it."""
    at = scores.held("b", "h", "q_lo", "k_lo")
    for i, j in T.Parallel(at.rows, at.columns):
        seen = at.seen(i, j)
        acc_s[i, j] = T.if_then_else(seen, acc_s[i, j], -T.infinity("float32"))


@T.macro
def probabilities(acc_s, lse2, c, scores):
    """p = exp2(c * s - lse2)."""
    for i, j in T.Parallel(scores.rows, scores.columns):
        acc_s[i, j] = T.exp2(acc_s[i, j] * c - scores.of_query(lse2, i, j))


@T.macro
def weigh(early, acc_s, scores):
    """An early derivative times p."""
    for i, j in T.Parallel(scores.rows, scores.columns):
        # NaN == 0 is false: a probability that is NaN stays.
        early[i, j] = T.if_then_else(acc_s[i, j] == 0.0, 0.0, acc_s[i, j] * early[i, j])


@T.macro
def score_gradients(weights, acc_dp, delta, scores):
    """weights * (dp - delta), in place."""
    for i, j in T.Parallel(scores.rows, scores.columns):
        weights[i, j] = weights[i, j] * (acc_dp[i, j] - scores.of_query(delta, i, j))


@T.macro
def times_late(result, gradient, late, scores):
    """result = gradient times a late derivative, 0 where the gradient is."""
    at = scores.held("b", "h", "q_lo", "k_lo")
    for i, j in T.Parallel(at.rows, at.columns):
        factor = at.emitted(late, i, j)
        result[i, j] = T.if_then_else(gradient[i, j] == 0.0, 0.0, gradient[i, j] * factor)


class Pattern:
    """Dropout of one kernel: the words of a head and a tile, and whether the pattern is kept as P's sign."""

    def __init__(self, arg, early) -> None:
        self.words, self.weight, self.is_marked = dropout.allocate(), arg.weight, not early


@T.macro
def mark_dropped(acc_s, scores, own_warps):
    """Behind the probabilities, in a call with dropout or without. ``own_warps``: in a Hopper schedule."""
    at, pattern = scores.held("row", "k_lo"), scores.pattern
    if pattern is not None:
        dropout.enter_tile(pattern.words, at.row, at.k_lo)
        if own_warps:
            dropout.share_in_warp(pattern.words)
        if pattern.is_marked:
            dropout.mark(acc_s, pattern.words, at.rows, at.columns, at.keys_first)


@T.macro
def copy_kept(acc_s, p, scores):
    """What dV is made of, but for the weight."""
    pattern = scores.pattern
    if pattern is None:
        T.copy(acc_s, p)
    else:
        if pattern.is_marked:
            dropout.copy_kept(p, acc_s, scores.rows, scores.columns)
        else:
            dropout.drop(p, acc_s, pattern.words, scores.rows, scores.columns, scores.keys_first)


@T.macro
def drop_gradients(acc_s, acc_dp, scores):
    """dP of the dropped probabilities becomes that of all."""
    pattern = scores.pattern
    if pattern is not None:
        if pattern.is_marked:
            dropout.unmark(acc_s, acc_dp, pattern.weight, scores.rows, scores.columns)
        else:
            dropout.drop(acc_dp, acc_dp, pattern.words, scores.rows, scores.columns, scores.keys_first, pattern.weight)
