"""Masks of any kind on small calls, for tests that look at every position."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from tileattn import (
    Causal,
    Dilated,
    Documents,
    FunctionMask,
    GlobalTokens,
    ImageTextDocuments,
    KeyPadding,
    Mask,
    Neighborhood,
    PrefixLM,
    SlidingWindow,
    Strided,
)

BATCH, HEADS = 2, 2


class Side(NamedTuple):
    """The ranges of one side, keys or queries, that a mask knows for tiles of the other.

    Attributes:
        any, all: the mask's questions.
        tiled: lengths and first position of the side that is cut into tiles.
        length, first: of the side on which the ranges lie.
        allowed: (batch, heads, tiled, length).
    """

    any: str
    all: str
    tiled: int
    first_tiled: int
    length: int
    first: int
    allowed: Tensor

    def tiles(self) -> list[tuple[int, int]]:
        """First and last index of every tile of every size."""
        return [(lo, hi) for lo in range(self.tiled) for hi in range(lo, self.tiled)]


class Positions:
    """All (b, h, q, k) of a call, and the mask on them."""

    def __init__(self, mask: Mask, batch: int, heads: int, seqlen_q: int, seqlen_k: int) -> None:
        self.batch, self.heads, self.seqlen_q, self.seqlen_k = batch, heads, seqlen_q, seqlen_k
        self.first = seqlen_k - seqlen_q  # the position of row 0
        self.mask = mask
        b, h, row, k = torch.meshgrid(*(torch.arange(n) for n in (batch, heads, seqlen_q, seqlen_k)), indexing="ij")
        self.allowed = torch.as_tensor(mask.allows(b, h, row + self.first, k)).expand(b.shape)
        self.keys = Side("kv_range", "full_range", seqlen_q, self.first, seqlen_k, 0, self.allowed)
        self.queries = Side("q_range", "full_q_range", seqlen_k, 0, seqlen_q, self.first, self.allowed.mT)

    def ranges(self, side: Side, lo: int, hi: int) -> dict[str, tuple[Tensor, Tensor]]:
        """Both ranges of the tile of indices lo..hi, as indices, (batch, heads) each; clamped as callers do."""
        b, h = torch.arange(self.batch)[:, None], torch.arange(self.heads)[None]
        tile = (torch.tensor(lo + side.first_tiled), torch.tensor(hi + side.first_tiled))
        questions = (side.any, side.all)
        return {name: self.clamped(side, getattr(self.mask, name)(b, h, *tile, self.seqlen_k)) for name in questions}

    def clamped(self, side: Side, ends: tuple[Any, Any]) -> tuple[Tensor, Tensor]:
        """A range of positions as indices within the side."""
        begin, end = (torch.as_tensor(x).expand(self.batch, self.heads) - side.first for x in ends)
        return begin.clamp(0, side.length), end.clamp(0, side.length)


# --- Hypothesis ---

lengths = st.integers(1, 9)
sizes = st.one_of(st.none(), st.integers(0, 10), st.just(2**30 - 1))


def windows() -> st.SearchStrategy[Mask]:
    return st.builds(SlidingWindow, sizes, sizes)


def prefixes() -> st.SearchStrategy[Mask]:
    length = st.integers(0, 12)
    tensor = st.lists(length, min_size=BATCH, max_size=BATCH).map(torch.tensor)
    return st.builds(PrefixLM, st.one_of(length, tensor, length.map(lambda n: torch.tensor([n]))))


def documents(seqlen_k: int, in_order: bool = False) -> st.SearchStrategy[Mask]:
    row = st.lists(st.integers(-2, 3), min_size=seqlen_k, max_size=seqlen_k)
    row = row.map(sorted) if in_order else row
    return st.one_of(row, st.lists(row, min_size=BATCH, max_size=BATCH)).map(lambda ids: Documents(torch.tensor(ids)))


def paddings(seqlen_k: int, one_side: bool = False) -> st.SearchStrategy[Mask]:
    row = st.lists(st.booleans(), min_size=seqlen_k, max_size=seqlen_k)
    row = row.map(sorted) if one_side else row
    rows = st.one_of(st.lists(row, min_size=n, max_size=n) for n in (1, BATCH))
    either = st.sampled_from([slice(None), slice(None, None, -1)])
    return st.builds(lambda rows, order: KeyPadding(torch.tensor([x[order] for x in rows])), rows, either)


def dilated() -> st.SearchStrategy[Mask]:
    return st.builds(lambda left, right, step: Dilated(left, right, dilation=step), sizes, sizes, st.integers(1, 5))


def strided() -> st.SearchStrategy[Mask]:
    return st.builds(Strided, st.integers(1, 5), st.integers(0, 4))


def global_tokens(seqlen_k: int) -> st.SearchStrategy[Mask]:
    row = st.lists(st.booleans(), min_size=seqlen_k, max_size=seqlen_k)
    rows = st.one_of(st.lists(row, min_size=n, max_size=n) for n in (1, BATCH))
    return st.one_of(st.integers(0, 12), rows.map(torch.tensor)).map(GlobalTokens)


def neighborhoods() -> st.SearchStrategy[Mask]:
    """Grids that may be shorter or longer than the sequence."""
    dimension = st.integers(1, 4).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n)))
    return st.lists(dimension, min_size=1, max_size=3).map(lambda dims: Neighborhood(*map(tuple, zip(*dims))))


def images(seqlen_k: int) -> st.SearchStrategy[Mask]:
    def rows(ids: st.SearchStrategy[int]) -> st.SearchStrategy[torch.Tensor]:
        row = st.lists(ids, min_size=seqlen_k, max_size=seqlen_k)
        return st.lists(row, min_size=BATCH, max_size=BATCH).map(torch.tensor)

    return st.builds(ImageTextDocuments, rows(st.integers(-1, 1)), rows(st.integers(-2, 1)))


FUNCTIONS: list[Callable[..., Any]] = [
    lambda b, h, q, k: (q + k + h) % 3 != b,
    lambda b, h, q, k: (k % 4 == 0) | (q == k),
]


def any_mask(seqlen_k: int) -> st.SearchStrategy[Mask]:
    simple = st.one_of(
        st.builds(Causal),
        windows(),
        prefixes(),
        documents(seqlen_k),
        documents(seqlen_k, in_order=True),
        paddings(seqlen_k),
        dilated(),
        strided(),
        global_tokens(seqlen_k),
        neighborhoods(),
        images(seqlen_k),
        st.sampled_from(FUNCTIONS).map(FunctionMask),
    )
    return st.recursive(
        simple, lambda inner: st.builds(lambda x, y, both: x & y if both else x | y, inner, inner, st.booleans()),
        max_leaves=4,
    )  # fmt: skip


@st.composite
def positions(draw: Any, masks: Callable[[int], st.SearchStrategy[Mask]] = any_mask) -> Positions:
    seqlen_q, seqlen_k = draw(lengths), draw(lengths)
    return Positions(draw(masks(seqlen_k)), BATCH, HEADS, seqlen_q, seqlen_k)
