"""The Triton kernel of the read ceiling. It is a file of its own because it needs Triton at import."""

# Triton reads the annotations, so there is no `from __future__ import annotations`.

import triton
import triton.language as tl


@triton.jit
def read(source, sums, count, BLOCK: tl.constexpr):
    """Adds up `count` int32 (a multiple of BLOCK); each program stores the sum of its blocks."""
    total = tl.zeros([BLOCK], tl.int32)
    offsets = tl.arange(0, BLOCK)
    for start in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        total += tl.load(source + start + offsets)
    tl.store(sums + tl.program_id(0), tl.sum(total, 0))
