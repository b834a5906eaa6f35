"""Expressions of a mask in which the distance `q - k` is a value of its own.

nvcc computes an expression once for all scores in which it is the same, if it can see that. It does not reorder sums.
So the caller gives the distance of a score as a register of the thread and a constant: scores on one diagonal then have
the same (forward/hopper/mixed_tiles.py).
"""

from __future__ import annotations

from typing import Any

from ....variant.expression import Expr
from .expressions import Emitter

DISTANCE = "q - k"  # not a name that an expression has


class DistanceEmitter(Emitter):
    """Emits `q - k` as the value of `DISTANCE`."""

    def _emit(self, expr: Any, values: dict[str, Any], rounds: bool = True) -> Any:
        if isinstance(expr, Expr) and str(expr) == "(sub q k)":
            return values[DISTANCE]
        return super()._emit(expr, values, rounds)


def allowed_at(visible: Any, emit: Emitter, b: Any, h: Any, q: Any, k: Any, distance: Any) -> Any:
    """As :meth:`Visibility.allows`, of an emitter with the distance."""
    allowed = emit(visible.allowed, b=b, h=h, q=q, k=k, **{DISTANCE: distance})
    return allowed if visible.bounded else (k < visible.seqlen_k) & allowed
