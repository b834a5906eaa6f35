"""Times of a call on all ranks at once.

Before a call all ranks meet, with idle GPUs. On a GPU the L2 cache is then overwritten some times, for a few
milliseconds: meanwhile the host comes ahead, so that its time is not measured, as in the steady state of a training
step. A call of a plan takes the host one millisecond; with four times, 32k tokens seemed 15 % slower than they are. The
call runs between two events. Of each call the slowest rank counts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from statistics import median

import torch

from tileattn.bench.parallel.ranks import Ranks
from tileattn.measure.timing import FLUSH_BYTES

FLUSHES = 24
# A round measures for so many milliseconds, but for one call at least; calls of a long time need no other before.
MEASURE_MS, LONG_MS, MOST_CALLS = 40.0, 100.0, 20
Call = Callable[[], object]


class Timer:
    """Times calls on all ranks; each rank makes the same."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.flush = torch.empty(
            FLUSH_BYTES if ranks.device.type == "cuda" else 0, dtype=torch.int8, device=ranks.device
        )

    def once(self, call: Call) -> float:
        """Milliseconds of one call, on the slowest rank."""
        return max(self.ranks.gathered(self._here(call)))

    def round(self, call: Call, estimate_ms: float) -> float:
        """The median of some calls, whose number follows from an estimate that is equal on all ranks."""
        if estimate_ms < LONG_MS:
            self._here(call)  # so that the caches and clocks are those of this call
        count = min(MOST_CALLS, max(1, math.floor(MEASURE_MS / max(estimate_ms, 1e-3))))
        mine = [self._here(call) for _ in range(count)]
        return median(max(each) for each in zip(*self.ranks.gathered(mine)))

    def _here(self, call: Call) -> float:
        """Milliseconds of one call on this rank."""
        self.ranks.barrier()
        if self.ranks.device.type != "cuda":
            start = time.perf_counter()
            call()
            return (time.perf_counter() - start) * 1e3
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(FLUSHES):
            self.flush.zero_()
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize(self.ranks.device)
        return begin.elapsed_time(end)
