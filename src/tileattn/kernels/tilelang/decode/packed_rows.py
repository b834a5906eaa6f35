"""Masks, score modifications and sinks on packed query rows, which differ in head and in query.

Row r of a sequence's queries for one kv head is query ``r // group`` of head ``kv_head * group + r % group``. A tile's
rows keep their heads and positions in fragments (block_M,). What a score modification has once for a head
(simplify.py) is kept in fragments as well, if it depends on the head.
"""

from __future__ import annotations

from typing import Any

import tilelang.language as T

from ....variant.expression import Expr, has_symbol
from ..tile.expressions import key_in_tile
from ..tile.mask import Score
from .walk import query_of


class RowScore(Score):
    """The score modification of a kernel on packed rows.

    Attributes:
        by_row: for each uniform value, whether rows have their own.
        unit_inside: whether the factor that makes scores powers of two differs by row. Each score is then multiplied by
            it, and the softmax has the factor 1.
    """

    def __init__(self, call: Any, program: Any) -> None:
        super().__init__(call, program)
        self.by_row = [has_symbol(uniform, "h") for uniform in self.program.uniforms]
        unit = self.program.log2_unit
        self.unit_inside = isinstance(unit, Expr) and self.by_row[int(unit.args[0].removeprefix("uniform"))]

    def allocate_rows(self, block_M: int) -> dict[int, Any]:
        """Fragments (block_M,) for the values that rows have of their own."""
        kinds = enumerate(map(self.kind, self.program.uniforms))
        return {index: T.alloc_fragment([block_M], kind) for index, kind in kinds if self.by_row[index]}

    def values_of_row(self, registers: Any, fragments: dict[int, Any], i: Any) -> dict[str, Any]:
        """The uniform values' symbols, in row i."""
        return self.values(registers) | {f"uniform{index}": fragment[i] for index, fragment in fragments.items()}

    def softmax_unit(self, registers: Any) -> Any:
        """The factor that makes the scores of :func:`apply_row_score` powers of two."""
        return T.float32(1) if self.unit_inside else self.log2_unit(registers)


@T.macro
def locate_rows(arg, job, row_head, row_pos):
    """Each row's head and position; rows behind the last one that exists repeat it."""
    last = T.alloc_var("int32", init=T.max(job.rows, 1) - 1)
    for i in T.Parallel(row_head.shape[0]):
        row_pos[i] = query_of(job, T.min(i, last))
    for i in T.Parallel(row_head.shape[0]):
        row_head[i] = job.kv_head * arg.group + job.rest + T.min(i, last) - (row_pos[i] - job.query0) * arg.group
    for i in T.Parallel(row_head.shape[0]):
        row_pos[i] += job.q_pos


@T.macro
def keep_row_uniforms(score, registers, fragments, emit, scale, b, row_head):
    """Computes what all scores of a head share: in registers what all heads share, in fragments the rest."""
    for index, uniform in enumerate(score.program.uniforms):
        if index in fragments:
            for i in T.Parallel(row_head.shape[0]):
                fragments[index][i] = T.cast(emit.exact(uniform, scale=scale, b=b, h=row_head[i]), score.kind(uniform))
        else:
            registers[score.kind(uniform)][index] = T.cast(emit.exact(uniform, scale=scale, b=b), score.kind(uniform))


@T.macro
def apply_row_score(acc_s, score, registers, fragments, emit, scale, b, row_head, row_pos, k_lo):
    """s[i, j] = score_mod(scale * s[i, j]), in the unit of :meth:`RowScore.softmax_unit`."""
    block_M, block_N = acc_s.shape
    for i, j in T.Parallel(block_M, block_N):
        acc_s[i, j] = modified_score(
            score,
            score.values_of_row(registers, fragments, i),
            emit,
            raw=acc_s[i, j],
            scale=scale,
            b=b,
            h=row_head[i],
            q=row_pos[i],
            k=key_in_tile(k_lo, j),
            i=i,
            j=j,
        )


def modified_score(score, values, emit, **place):
    """The modified score at a place: of a row and a key, which are element (i, j) of a tile."""
    result = T.cast(emit(score.program.score, **values, **place), "float32")
    if score.unit_inside:
        result = result * values[score.program.log2_unit.args[0]]
    return result


@T.macro
def apply_row_mask(acc_s, visible, b, row_head, row_pos, k_lo):
    """s[i, j] = -inf where the mask forbids it, or there is no key."""
    block_M, block_N = acc_s.shape
    for i, j in T.Parallel(block_M, block_N):
        acc_s[i, j] = T.if_then_else(
            visible.allows(b, row_head[i], row_pos[i], k_lo + j), acc_s[i, j], -T.infinity("float32")
        )
