"""Gradients of the tensors that score modifications read, as a kernel hands them over (see operand_gradients.py)."""

from __future__ import annotations

import tilelang.language as T


@T.macro
def add_to_sums(gradient, tile_sum, sums, block_N):
    """For each key, over the tile's queries."""
    T.reduce_sum(gradient, tile_sum, dim=1)
    for i in T.Parallel(block_N):
        sums[i] += tile_sum[i]


@T.macro
def hand_over_sums(sums, workspace, b, h, k_lo, block_N):
    """After the last tile of a head."""
    T.copy(sums, workspace[b, h, k_lo : k_lo + block_N])
    T.fill(sums, 0)


@T.macro
def add_to_elements(gradient, buffer, path, emit, b, h, q_lo, k_lo, block_N, block_M):
    """Each score's gradient to the element that it read. Exact zeros, such as those of hidden scores, add nothing."""
    for i, j in T.Parallel(block_N, block_M):
        if gradient[i, j] != 0.0:
            T.atomic_add(buffer[path.indices(emit, b=b, h=h, q=q_lo + j, k=k_lo + i)], gradient[i, j])


@T.macro
def store_elements(gradient, buffer, path, emit, b, h, q_lo, k_lo, block_N, block_M):
    """Each score's gradient to the element that it alone has read."""
    for i, j in T.Parallel(block_N, block_M):
        buffer[path.indices(emit, b=b, h=h, q=q_lo + j, k=k_lo + i)] = gradient[i, j]


@T.macro
def spread(gradient, workspace, b, h, row, k_lo, block_N, block_M):
    """Each score's gradient to a place of its own."""
    for i, j in T.Parallel(block_N, block_M):
        workspace[b, h, row + j, k_lo + i] = gradient[i, j]
