"""Operations of the backward pass on a tile of scores, on fragments. All backward kernels share them.

    P = exp2(c * S - lse2)             lse2 is +inf for a row that sees no key, and in padding: P = 0 there
    dS = P * (dP - delta)              gradient of the modified scores
    dS' = dS * slope                   gradient of the scaled scores

Dropout multiplies by Z, which is 0 for a dropped score and 1 / (1 - p) for a kept one: dV is summed from Z * P, and dP
becomes Z * dP. dS needs P without Z. Therefore the pattern is computed once and stored in P's sign until dP is there.
Where derivatives are kept beside P, P does not stay in registers that long, and the pattern is computed again.

A tile has keys in its rows and queries in its columns (``keys_first``), or the other way round. ``lse2`` and ``delta``
have one element for each query. A hidden score has P = 0 and a gradient of exactly 0. The slope of its modification
does not matter: it may be infinite or NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import tilelang.language as T
import torch
from tilelang.language.eager.builder import Builder

from ....variant.expression import nodes
from ..tile import dropout
from ..tile.expressions import Emitter, key_in_tile
from ..tile.mask import Score, is_causal, width_of_ints
from .slopes import slope_program


class Slopes(Score):
    """The score modification of one kernel and its derivatives, with their uniform values kept in registers."""

    def __init__(self, call, traced, loads) -> None:
        # As in the forward pass: the probabilities must be the same.
        hardware_tanh = call.dtype == torch.bfloat16 and call.arch.startswith("sm_")
        self.program = slope_program(traced.score, loads, hardware_tanh, is_causal(traced.allows))
        self.ints = width_of_ints(traced)

    def is_recomputed(self, load: str) -> bool:
        """Whether a derivative that is recomputed reads the load of this text."""
        factors = (self.program.slope, *self.program.loads)
        return any(str(node) == load for factor in factors for node in nodes(factor.recomputed))

    def probability_is_kept(self) -> bool:
        """Whether some derivative has no kept factor, so that P itself is needed."""
        return any(factor.kept is None for factor in (self.program.slope, *self.program.loads))


def kept_product(factor, kept, acc_s):
    """The fragment with P, or its dS, times a derivative's kept factor."""
    return acc_s if factor.kept is None else kept[factor.kept]


class TileEmitter(Emitter):
    """Emits expressions of a tile's positions, whichever of q and k runs along its columns.

    The base class takes only k apart, which runs along the columns in the forward pass.
    """

    columns = ("k", "q")


@dataclass(frozen=True, eq=False)
class ScoreTile:
    """A tile of scores in the backward pass: its kernel's tools for computing scores, and the tile's place.

    Attributes:
        scale: the scale of the scores.
        emit: turns the variant's expressions into TileLang's.
        visible: the mask.
        slopes, registers: the score modification with its derivatives, and its uniform values; or None.
        pattern: the dropout pattern, or None.
        rows, columns: the tile's shape.
        keys_first: whether the tile's rows are keys.
        b, h: batch element and query head.
        row, q_lo: the first query, as a row of q and as a position; :meth:`at` computes q_lo if `lengths` is set.
        k_lo: the first key.
        masked: whether the mask, or an end of the sequences, hides some of the tile.
        lengths: seqlen_q and seqlen_k, or None.
        has_bits: of a masked tile, whether it has bits that were made before; or None.
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
    has_bits: Any = None

    def at(self, **place: Any) -> ScoreTile:
        """The tile of the same kernel at another place."""
        if "row" in place and "q_lo" not in place and self.lengths is not None:
            seqlen_q, seqlen_k = self.lengths
            place["q_lo"] = place["row"] + seqlen_k - seqlen_q
        return replace(self, **place)

    def held(self, *names: str) -> ScoreTile:
        """The same tile, with these numbers of its place stored in variables of the kernel, in this order."""
        tile = self
        for name in names:
            tile = tile.at(**{name: Builder.current().bind(name, getattr(tile, name))})
        return tile

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
        """The element of `values`, which has one for each query, for the query of row i and column j."""
        return values[j] if self.keys_first else values[i]


def score_tile(
    plan: Any, arg: Any, emit: Any, visible: Any, shape: Sequence[int], keys_first: bool, lengths: Any = None
) -> ScoreTile:
    """A kernel's tile of scores, without a place yet, with registers for what all tiles of a head share.

    Args:
        plan: the kernel's static facts.
        arg: the kernel's parameters.
        emit, visible, keys_first, lengths: see :class:`ScoreTile`.
        shape: rows and columns.
    """
    registers = plan.slopes.allocate() if plan.slopes is not None else None
    pattern = Pattern(arg, plan.kept) if plan.call.dropout else None
    return ScoreTile(
        arg.scale, emit, visible, plan.slopes, registers, pattern, *shape, keys_first=keys_first, lengths=lengths
    )


@T.macro
def modify(acc_s, kept, scores):
    """Replaces raw scores by modified ones; keeps the derivatives that depend on raw scores."""
    at = scores.held("b", "h", "q_lo", "k_lo")
    for i, j in T.Parallel(at.rows, at.columns):
        for index, expr in enumerate(at.slopes.program.kept):
            kept[index][i, j] = at.emitted(expr, i, j, raw=acc_s[i, j])
        acc_s[i, j] = at.emitted(at.slopes.program.score, i, j, raw=acc_s[i, j])


@T.macro
def hide(acc_s, scores):
    """s = -inf where the mask hides the score, or a sequence has ended."""
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
def weigh(kept, acc_s, scores):
    """kept = p * kept, for a kept derivative; 0 where p is 0."""
    for i, j in T.Parallel(scores.rows, scores.columns):
        # NaN == 0 is false, so a probability that is NaN stays NaN.
        kept[i, j] = T.if_then_else(acc_s[i, j] == 0.0, 0.0, acc_s[i, j] * kept[i, j])


@T.macro
def score_gradients(weights, acc_dp, delta, scores):
    """weights * (dp - delta), in place."""
    for i, j in T.Parallel(scores.rows, scores.columns):
        weights[i, j] = weights[i, j] * (acc_dp[i, j] - scores.of_query(delta, i, j))


@T.macro
def times_recomputed(result, gradient, recomputed, scores):
    """result = gradient * recomputed, for a recomputed derivative; 0 where the gradient is 0."""
    at = scores.held("b", "h", "q_lo", "k_lo")
    for i, j in T.Parallel(at.rows, at.columns):
        factor = at.emitted(recomputed, i, j)
        result[i, j] = T.if_then_else(gradient[i, j] == 0.0, 0.0, gradient[i, j] * factor)


class Pattern:
    """Dropout of one kernel: the words of a head and a tile, and whether P's sign stores the pattern."""

    def __init__(self, arg, kept) -> None:
        self.words, self.arg, self.weight, self.is_marked = dropout.allocate(), arg, arg.weight, not kept


@T.macro
def mark_dropped(acc_s, scores, own_warps):
    """Marks the dropped probabilities, if the call has dropout. ``own_warps``: in a Hopper schedule."""
    at, pattern = scores.held("row", "k_lo"), scores.pattern
    if pattern is not None:
        dropout.enter_tile(pattern.words, pattern.arg, at.row, at.k_lo)
        if own_warps:
            dropout.share_in_warp(pattern.words)
        if pattern.is_marked:
            dropout.mark(acc_s, pattern.words, at.rows, at.columns, at.keys_first)


@T.macro
def copy_kept(acc_s, p, scores):
    """p = the kept probabilities, 0 for dropped ones: dV is summed from them and gets its weight at the end."""
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
    """dP = Z * dP; restores the sign of P."""
    pattern = scores.pattern
    if pattern is not None:
        if pattern.is_marked:
            dropout.unmark(acc_s, acc_dp, pattern.weight, scores.rows, scores.columns)
        else:
            dropout.drop(acc_dp, acc_dp, pattern.words, scores.rows, scores.columns, scores.keys_first, pattern.weight)
