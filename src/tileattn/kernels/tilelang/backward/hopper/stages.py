"""Stages of buffers on Hopper: which stage a warp uses next, and the parity that it waits for.

A stage's n-th use (n = 0, 1, ...) waits for ``ready`` with parity ``n % 2`` and for ``free`` with the other one, which
a fresh barrier lets pass; see forward/hopper/kernel.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tilelang.language as T
from tilelang.language.eager.builder import Builder

from ...tile.hopper import WARPGROUP


@dataclass(frozen=True, eq=False)
class Ring:
    """A warp's next stage of several, and the parity that it waits for, in variables of the kernel.

    Attributes:
        stages, parities: for each of the two numbers, a buffer and the index of the number in it.
        count: the number of stages.
        last: the name of a variable for whether this is the last stage, or None for no variable.
        before: a buffer and an index in it for the previous stage, or None.
    """

    stages: tuple[Any, int]
    parities: tuple[Any, int]
    count: int
    last: str | None = None
    before: tuple[Any, int] | None = None

    @property
    def stage(self) -> Any:
        return self.stages[0][self.stages[1]]

    @property
    def parity(self) -> Any:
        return self.parities[0][self.parities[1]]

    def advance(self) -> None:
        """Moves to the next stage. The parity flips after the last one."""
        stage = self.stage
        if self.before is not None:
            _store(self.before, stage)
            stage = self.before[0][self.before[1]]
        last = stage == self.count - 1
        if self.last is not None:
            last = Builder.current().bind(self.last, last)
        _store(self.parities, T.if_then_else(last, self.parity ^ 1, self.parity))
        _store(self.stages, T.if_then_else(last, 0, stage + 1))


class OneStage(Ring):
    """The ring of a single stage."""

    def advance(self) -> None:
        _store(self.parities, self.parity ^ 1)


class TwoStages(Ring):
    """The ring of two stages, without a comparison."""

    def advance(self) -> None:
        _store(self.parities, self.parity ^ self.stage)
        _store(self.stages, self.stage ^ 1)


def _store(place: tuple[Any, int], value: Any) -> None:
    buffer, index = place
    T.buffer_store(buffer, value, [index])


def loading_ring(count: int, kind: type[Ring] = Ring) -> Ring:
    """The ring of a loading warp, which waits for ``free``, at the first stage."""
    bind = Builder.current().bind
    stage = bind("stage", T.alloc_var("int32", init=0))
    parity = bind("parity", T.alloc_var("int32", init=1))  # a fresh barrier lets this parity pass
    return kind((stage, 0), (parity, 0), count)


@T.macro
def release(w, barriers, stage):
    """Signals that the warpgroup has read a stage: one of its threads arrives."""
    if w.thread % WARPGROUP == 0:
        T.barrier_arrive(barriers[stage])
