"""The static facts of a backward kernel that all schedules share."""

from __future__ import annotations

from typing import Any

from ....call.facts import AttentionCall
from ....variant.program import Program
from . import tile
from .operand_gradients import Path


class BackwardPlan:
    """The static facts of one kernel, from which its macros choose what they emit.

    Attributes:
        split: whether several blocks share the query heads of a group.
        listed: whether tiles are taken from lists.
        slopes: the score modification and its derivatives, or None.
        kept: indices of the derivatives that are kept beside the scores. (A tuple: a loop over one is unrolled while
            the kernel is traced, one over a range is a loop of its own.)
        mask_words: whether masked tiles hide scores by a bit for each (hopper/query_words.py).
        bits: whether mixed tiles of lists have bits that were made before.
    """

    split = mask_words = listed = bits = False

    def __init__(self, call: AttentionCall, config: Any, traced: Program, paths: tuple[Path, ...] = ()) -> None:
        self.call, self.config, self.traced = call, config, traced
        self.dtype = str(call.dtype).removeprefix("torch.")
        self.slopes = None
        if traced.score is not None:
            self.slopes = tile.Slopes(call, traced, tuple(path.load for path in paths))
        self.kept = tuple(range(len(self.slopes.program.kept))) if self.slopes else ()
