"""FlexAttention by PyTorch's own definition, for the tests of tileattn.compat.flex_attention.

PyTorch's function has no backward pass on a CPU. `math_attention`, which its eager mode calls, is made of operations
that autograd differentiates, so the gradients here are PyTorch's as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.flex_attention import math_attention
from torch.nn.attention.flex_attention import BlockMask, noop_mask

Function = Callable[..., Any]


def expected(
    q: Tensor, k: Tensor, v: Tensor, score_mod: Function | None, mask_mod: Function | None, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """out and lse, differentiable. The mask_mod decides for every pair; no block is taken into account."""
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    mods = score_mod or (lambda score, b, h, q_idx, kv_idx: score), (mask_mod or noop_mask,)
    out, lse, _ = math_attention(q, k, v, *mods, scale, {})
    return out, lse * math.log(2)


def table_of(block_mask: BlockMask, batch: int, heads: int) -> Tensor:
    """Which pairs a BlockMask shows: bool (batch, heads, Q_LEN, KV_LEN), by the description of its format."""
    rows, keys = block_mask.seq_lengths
    height, width = block_mask.BLOCK_SIZE
    seen = torch.zeros(batch, heads, rows, keys, dtype=torch.bool)
    for b, h, i in torch.cartesian_prod(*map(torch.arange, (batch, heads, -(-rows // height)))).tolist():
        top = slice(i * height, min((i + 1) * height, rows))
        for full in (False, True):
            for j in _listed(block_mask, full, b, h, i):
                left = slice(j * width, min((j + 1) * width, keys))
                q_idx, kv_idx = torch.arange(top.start, top.stop)[:, None], torch.arange(left.start, left.stop)
                where = torch.tensor(b), torch.tensor(h), q_idx, kv_idx
                seen[b, h, top, left] = True if full else block_mask.mask_mod(*where)
    return seen


def _listed(block_mask: BlockMask, full: bool, b: int, h: int, i: int) -> list[int]:
    counts = block_mask.full_kv_num_blocks if full else block_mask.kv_num_blocks
    indices = block_mask.full_kv_indices if full else block_mask.kv_indices
    if counts is None or indices is None:
        return []
    at = (b % counts.shape[0], h % counts.shape[1], i)
    return indices[at][: int(counts[at])].tolist()  # type: ignore[no-any-return]


def inputs(
    lengths: tuple[int, int], heads: tuple[int, int] = (4, 4), dtype: torch.dtype = torch.float64, batch: int = 2
) -> list[Tensor]:
    """query, key and value with gradients; a head dim of 8."""
    generator = torch.Generator().manual_seed(0)
    sizes = ((heads[0], lengths[0]), (heads[1], lengths[1]), (heads[1], lengths[1]))
    return [torch.randn(batch, *size, 8, generator=generator, dtype=dtype).requires_grad_() for size in sizes]


def assert_same(got: Sequence[Tensor], right: Sequence[Tensor], leaves: Sequence[Tensor]) -> None:
    """out and lse, and their gradients in the leaves. An lse of -inf, of a query that sees nothing, takes none."""
    torch.testing.assert_close(got[0], right[0])
    torch.testing.assert_close(got[1], right[1])
    generator = torch.Generator().manual_seed(1)
    do = torch.randn(got[0].shape, generator=generator, dtype=got[0].dtype)
    sums = [(out * do).sum() + lse.masked_fill(lse == -math.inf, 0).sum() for out, lse in (got, right)]
    gradients = [torch.autograd.grad(each, leaves, allow_unused=True, materialize_grads=True) for each in sums]
    for name, mine, theirs in zip(("dq", "dk", "dv", *("captured",) * len(leaves)), *gradients):
        torch.testing.assert_close(mine, theirs, msg=lambda text, name=name: f"{name}: {text}")
