"""The names and values of the ladder: rungs, their options, tile sizes, and the kernel that they describe."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

NAME = "mma"
# In the ladder's order: each rung changes one thing of the rung before. The last rung is for large head dims.
RUNGS = ("split_kv", "split_q", "shared_kv", "shared_qkv", "pipelined", "tiled_d")
# The rungs' names in flash-attention-mma (LeetCUDA); also with "split-q+" before them, as its tables write them.
ORIGINAL_NAMES = {
    "split-kv": "split_kv",
    "split-q": "split_q",
    "share-kv": "shared_kv",
    "share-qkv": "shared_qkv",
    "tiling-qk": "tiled_d",
    "tiling-qkv": "tiled_d",
}
# And what it appends with "+".
ORIGINAL_OPTIONS = {
    "stage1": "stages=1",
    "stage2": "stages=2",
    "acc-f32": "acc=fp32",
    "swizzle-q": "smem=swizzle",
    "swizzle-qk": "smem=swizzle",
    "swizzle-qkv": "smem=swizzle",
}
HEAD_DIMS = (32, 64, 96, 128)
LARGE_HEAD_DIMS = tuple(range(256, 1025, 128))
ACCUMULATIONS = ("fp32", "fp16")
LAYOUTS = ("padded", "swizzle")
STAGES = (1, 2)


@dataclass(frozen=True)
class RungOptions:
    """A rung and its options. Together with tiles, dtype and head dim they make a :class:`Kernel`.

    Attributes:
        rung: one of `RUNGS`.
        stages: the number of K and V tiles in flight: 1, or 2 with cp.async.
        acc: the dtype in which matrix products are accumulated: "fp32" or "fp16".
        smem: the layout of tiles in shared memory that avoids bank conflicts: "padded" or "swizzle".
    """

    rung: str
    stages: int = 2
    acc: str = "fp32"
    smem: str = "swizzle"

    def __str__(self) -> str:
        return f"{NAME}:{self.rung},stages={self.stages},acc={self.acc},smem={self.smem}"


@dataclass(frozen=True)
class Tiles:
    """The compile-time sizes of a kernel.

    Attributes:
        block_M: queries of a thread block.
        block_N: keys of a tile.
        warps: warps of a thread block.
        blocks: thread blocks per multiprocessor for which the compiler limits the registers.
        slice: in tiled_d, the columns of K in a slice, which is also four times the rows of V in a slice; 0 elsewhere.
    """

    block_M: int
    block_N: int
    warps: int
    blocks: int
    slice: int = 0

    def __str__(self) -> str:
        return "x".join(str(size) for size in dataclasses.astuple(self) if size)

    @property
    def threads(self) -> int:
        """Threads of a thread block."""
        return 32 * self.warps


@dataclass(frozen=True)
class Kernel:
    """Everything that determines the compiled code, except the architecture."""

    options: RungOptions
    dtype: torch.dtype
    head_dim: int
    tiles: Tiles

    def __str__(self) -> str:
        return f"{self.options},tiles={self.tiles} {str(self.dtype).removeprefix('torch.')} d{self.head_dim}"

    def macros(self) -> dict[str, int]:
        """The macros that the sources need."""
        return {
            "HEAD_DIM": self.head_dim,
            "BF16": int(self.dtype == torch.bfloat16),
            "STAGES": self.options.stages,
            "ACC_FP16": int(self.options.acc == "fp16"),
            "SWIZZLE": int(self.options.smem == "swizzle"),
            "BLOCK_M": self.tiles.block_M,
            "BLOCK_N": self.tiles.block_N,
            "WARPS": self.tiles.warps,
            "BLOCKS_PER_SM": self.tiles.blocks,
            "SLICE": self.tiles.slice,
            "SHARED_MEMORY": self.shared_memory(),
        }

    def shared_memory(self) -> int:
        """Bytes of shared memory of a thread block. The sources count them, too, and assert the same number."""
        block_M, block_N, stages = self.tiles.block_M, self.tiles.block_N, self.options.stages
        rung = self.options.rung
        q, k = self._tile(block_M, self.head_dim), self._tile(block_N, self.head_dim)
        if rung == "split_kv":
            statistics, output = 4 * self.tiles.warps * block_M, 4 * self.tiles.warps * block_M * self.head_dim
            return statistics + max(q + 2 * stages * k, output)
        if rung == "split_q":
            return q + 2 * stages * k
        if rung == "shared_kv":
            return q + stages * k
        if rung == "shared_qkv":
            return max(q, stages * k)
        if rung == "pipelined":
            return max(q, 2 * stages * k)
        # tiled_d
        slice_k, slice_v = self._tile(block_N, self.tiles.slice), self._tile(self.tiles.slice // 4, self.head_dim)
        statistics = 4 * self.head_dim // 128 * block_M
        return q + self._tile(block_M, block_N) + statistics + stages * max(slice_k, slice_v)

    def _tile(self, rows: int, columns: int) -> int:
        return rows * (2 * columns + (0 if self.options.smem == "swizzle" else 16))
