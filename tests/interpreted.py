"""Which conformance cases the Triton backend runs: its kernels are compiled, or interpreted, while a test waits."""

from __future__ import annotations

from tileattn.testing import ConformanceCase
from tileattn.testing.shapes import PackedShape

TRITON_STEP = 8  # on a GPU, of the cases that are not "smoke", one in so many: a kernel takes some seconds to compile
FORWARD_TILES, BACKWARD_TILES = 12, 4  # of which each takes it some milliseconds


def is_slow_to_interpret(case: ConformanceCase, backward: bool = False) -> bool:
    """Whether it visits many tiles; where it is refused, none."""
    shape = case.shape
    if case.structure.dtype in ("fp8", "fp64") or isinstance(shape, PackedShape):
        return False
    tiles = shape.batch * shape.heads * -(-shape.seqlen_q // 64) * -(-shape.seqlen_k // 64)
    return tiles > (BACKWARD_TILES if backward else FORWARD_TILES)
