"""The layout "documents": deals the documents of a packed sequence so that all ranks have the same area of scores.

A document whose area is more than a part of a rank's fair share is cut in zigzag, into as many pieces of equal area as
bring each below that part, but at most one for each rank. Whole documents and pieces are dealt the largest first, each
to the rank with the least area so far (Graham 1969: longest processing time first); a document with a piece for every
rank gives one to each. So a document moves between few ranks, and one that is dealt whole needs no communication.

Numbers of tokens differ from rank to rank, since a short document has less area for each of its tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...variant.masks import Mask
from .layout import Layout, Run, merged, zigzag_blocks
from .ranges import areas

_CUT_ABOVE = 0.25  # of the fair share: below, dealing whole documents evens out


def documents_layout(bounds: Sequence[int], ranks: int, mask: Mask | None, heads: int) -> Layout:
    """Deals documents over ranks.

    Args:
        bounds: cu_seqlens as ints: the first token of each document, and the number of tokens.
        ranks: the number of ranks.
        mask: the mask whose areas are balanced, with positions in a document and its number as batch index.
        heads: the number of query heads that the mask is asked about.
    """
    whole = Layout("documents", tuple(bounds), ((),))
    documents = [Run(number, 0, whole.length(number)) for number in range(len(bounds) - 1) if whole.length(number)]
    sizes = areas(mask, whole, documents, 1, heads)
    most = _CUT_ABOVE * sum(sizes) / ranks
    cut = [_pieces(document, min(ranks, math.ceil(size / most))) for document, size in zip(documents, sizes)]
    of_runs = iter(areas(mask, whole, [run for pieces in cut for piece in pieces for run in piece], 1, heads))
    measured = [[(sum(next(of_runs) for _ in piece), piece) for piece in pieces] for pieces in cut]
    dealt: list[list[Run]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for pieces in measured:
        if len(pieces) == ranks:  # one for each
            for rank, (area, piece) in enumerate(pieces):
                dealt[rank] += piece
                load[rank] += area
    others = [piece for pieces in measured if len(pieces) < ranks for piece in pieces]
    for area, piece in sorted(others, key=lambda each: (-each[0], each[1])):
        least = load.index(min(load))
        dealt[least] += piece
        load[least] += area
    return Layout("documents", tuple(bounds), tuple(merged(runs) for runs in dealt))


def _pieces(document: Run, count: int) -> list[list[Run]]:
    """A document in `count` pieces of zigzag, of equal area under a causal mask; none is empty."""
    blocks = zigzag_blocks(document.stop, count)
    return [[Run(document.sequence, *span) for span in spans] for spans in blocks if spans]
