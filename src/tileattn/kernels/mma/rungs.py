"""The rungs of the ladder, their options and their tiles: which are valid, and which is chosen."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

NAME = "mma"
# As the ladder is climbed: each changes one thing of the one before. The last one is for large head dims.
RUNGS = ("split_kv", "split_q", "shared_kv", "shared_qkv", "pipelined", "tiled_d")
HEAD_DIMS = (32, 64, 96, 128)
LARGE_HEAD_DIMS = tuple(range(256, 1025, 128))
ACCUMULATIONS = ("fp32", "fp16")
LAYOUTS = ("padded", "swizzle")
STAGES = (1, 2)


@dataclass(frozen=True)
class Variant:
    """One kernel of the ladder, but for its tiles: a rung and its options.

    Attributes:
        rung: one of `RUNGS`.
        stages: tiles of K and V in flight: 1, or 2 by cp.async.
        acc: in which the matrix units add up: "fp32" or "fp16".
        smem: how tiles lie in shared memory without bank conflicts: "padded" or "swizzle".
    """

    rung: str
    stages: int = 2
    acc: str = "fp32"
    smem: str = "swizzle"

    def __str__(self) -> str:
        return f"{NAME}:{self.rung},stages={self.stages},acc={self.acc},smem={self.smem}"


@dataclass(frozen=True)
class Tiles:
    """How a kernel is cut: compile-time sizes.

    Attributes:
        block_M: queries of a block.
        block_N: keys of a tile.
        warps: of a block.
        blocks: of a multiprocessor, as many as registers must suffice for.
        slice: in tiled_d, columns of K that are copied at a time, and four times the rows of V; elsewhere 0.
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
        """Of a block."""
        return 32 * self.warps


@dataclass(frozen=True)
class Kernel:
    """All that decides what is compiled, but the architecture."""

    variant: Variant
    dtype: torch.dtype
    head_dim: int
    tiles: Tiles

    def __str__(self) -> str:
        return f"{self.variant},tiles={self.tiles} {str(self.dtype).removeprefix('torch.')} d{self.head_dim}"

    def macros(self) -> dict[str, int]:
        """The constants that the sources want."""
        return {
            "HEAD_DIM": self.head_dim,
            "BF16": int(self.dtype == torch.bfloat16),
            "STAGES": self.variant.stages,
            "ACC_FP16": int(self.variant.acc == "fp16"),
            "SWIZZLE": int(self.variant.smem == "swizzle"),
            "BLOCK_M": self.tiles.block_M,
            "BLOCK_N": self.tiles.block_N,
            "WARPS": self.tiles.warps,
            "BLOCKS_PER_SM": self.tiles.blocks,
            "SLICE": self.tiles.slice,
            "SHARED_MEMORY": self.shared_memory(),
        }

    def shared_memory(self) -> int:
        """Bytes that a block takes; the sources count the same, and a kernel in which they differ does not compile."""
        block_M, block_N, stages = self.tiles.block_M, self.tiles.block_N, self.variant.stages
        q, k = self._tile(block_M, self.head_dim), self._tile(block_N, self.head_dim)
        if self.variant.rung == "split_kv":
            statistics, output = 4 * self.tiles.warps * block_M, 4 * self.tiles.warps * block_M * self.head_dim
            return statistics + max(q + 2 * stages * k, output)
        if self.variant.rung == "split_q":
            return q + 2 * stages * k
        if self.variant.rung == "shared_kv":
            return q + stages * k
        if self.variant.rung == "shared_qkv":
            return max(q, stages * k)
        if self.variant.rung == "pipelined":
            return max(q, 2 * stages * k)
        # tiled_d
        slice_k, slice_v = self._tile(block_N, self.tiles.slice), self._tile(self.tiles.slice // 4, self.head_dim)
        statistics = 4 * self.head_dim // 128 * block_M
        return q + self._tile(block_M, block_N) + statistics + stages * max(slice_k, slice_v)

    def _tile(self, rows: int, columns: int) -> int:
        return rows * (2 * columns + (0 if self.variant.smem == "swizzle" else 16))
