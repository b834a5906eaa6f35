"""How many heads' tiles run side by side in the grids of the kernels whose blocks have one tile of a head each."""

from __future__ import annotations

import torch

from .....call.facts import BackwardCall
from .....variant.program import program
from ...host import L2_BYTES, divisors

MIN_SIDE_BY_SIDE = 4  # kv heads under a mask, whatever the L2 cache holds: with fewer, long tiles come last
LONG = 32768  # keys from which one head has enough tiles


def heads_side_by_side(call: BackwardCall, q_shape: torch.Size, k_shape: torch.Size) -> int:
    """The number of heads whose tiles of queries run side by side in the kernel for dq alone.

    Those are the heads of one kv head's group, which read the same keys; under a mask, of several groups.
    """
    _, _, heads, head_dim = q_shape
    _, seqlen_k, kv_heads, _ = k_shape
    group = heads // kv_heads
    if program(call.forward.variant).allows is None:
        return group
    row_bytes = 2 * (head_dim + call.forward.head_dim_v)  # of k and v
    fitting = max(L2_BYTES // (row_bytes * seqlen_k), MIN_SIDE_BY_SIDE)
    return group * max(d for d in divisors(_together(call, q_shape) * kv_heads) if d <= fitting)


def kv_heads_side_by_side(call: BackwardCall, q_shape: torch.Size, seqlen_k: int, kv_heads: int) -> int:
    """The number of kv heads whose tiles of keys run side by side: a divisor of all, so that the grid has no gaps.

    Without a mask it is 1: blocks that run together read the same queries and add to the same dq. Under a mask tiles
    differ in cost, and with several heads long tiles can start first; but the heads' queries and sums should stay in
    the L2 cache. From 32k keys on one head has tiles for all blocks, and longer queries than the cache holds: with four
    at once 128k tokens took 1.39 times as long, 64k 1.04 times (16/4 and 32/8 heads, D128, an H100).
    """
    if program(call.forward.variant).allows is None:
        return 1
    fewest = MIN_SIDE_BY_SIDE if seqlen_k < LONG else 1
    fitting = max(L2_BYTES // bytes_beside(call, q_shape, kv_heads), fewest)
    return max(d for d in divisors(_together(call, q_shape) * kv_heads) if d <= fitting)


def bytes_beside(call: BackwardCall, q_shape: torch.Size, kv_heads: int) -> int:
    """Bytes that the blocks of one kv head, or of a share of its group, read and add to: of q, do and dq's sums."""
    _, seqlen_q, heads, head_dim = q_shape
    return (2 * (head_dim + call.forward.head_dim_v) + 4 * head_dim) * seqlen_q * max(heads // kv_heads, 1)


def _together(call: BackwardCall, q_shape: torch.Size) -> int:
    """Batch elements whose heads may run side by side: all, or 1 for packed sequences."""
    return 1 if call.forward.packed else q_shape[0]
