"""FlashAttention: the online softmax inside a loop over tiles. The matrix of scores is never stored.

Q is divided into blocks of `block_M` rows, K and V into blocks of `block_N` rows. Only one tile of scores,
(block_M, block_N), exists at a time. On a GPU it is in registers, and the Q, K and V tiles are in shared memory. Two
nested loops visit the tiles. The two papers differ in which loop is the outer one:

- FlashAttention (Dao et al. 2022, arXiv 2205.14135, algorithm 1): **K/V outside, Q inside**. Each K/V tile is loaded
  once and used for all queries. Therefore o, m and l of every row are in memory and are read, updated and written once
  for each K/V tile. o is always divided by l, so it is a valid output after every tile.
- FlashAttention-2 (Dao 2023, arXiv 2307.08691, algorithm 1): **Q outside, K/V inside**. The row's state stays in
  registers, and o is divided by l once at the end. The blocks of Q are independent: each has its own thread block.
  Later kernels, tileattn's among them, use this loop.

In the second loop the mask decides which tiles are visited. For a block of queries at positions q_lo..q_hi,

    kv_range   contains every key that any of the queries sees: tiles outside it are skipped,
    full_range contains only keys that all of the queries see: in tiles inside it the mask is not evaluated.

A causal mask skips half the tiles and is evaluated only in tiles on the diagonal.

Both functions have 13 positional arguments: those of `standard_attention`, and the sizes of the tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ..call.fp8 import output_dtype
from ..variant.masks import Causal, Mask, SlidingWindow
from ..variant.program import computed_in
from ..variant.sparse.blocks import for_tensors
from .online_softmax import RowState
from .standard import ScoreFn, heads_first, positions, tile_scores

# Factors of the probabilities: the matrix that `standard_attention` takes, or a function of a tile's rows and keys that
# computes the tile of that matrix.
Dropout = Tensor | Callable[[slice, slice], Tensor]


def flash_attention_1(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None = None,
    score_mods: Sequence[ScoreFn] = (),
    sink: Tensor | None = None,
    scale: float | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    dropout: Dropout | None = None,
    block_M: int = 64,
    block_N: int = 64,
) -> tuple[Tensor, Tensor]:
    """Tiled attention, K/V outside and Q inside; arguments and results as `standard_attention`.

    dropout may also be a function (rows, keys) -> factors of the tile, so that its matrix is not stored either.
    """
    dtype, seqlen_q, seqlen_k = output_dtype(q.dtype), q.shape[1], k.shape[1]
    mask = for_tensors(mask, q, k)
    q, k, v = heads_first(q, k, v, (q_descale, k_descale, v_descale))
    mask, score_mods = computed_in(q.dtype, mask, score_mods)
    # One entry per block of queries, rewritten for each K/V tile: on a GPU this list is in global memory. Its o is
    # divided by l.
    memory = [before_tiles(q, k, v, rows, score_mods, scale) for rows in blocks(0, seqlen_q, block_M)]
    for keys in blocks(0, seqlen_k, block_N):
        for i, rows in enumerate(blocks(0, seqlen_q, block_M)):
            scores = tile_scores(q, k, rows, keys, score_mods, scale)
            scores = masked(scores, mask, positions(q, k, rows, keys))
            m, l, o = memory[i]
            m, l, o = RowState(m, l, o * l[..., None]).update(scores, v[:, :, keys], of_tile(dropout, rows, keys))
            # o is divided by l before it is written back; in a row that has seen no key, l = 0 and o stays 0.
            memory[i] = RowState(m, l, o / torch.where(l > 0, l, 1.0)[..., None])
    if not memory:
        memory = [before_tiles(q, k, v, slice(0, 0), score_mods, scale)]
    finished = [RowState(m, l, o * l[..., None]).finish(per_row(sink, q)) for m, l, o in memory]
    return joined(finished, dtype)


def flash_attention_2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None = None,
    score_mods: Sequence[ScoreFn] = (),
    sink: Tensor | None = None,
    scale: float | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    dropout: Dropout | None = None,
    block_M: int = 64,
    block_N: int = 64,
) -> tuple[Tensor, Tensor]:
    """Tiled attention, Q outside and K/V inside. Fully masked tiles are skipped. Arguments as `flash_attention_1`."""
    dtype, seqlen_q = output_dtype(q.dtype), q.shape[1]
    mask = for_tensors(mask, q, k)
    q, k, v = heads_first(q, k, v, (q_descale, k_descale, v_descale))
    mask, score_mods = computed_in(q.dtype, mask, score_mods)
    finished = []
    for rows in blocks(0, seqlen_q, block_M):  # on a GPU, one thread block per iteration
        state = before_tiles(q, k, v, rows, score_mods, scale)
        (lo, hi), (full_lo, full_hi) = key_ranges(q, k, rows, mask)
        # Tiles begin at multiples of block_N for any lo, so that they are aligned in memory.
        for keys in blocks(lo - lo % block_N, hi, block_N):
            scores = tile_scores(q, k, rows, keys, score_mods, scale)
            if keys.start < full_lo or keys.stop > full_hi:
                scores = masked(scores, mask, positions(q, k, rows, keys))
            state = state.update(scores, v[:, :, keys], of_tile(dropout, rows, keys))
        finished.append(state.finish(per_row(sink, q)))
    if not finished:
        finished = [before_tiles(q, k, v, slice(0, 0), score_mods, scale).finish(per_row(sink, q))]
    return joined(finished, dtype)


def blocks(start: int, stop: int, size: int) -> Iterator[slice]:
    """Slices of length `size` that cover start..stop; the last may be shorter."""
    return (slice(lo, min(lo + size, stop)) for lo in range(start, stop, size))


def before_tiles(
    q: Tensor, k: Tensor, v: Tensor, rows: slice, score_mods: Sequence[ScoreFn], scale: float | None
) -> RowState:
    """The rows' state before the first tile, computed as the state of a tile without keys.

    So the state depends on q, k and v in autograd's graph. Rows that visit no tile then have gradients of 0, not None.
    """
    scores = tile_scores(q, k, rows, slice(0, 0), score_mods, scale)
    m = scores.new_full(scores.shape[:-1], -torch.inf)
    return RowState(m=m, l=scores.sum(dim=-1), o=scores @ v[:, :, :0])


def key_ranges(q: Tensor, k: Tensor, rows: slice, mask: Mask | None) -> tuple[tuple[int, int], tuple[int, int]]:
    """The range of keys that any of the rows sees, and the range that all rows see: half-open, within 0..seqlen_k.

    If the mask depends on the batch element or the head, the first is the union of their ranges and the second the
    intersection. A kernel has tighter ranges: its thread block computes one head of one batch element.
    """
    seqlen_k = k.shape[2]
    if mask is None or k.numel() == 0:  # without keys, a mask's tensors may have no element to read
        return (0, seqlen_k), (0, seqlen_k)
    b, h, q_pos, _ = positions(q, k, rows, slice(0, 0))
    first, last = q_pos[..., :1, :], q_pos[..., -1:, :]
    if isinstance(mask, (Causal, SlidingWindow)):  # they only add to positions: with numbers torch.compile can trace it
        offset = seqlen_k - q.shape[2]
        first, last = rows.start + offset, rows.stop - 1 + offset
    lo, hi = mask.kv_range(b, h, first, last, seqlen_k)
    full_lo, full_hi = mask.full_range(b, h, first, last, seqlen_k)

    def extreme(bound: int | Tensor, pick: str) -> int:
        if isinstance(bound, int):
            return min(max(bound, 0), seqlen_k)
        bound = torch.as_tensor(bound).clamp(0, seqlen_k)
        return int(bound.min() if pick == "min" else bound.max())

    return (extreme(lo, "min"), extreme(hi, "max")), (extreme(full_lo, "max"), extreme(full_hi, "min"))


def masked(scores: Tensor, mask: Mask | None, where: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
    """Scores with -inf where the mask forbids the key, so that its probability exp(-inf) is 0."""
    return scores if mask is None else scores.masked_fill(~mask.allows(*where), -torch.inf)


def of_tile(dropout: Dropout | None, rows: slice, keys: slice) -> Tensor | None:
    """Dropout factors of one tile. A kernel computes them from the seed (:mod:`tileattn.call.dropout`)."""
    if isinstance(dropout, Tensor):
        return dropout[:, :, rows, keys]
    return None if dropout is None else dropout(rows, keys)


def per_row(sink: Tensor | None, q: Tensor) -> Tensor | None:
    """A sink (heads,) shaped to broadcast to the rows (batch, heads, rows), in q's dtype."""
    return None if sink is None else sink.to(q.dtype)[None, :, None]


def joined(finished: Sequence[tuple[Tensor, Tensor]], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Joins the blocks' results: o (batch, seqlen_q, heads, head_dim_v) in `dtype` and lse (batch, heads, seqlen_q).

    finished: o (batch, heads, rows, head_dim_v) and lse (batch, heads, rows) of each block.
    """
    o, lse = (torch.cat(parts, dim=2) for parts in zip(*finished))
    return o.transpose(1, 2).to(dtype), lse
