"""FlashAttention: the online softmax inside a loop over tiles, so that the matrix of scores never exists.

Q is cut into blocks of `block_M` rows, K and V into blocks of `block_N` rows. A tile of scores, (block_M, block_N), is
all that is alive at a time; on a GPU it lives in registers, and Q, K and V tiles in shared memory. Two loops visit all
tiles, and the two papers differ in which is the outer one:

- FlashAttention (Dao et al. 2022, arXiv 2205.14135, algorithm 1): **K/V outside, Q inside**. A K/V tile is loaded once
  and meets all queries. o, m and l of every row therefore live in memory, and are read, updated and written once for
  each K/V tile; o is kept divided by l, so that it is a proper output at any time.
- FlashAttention-2 (Dao 2023, arXiv 2307.08691, algorithm 1): **Q outside, K/V inside**. The row's state never leaves
  registers, o is divided by l once at the end, and the blocks of Q are independent: one thread block for each. This is
  the loop of all kernels since.

The mask tells the second which tiles to visit. Of a block of queries at positions q_lo..q_hi,

    kv_range   contains every key that any of them sees: tiles outside are skipped,
    full_range is seen by all of them: tiles inside compute no mask.

For a causal mask half the tiles are skipped, and only those on the diagonal compute it.

Both functions have 13 positional arguments: those of `standard_attention`, and the sizes of tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ..call.fp8 import output_dtype
from ..variant.masks import Mask
from ..variant.program import computed_in
from .online_softmax import RowState
from .standard import ScoreFn, heads_first, positions, tile_scores

# The matrix of `standard_attention`, or a function of a tile's rows and keys that computes its part of it.
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

    Dropout may also be a function of a tile's rows and keys, so that there is no matrix of it either.
    """
    dtype, seqlen_q, seqlen_k = output_dtype(q.dtype), q.shape[1], k.shape[1]
    q, k, v = heads_first(q, k, v, (q_descale, k_descale, v_descale))
    mask, score_mods = computed_in(q.dtype, mask, score_mods)
    # "In memory": one entry for each block of queries, rewritten for each K/V tile. Here o is divided by l.
    memory = [before_tiles(q, k, v, rows, score_mods, scale) for rows in blocks(0, seqlen_q, block_M)]
    for keys in blocks(0, seqlen_k, block_N):
        for i, rows in enumerate(blocks(0, seqlen_q, block_M)):
            scores = tile_scores(q, k, rows, keys, score_mods, scale)
            scores = masked(scores, mask, positions(q, k, rows, keys))
            m, l, o = memory[i]
            m, l, o = RowState(m, l, o * l[..., None]).update(scores, v[:, :, keys], of_tile(dropout, rows, keys))
            # Divided again before it goes back; a row that has seen no key yet keeps its zero.
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
    """Tiled attention, Q outside and K/V inside, visiting only the mask's tiles; as `flash_attention_1`."""
    dtype, seqlen_q = output_dtype(q.dtype), q.shape[1]
    q, k, v = heads_first(q, k, v, (q_descale, k_descale, v_descale))
    mask, score_mods = computed_in(q.dtype, mask, score_mods)
    finished = []
    for rows in blocks(0, seqlen_q, block_M):  # on a GPU: a thread block for each
        state = before_tiles(q, k, v, rows, score_mods, scale)
        (lo, hi), (full_lo, full_hi) = key_ranges(q, k, rows, mask)
        # Tiles begin at multiples of block_N, whatever lo is, so that they are aligned in memory.
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
    """start..stop in slices of `size`; the last may be shorter."""
    return (slice(lo, min(lo + size, stop)) for lo in range(start, stop, size))


def before_tiles(
    q: Tensor, k: Tensor, v: Tensor, rows: slice, score_mods: Sequence[ScoreFn], scale: float | None
) -> RowState:
    """The rows' state before any tile: that of a tile without keys.

    So it depends on the tensors, and rows that meet no tile give them gradients, which are 0.
    """
    scores = tile_scores(q, k, rows, slice(0, 0), score_mods, scale)
    m = scores.new_full(scores.shape[:-1], -torch.inf)
    return RowState(m=m, l=scores.sum(dim=-1), o=scores @ v[:, :, :0])


def key_ranges(q: Tensor, k: Tensor, rows: slice, mask: Mask | None) -> tuple[tuple[int, int], tuple[int, int]]:
    """The keys that any of the rows sees, and those that all see: half-open, within 0..seqlen_k.

    Where the mask depends on the batch element or the head, the first is the union and the second the intersection: a
    kernel, whose thread block works on one head of one batch element, knows them more closely.
    """
    seqlen_k = k.shape[2]
    if mask is None or k.numel() == 0:  # a mask's tensors have no element to read where there is no key
        return (0, seqlen_k), (0, seqlen_k)
    b, h, q_pos, _ = positions(q, k, rows, slice(0, 0))
    lo, hi = mask.kv_range(b, h, q_pos[..., :1, :], q_pos[..., -1:, :], seqlen_k)
    full_lo, full_hi = mask.full_range(b, h, q_pos[..., :1, :], q_pos[..., -1:, :], seqlen_k)

    def extreme(bound: int | Tensor, pick: str) -> int:
        bound = torch.as_tensor(bound).clamp(0, seqlen_k)
        return int(bound.min() if pick == "min" else bound.max())

    return (extreme(lo, "min"), extreme(hi, "max")), (extreme(full_lo, "max"), extreme(full_hi, "min"))


def masked(scores: Tensor, mask: Mask | None, where: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
    """Scores with -inf where the mask forbids: exp of it is 0, which is how little the key weighs."""
    return scores if mask is None else scores.masked_fill(~mask.allows(*where), -torch.inf)


def of_tile(dropout: Dropout | None, rows: slice, keys: slice) -> Tensor | None:
    """The tile's part of a matrix that a kernel never has: it computes the pattern (:mod:`tileattn.call.dropout`)."""
    if isinstance(dropout, Tensor):
        return dropout[:, :, rows, keys]
    return None if dropout is None else dropout(rows, keys)


def per_row(sink: Tensor | None, q: Tensor) -> Tensor | None:
    """A sink (heads,) shaped to broadcast to the rows (batch, heads, rows), in q's dtype."""
    return None if sink is None else sink.to(q.dtype)[None, :, None]


def joined(finished: Sequence[tuple[Tensor, Tensor]], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """o (batch, seqlen_q, heads, head_dim_v) in `dtype` and lse (batch, heads, seqlen_q), from those of the blocks."""
    o, lse = (torch.cat(parts, dim=2) for parts in zip(*finished))
    return o.transpose(1, 2).to(dtype), lse
