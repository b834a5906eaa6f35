"""The conformance cases of the Triton backend: a selection, because its kernels compile or are interpreted in tests."""

from __future__ import annotations

from tileattn.testing import ConformanceCase
from tileattn.testing.shapes import PackedShape

# On a GPU, of the cases that are not "smoke", one in so many: a kernel takes some seconds to compile.
TRITON_STEP, TRITON_STEP_FLOAT32 = 8, 3  # no other kernel takes float32
FORWARD_TILES, BACKWARD_TILES = 12, 4  # of which each takes it some milliseconds


def is_for_triton(number: int, case: ConformanceCase) -> bool:
    """Whether the case of this number is run on a GPU."""
    return number % (TRITON_STEP_FLOAT32 if case.structure.dtype == "fp32" else TRITON_STEP) == 0


def is_slow_to_interpret(case: ConformanceCase, backward: bool = False) -> bool:
    """Whether it visits many tiles; where it is refused, none."""
    shape = case.shape
    if case.structure.dtype in ("fp8", "fp64") or isinstance(shape, PackedShape):
        return False
    tiles = shape.batch * shape.heads * -(-shape.seqlen_q // 64) * -(-shape.seqlen_k // 64)
    return tiles > (BACKWARD_TILES if backward else FORWARD_TILES)
