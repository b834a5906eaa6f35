"""FlashAttention-2's loop over the keys of one block of rows, in PyTorch operations for any device, dtype and variant.

Scores and sums are float32, or float64 for float64 inputs. Source: Dao 2023 (arXiv 2307.08691), algorithm 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .mask import KeyRange, ScoreMatrix
from .softmax import RowState, exp_scores, finish, join

# Rows and keys of a tile: large enough for efficient matrix products and negligible Python overhead.
BLOCK_M = 256
BLOCK_N = 512
# Elements of the largest tile of scores: 128 MiB in float32.
MAX_TILE = 2**25


def block_rows(matrix: ScoreMatrix) -> int:
    """Rows of a block: BLOCK_M, or fewer if a tile of all heads would exceed MAX_TILE."""
    heads = matrix.heads * (matrix.batch.stop - matrix.batch.start)
    return max(16, min(BLOCK_M, MAX_TILE // (BLOCK_N * heads)))


def attend(
    q: Tensor, k: Tensor, v: Tensor, matrix: ScoreMatrix, rows: slice, seen: KeyRange, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of a block of rows: o (batch, rows, heads, head_dim_v) in q's dtype, lse (batch, heads, rows).

    q (batch, rows, heads, head_dim) are those rows; k, v (batch, seqlen_k, kv_heads, dim) all keys.
    """
    if seen.lo == seen.hi:
        return without_keys(q, v, matrix.dtype)
    state = states(q, lambda keys: (k[:, keys], v[:, keys]), seen.tiles(BLOCK_N), matrix, rows, seen, scale)
    o, lse = finish(state)
    return (o * matrix.weight_of_kept).transpose(1, 2).to(q.dtype), lse


def states(
    q: Tensor,
    keys_of: Callable[[slice], tuple[Tensor, Tensor]],
    tiles: Sequence[slice],
    matrix: ScoreMatrix,
    rows: slice,
    seen: KeyRange,
    scale: float,
) -> RowState:
    """The state of a block of rows after some tiles of keys, at least one, in their order.

    keys_of: the keys and values of a tile, each (batch, keys, kv_heads, dim).
    """
    batch, count, heads, _ = q.shape
    state, scaled = None, None
    for keys in tiles:
        k_tile, v_tile = (x.transpose(1, 2).to(matrix.dtype) for x in keys_of(keys))
        kv_heads = k_tile.shape[1]
        if scaled is None:
            # The queries of a group of heads become rows of their kv head: (batch, kv_heads, group * rows, head_dim).
            scaled = (q.to(matrix.dtype) * scale).unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)
        # S = scale * Q K^T
        scores = (scaled @ k_tile.mT).view(batch, heads, count, -1)
        scores = matrix.modified(scores, rows, keys)
        if seen.partial(keys):
            scores = scores.masked_fill(matrix.forbidden(rows, keys), -torch.inf)
        # P = exp(S - m), l = the sums of its rows, O = P V
        m, p, l = exp_scores(scores)
        if matrix.dropout is not None:
            p = p.masked_fill(matrix.dropped(rows, keys), 0.0)
        o = (p.view(batch, kv_heads, -1, p.shape[-1]) @ v_tile).view(batch, heads, count, -1)
        tile = RowState(m, l, o)
        state = tile if state is None else join(state, tile)
    assert state is not None
    return state


def without_keys(q: Tensor, v: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows that see no key: o = 0 and lse = -inf."""
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=dtype, device=q.device)
    return q.new_zeros(*q.shape[:3], v.shape[3]), lse
