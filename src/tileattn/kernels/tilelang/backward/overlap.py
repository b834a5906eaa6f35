"""Keeps exponentials under the product that they are meant to run under."""

from __future__ import annotations

import tilelang.language as T

from ..hopper_plan import WARP, WARPGROUP


@T.macro
def arrive_after_probabilities(barriers, stage, p, columns, signs, thread):
    """One thread of each warpgroup arrives at a barrier, when the warpgroup's first warp has all its probabilities.

    It does so on a condition that needs them although it always holds: none is negative. ptxas moves the wait for a
    product past arithmetic, here that for dP to behind the first few exponentials, but not past an arrival at a
    barrier; see `release_after_maximum` in ../hopper_consumer.py. So all exponentials run under dP.

    Args:
        barriers, stage: the barrier. It may be one that nobody waits for.
        p: fragment of probabilities, 16 rows in each warp, laid out by :func:`layouts.accumulator_layout`.
        columns: of `p`.
        signs: an integer in a register.
        thread: the thread's number.
    """
    lane, warp = thread % WARP, thread // WARP
    signs[0] = 0
    for n in T.unroll(columns // 8):
        for e in T.unroll(4):
            element = p[warp * 16 + lane // 4 + e // 2 * 8, n * 8 + lane % 4 * 2 + e % 2]
            signs[0] = signs[0] | T.reinterpret(element, "int32")
    # The sign bit rather than a comparison with 0: a NaN must not keep a stage for ever.
    if (thread % WARPGROUP == 0) & (signs[0] >= 0):
        T.barrier_arrive(barriers[stage])
