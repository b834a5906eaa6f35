"""The candidate tile sizes of the ladder's kernels; the first candidate is the default.

The order has three reasons. A multiprocessor has 65536 registers: two blocks of 128 threads fit with 255 registers per
thread, three with 168, four with 128. One ldmatrix of 16 x 16 elements takes 4 cycles of shared memory and feeds two
matrix products for each 16 rows of a warp: a warp with 16 rows waits for shared memory, a warp with 32 rows for the
matrix units. Blocks on the same multiprocessor hide each other's softmax and barriers.

`tileattn ladder --tiles` measures all candidates of a head dim in one call. At head dims 64, 128 and 512 the order is
the measured one on an H200 (8192, 4096 and 8192 tokens, full).
"""

from __future__ import annotations

from .rungs import RungOptions, Tiles

# (block_M, block_N, warps, blocks per multiprocessor), by rung, then head dim and accumulation ("" for both). tiled_d
# has a fifth number: the columns of a slice of K. There block_M * head_dim = 32 * 128 * warps.
_CANDIDATES: dict[str, dict[tuple[int, str], tuple[tuple[int, ...], ...]]] = {
    "split_kv": {
        (32, ""): ((32, 64, 4, 4), (32, 128, 4, 3)),
        (64, ""): ((32, 128, 4, 2), (32, 64, 4, 3), (64, 64, 4, 2)),
        (96, ""): ((32, 64, 4, 2),),
        (128, ""): ((32, 64, 4, 2),),
    },
    "split_q": {
        (32, ""): ((128, 64, 4, 2), (64, 64, 4, 4)),
        (64, ""): ((128, 64, 4, 2), (64, 64, 4, 3), (128, 64, 8, 1)),
        (96, ""): ((128, 32, 4, 2), (64, 64, 4, 2), (128, 64, 8, 1)),
        (128, ""): ((128, 32, 4, 2), (64, 64, 4, 2), (128, 64, 8, 1)),
    },
    "shared_kv": {
        (32, ""): ((128, 64, 4, 2), (128, 64, 4, 3), (64, 64, 4, 4), (128, 128, 4, 2)),
        (64, "fp32"): ((128, 128, 4, 2), (128, 64, 4, 2), (128, 32, 4, 3), (64, 64, 4, 3), (64, 64, 4, 4)),
        (64, "fp16"): ((128, 128, 4, 2), (128, 64, 4, 4), (128, 64, 4, 3), (128, 32, 4, 4), (64, 64, 4, 4)),
        (96, ""): ((128, 64, 4, 2), (128, 32, 4, 2), (64, 64, 4, 3)),
        (128, "fp32"): ((128, 64, 4, 2), (128, 32, 4, 2), (64, 64, 4, 3), (128, 64, 8, 1), (128, 128, 8, 1)),
        (128, "fp16"): ((128, 64, 4, 2), (128, 32, 4, 2), (64, 64, 4, 3), (64, 64, 4, 4), (128, 64, 8, 1)),
    },
    "shared_qkv": {
        (32, ""): ((128, 64, 4, 2), (64, 64, 4, 4), (128, 128, 4, 2)),
        (64, "fp32"): ((128, 64, 4, 2), (128, 32, 4, 2), (64, 64, 4, 3)),
        (64, "fp16"): ((128, 128, 4, 2), (128, 64, 4, 3), (64, 64, 4, 4), (64, 64, 4, 3), (128, 64, 4, 2)),
        (96, ""): ((128, 32, 4, 2), (64, 64, 4, 2)),
        (128, "fp32"): ((64, 64, 4, 2), (128, 64, 8, 1)),
        (128, "fp16"): ((128, 64, 4, 2), (128, 32, 4, 2), (64, 64, 4, 3)),
    },
    "pipelined": {
        (32, ""): ((128, 64, 4, 2), (64, 64, 4, 2)),
        (64, "fp32"): ((128, 32, 4, 2), (64, 64, 4, 2)),
        (64, "fp16"): ((128, 96, 4, 2), (128, 64, 4, 2), (128, 80, 4, 2), (64, 64, 4, 3)),
        (96, ""): ((64, 64, 4, 2), (64, 32, 4, 2)),
        (128, ""): ((64, 64, 4, 2), (64, 32, 4, 2)),
    },
    "tiled_d": {
        (256, ""): ((128, 64, 8, 1, 128), (128, 64, 8, 1, 64), (64, 64, 4, 2, 64)),
        (384, ""): ((64, 96, 6, 1, 128), (64, 96, 6, 1, 64), (64, 48, 6, 1, 64)),
        (512, ""): ((64, 128, 8, 1, 128), (64, 128, 8, 1, 64), (64, 64, 8, 1, 128), (64, 64, 8, 1, 64)),
        (640, ""): ((32, 80, 5, 1, 64), (32, 160, 5, 1, 64)),
        (768, ""): ((32, 96, 6, 1, 128), (32, 96, 6, 1, 64)),
        (896, ""): ((32, 112, 7, 1, 64),),
        (1024, ""): ((32, 128, 8, 1, 64), (32, 128, 8, 1, 128)),
    },
}


def candidates(options: RungOptions, head_dim: int) -> tuple[Tiles, ...]:
    """The tiles worth measuring, the default first; empty if the rung has no kernel for the head dim."""
    table = _CANDIDATES.get(options.rung, {})
    rows = table.get((head_dim, options.acc), table.get((head_dim, ""), ()))
    return tuple(Tiles(*sizes) for sizes in rows)
