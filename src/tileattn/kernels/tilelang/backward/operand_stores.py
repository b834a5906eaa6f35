"""Gradients of the tensors that score modifications read, as a kernel hands them over (see operand_gradients.py)."""

from __future__ import annotations

import tilelang.language as T

from .operand_gradients import ADDED, SPREAD, STORED


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
def add_to_elements(gradient, buffer, path, scores):
    """Each score's gradient to the element that it read. Exact zeros, such as those of hidden scores, add nothing."""
    at = scores.held("b", "h", "q_lo", "k_lo")
    for i, j in T.Parallel(at.rows, at.columns):
        if gradient[i, j] != 0.0:
            T.atomic_add(buffer[path.indices(at.emit, b=at.b, h=at.h, q=at.q_lo + j, k=at.k_lo + i)], gradient[i, j])


@T.macro
def store_elements(gradient, buffer, path, scores):
    """Each score's gradient to the element that it alone has read."""
    at = scores.held("b", "h", "q_lo", "k_lo")
    for i, j in T.Parallel(at.rows, at.columns):
        buffer[path.indices(at.emit, b=at.b, h=at.h, q=at.q_lo + j, k=at.k_lo + i)] = gradient[i, j]


@T.macro
def spread(gradient, workspace, scores):
    """Each score's gradient to a place of its own."""
    at = scores.held("b", "h", "row", "k_lo")
    for i, j in T.Parallel(at.rows, at.columns):
        workspace[at.b, at.h, at.row + j, at.k_lo + i] = gradient[i, j]


@T.macro
def to_elements(gradient, buffer, path, scores):
    """A tile's gradients, keys in rows, on the path's way, unless that sums them by key (:func:`add_to_sums`)."""
    if path.way == ADDED:
        add_to_elements(gradient, buffer, path, scores)
    if path.way == STORED:
        store_elements(gradient, buffer, path, scores)
    if path.way == SPREAD:
        spread(gradient, buffer, scores)
