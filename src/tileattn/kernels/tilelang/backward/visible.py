"""Which queries see a tile of keys: what the forward pass asks of a mask, the other way round."""

from __future__ import annotations

import tilelang.language as T

from ....variant.expression import nodes
from ....variant.masks import FIRST_POSITION
from ..tile.mask import Visibility


class Viewers(Visibility):
    """The mask of one kernel, asked by a tile of keys. Answers are *rows* of queries, not positions.

    Attributes:
        rows_end: whether what lies behind the last query need not be hidden: its probabilities are 0 anyhow, or nobody
            looks at what comes of it. A comparison less, and a register, in each score of a masked tile.
    """

    def __init__(self, program, emit, seqlen_q, seqlen_k, rows_end=False) -> None:
        super().__init__(program, emit, seqlen_k)
        self.seqlen_q, self.rows_end = seqlen_q, rows_end
        bounds = (*program.q_range, *program.full_q_range)
        self.differ_by_head = any(
            node.op == "symbol" and node.args[0] == "h" for bound in bounds for node in nodes(bound)
        )

    def rows(self, b, h, k_lo, k_hi):
        """Rows [lo, hi), within 0 .. seqlen_q, that see any of the keys k_lo..k_hi."""
        return self._rows(self.program.q_range, b, h, k_lo, k_hi)

    def full_rows(self, b, h, k_lo, k_hi):
        """Rows [lo, hi) that see all of these keys: none if some are beyond the last key."""
        lo, hi = self._rows(self.program.full_q_range, b, h, k_lo, k_hi)
        return lo, T.if_then_else(k_hi < self.seqlen_k, hi, 0)

    def _rows(self, bounds, b, h, k_lo, k_hi):
        # Keys beyond the last one are seen by nobody; a mask need not answer for them.
        last = T.min(k_hi, self.seqlen_k - 1)
        position = {"b": b, "h": h, "k_lo": k_lo, "k_hi": last, "seqlen_k": self.seqlen_k}
        first_position = self.seqlen_k - self.seqlen_q
        lo, hi = (self.emit(bound, **position) - first_position for bound in bounds)
        return 0 if bounds[0] is FIRST_POSITION else T.max(lo, 0), T.min(hi, self.seqlen_q)

    def sees(self, b, h, q, k):
        """May position q, which may be beyond the last query, see position k, which may be beyond the last key?"""
        allowed = self.allows(b, h, q, k)
        return allowed if self.rows_end else allowed & (q < self.seqlen_k)
