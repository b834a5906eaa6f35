"""What any mask, also a user's function, does to tiles of scores: hides them, cuts through them, or neither.

The interval analysis (`variant/intervals/`) says so without looking at pairs of positions. The torch backend skips the
tiles that are hidden and evaluates the mask in those that are mixed. Other kernels go by a mask's ranges, which
`tile_map` shows.
"""

from __future__ import annotations

from typing import Any

from tileattn.variant.intervals.tiles import grid, tile_kinds
from tileattn.variant.masks import Mask
from tileattn.viz.checks import MOST_TILES, check_sizes, check_tile_count
from tileattn.viz.tiles import TileMap, described, variant_of


def mask_tiles(
    mask: Mask | Any | None,
    seqlen_q: int,
    seqlen_k: int,
    block_M: int | None = None,
    block_N: int | None = None,
    *,
    causal: bool = False,
    b: int = 0,
    h: int = 0,
) -> TileMap:
    """Which tiles a mask hides, which it leaves whole, and which are mixed.

    Hidden and whole tiles are never wrong. A mixed tile may be hidden or whole where the analysis cannot tell.

    Args:
        mask, causal: as `tileattn.attention` takes them; a function mask(b, h, q, k) needs no ranges.
        seqlen_q, seqlen_k: lengths, 1 or more.
        block_M, block_N: rows of Q, and of K and V, in a tile; None: 128, or the least multiple of it with which there
            are at most 512 tiles on the side.
        b, h: the batch element and the query head, from 0, for masks that depend on them.

    Raises:
        TypeError: the mask is no mask, or a function that cannot be traced.
        ValueError: a size is not an integer of at least 1, there are more than 512 tiles on a side, or the mask's
            tensors do not fit the lengths or have no such b or h.
    """
    check_sizes(seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    block_M, block_N = (
        _default(length) if block is None else block for length, block in ((seqlen_q, block_M), (seqlen_k, block_N))
    )
    check_sizes(block_M=block_M, block_N=block_N)
    check_tile_count(seqlen_q, "block_M", block_M)
    check_tile_count(seqlen_k, "block_N", block_N)
    normalized, traced, values = variant_of(mask, causal, seqlen_q, seqlen_k, b, h)
    allows = True if traced.allows is None else traced.allows
    kinds = tile_kinds(allows, values, *grid(seqlen_q, seqlen_k, block_M, block_N), b, h)
    return TileMap(kinds, seqlen_q, seqlen_k, block_M, block_N, described(normalized), by_mask=True)


def _default(length: int) -> int:
    return 128 * max(1, -(-length // (128 * MOST_TILES)))
