"""Test cases of the ladder's kernels, on a GPU (kernels/mma/test_gpu.py) and on a CPU (emulator.py)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from tileattn import Causal
from tileattn.kernels.mma.rungs import (
    ACCUMULATIONS,
    HEAD_DIMS,
    LARGE_HEAD_DIMS,
    LAYOUTS,
    RUNGS,
    STAGES,
    Kernel,
    RungOptions,
)
from tileattn.kernels.mma.tiles import candidates
from tileattn.testing import eager_attention, oracle_attention
from tileattn.testing.fp16_accumulation import eager_fp16_accumulation
from tileattn.testing.numerics import assert_forward_accurate


class Shape(NamedTuple):
    """One call; heads of q, then of k and v; "packed" tensors are the parts of one projection."""

    batch: int
    heads: tuple[int, int]
    lengths: tuple[int, int]
    causal: bool = False
    packed: bool = False
    scale: float | None = None

    def tensors(self, head_dim: int, dtype: torch.dtype, device: str) -> list[Tensor]:
        """q, k and v, the same on every device; NaN lies around packed ones."""
        generator = torch.Generator().manual_seed(0)
        inputs = []
        for length, heads in zip((self.lengths[0], self.lengths[1], self.lengths[1]), (*self.heads, self.heads[1])):
            x = torch.randn(self.batch, length, heads, head_dim, generator=generator).to(device, dtype)
            if self.packed:
                whole = torch.full((self.batch, length, heads + 2, head_dim), torch.nan, dtype=dtype, device=device)
                whole[:, :, 1:-1] = x
                x = whole[:, :, 1:-1]
            inputs.append(x)
        return inputs


SHAPES = {
    "full": Shape(2, (4, 2), (131, 200), packed=True),
    "causal": Shape(1, (2, 1), (150, 150), causal=True),
    "causal, few queries": Shape(1, (2, 2), (40, 170), causal=True, packed=True),
    "causal, rows without keys": Shape(1, (2, 1), (170, 60), causal=True),
    "full tiles": Shape(1, (1, 1), (128, 128)),
    "one": Shape(1, (1, 1), (1, 1)),
    "negative scale": Shape(1, (2, 1), (70, 65), scale=-0.1),
    "no scale": Shape(1, (1, 1), (33, 140), causal=True, scale=0.0),
}


def check(name: str, kernel: Kernel, shape: Shape, tensors: list[Tensor], got: tuple[Tensor, Tensor]) -> None:
    """The tolerance rule; for float16 accumulation it has one more eager run."""
    scale = kernel.head_dim**-0.5 if shape.scale is None else shape.scale
    mask = Causal() if shape.causal else None
    arguments = (*tensors, mask, (), None, scale)
    eager_o, eager_lse = eager_attention(*arguments)
    if kernel.options.acc == "fp16":
        q, k, v = tensors
        o, lse = eager_fp16_accumulation(-q if scale < 0 else q, k, v, mask, abs(scale), keys_of_a_warp(kernel))
        eager_o, eager_lse = [*eager_o, o], [*eager_lse, lse]
    assert_forward_accurate(name, got, oracle_attention(*arguments), (eager_o, eager_lse))


def keys_of_a_warp(kernel: Kernel) -> int:
    """The keys of a tile whose probabilities a warp adds up in one sum."""
    sharing = {"split_kv": kernel.tiles.warps, "tiled_d": kernel.head_dim // 128}
    return kernel.tiles.block_N // sharing.get(kernel.options.rung, 1)


def kernels(all_dims: bool) -> Iterator[Kernel]:
    """With default tiles, every option of every rung: at one head dim of each rung (two of tiled_d), or at all."""
    for rung in RUNGS:
        dims = LARGE_HEAD_DIMS if rung == "tiled_d" else HEAD_DIMS
        for head_dim in dims if all_dims else (256, 512) if rung == "tiled_d" else (64,):
            yield from _options(rung, head_dim)


def _options(rung: str, head_dim: int) -> Iterator[Kernel]:
    for stages, acc, smem, dtype in product(STAGES, ACCUMULATIONS, LAYOUTS, (torch.float16, torch.bfloat16)):
        if acc == "fp32" or dtype == torch.float16:
            options = RungOptions(rung, stages, acc, smem)
            yield Kernel(options, dtype, head_dim, candidates(options, head_dim)[0])


def default_kernels() -> Iterator[Kernel]:
    """The default options at all head dims."""
    for rung in RUNGS:
        for head_dim, dtype in product(
            LARGE_HEAD_DIMS if rung == "tiled_d" else HEAD_DIMS, (torch.float16, torch.bfloat16)
        ):
            options = RungOptions(rung)
            yield Kernel(options, dtype, head_dim, candidates(options, head_dim)[0])
