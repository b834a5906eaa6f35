"""Products of tiles on Hopper's tensor cores: started, and awaited."""

from __future__ import annotations

import math
from typing import Any

import tilelang.language as T

from ...tile.softmax import ROWS
from .config import CONSUMERS


@T.macro
def multiply_transposed(ready, ring, first, second, result):
    """Starts result = first second^T, once the ring's stage is ready."""
    T.barrier_wait(ready[ring.stage], ring.parity)
    T.wgmma_gemm(first, second, result, transpose_B=True, clear_accum=True, policy=ROWS)


@T.macro
def await_product(fragment, in_flight):
    """Waits until at most `in_flight` products are in flight. The fragment then holds its result."""
    T.wait_wgmma(in_flight)
    T.warpgroup_fence_operand(fragment, num_regs=registers(fragment))


def registers(fragment: Any) -> int:
    """The number of registers per thread that hold a product."""
    return math.prod(int(size) for size in fragment.shape) // CONSUMERS
