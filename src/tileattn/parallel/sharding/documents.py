"""The layout "documents": deals the documents of a packed sequence so that all ranks have the same area of scores.

A document whose area is more than a part of a rank's fair share is cut in zigzag over all ranks. The others are dealt
whole, the largest first, each to the rank with the least area so far (Graham 1969: longest processing time first). A
document that is dealt whole needs no communication.

Numbers of tokens differ from rank to rank, since a short document has less area for each of its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...variant.masks import Mask
from .layout import Layout, Run, zigzag_blocks
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
    sizes = dict(zip(documents, areas(mask, whole, documents, 1, heads)))
    share = sum(sizes.values()) / ranks
    dealt: list[list[Run]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for document in sorted(documents, key=lambda each: (-sizes[each], each.sequence)):
        if ranks > 1 and sizes[document] > _CUT_ABOVE * share:
            blocks = zigzag_blocks(document.stop, ranks)
            parts = [[Run(document.sequence, *span) for span in spans] for spans in blocks]
            for rank, part in enumerate(parts):
                dealt[rank] += part
                load[rank] += sum(areas(mask, whole, part, 1, heads))
        else:
            least = load.index(min(load))
            dealt[least].append(document)
            load[least] += sizes[document]
    return Layout("documents", tuple(bounds), tuple(tuple(sorted(runs)) for runs in dealt))
