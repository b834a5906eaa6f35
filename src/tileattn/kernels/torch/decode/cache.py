"""The keys and values of one sequence in a cache, on a CPU: the lengths on the host, and the reading of keys.

Contiguous caches are read as views, without a copy. Pages are gathered for a range of keys at a time. Rows past the
length, and table entries that no key of the range needs, are not read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ....call.decoding import DecodeInputs, DecodeSizes
from ....call.sequences import spans_of

# Pages of at least this many tokens are cut out as views and joined: a range of keys lies in few of them.
LARGE_PAGE = 256


class Sequence(NamedTuple):
    """One sequence of a decode call.

    number: its number in the batch. rows: its queries, as a slice of the second dimension of the tensor q[batch].
    batch: the row of q, 0 for packed queries. seqlen_k: its keys, those of its queries included.
    """

    number: int
    batch: int
    rows: slice
    seqlen_k: int

    @property
    def seqlen_q(self) -> int:
        """The number of queries."""
        return self.rows.stop - self.rows.start


def sequences(inputs: DecodeInputs, sizes: DecodeSizes) -> list[Sequence]:
    """The sequences of a call, in order.

    Raises:
        ValueError: a length is negative or larger than the capacity; or `cu_seqlens_q` does not start at 0, decreases,
            goes beyond q, or has a length above max_seqlen_q.
    """
    lengths = inputs.seqlens_k.tolist()
    for number, length in enumerate(lengths):
        if not 0 <= length <= sizes.capacity:
            raise ValueError(
                f"seqlens_k must lie in 0 .. {sizes.capacity}, the capacity of the caches, got {length} (sequence "
                f"{number})"
            )
    if inputs.cu_seqlens_q is None:
        return [Sequence(number, number, slice(0, sizes.max_seqlen_q), length) for number, length in enumerate(lengths)]
    spans = spans_of("q", inputs.cu_seqlens_q.tolist(), sizes.max_seqlen_q, sizes.total_q)
    return [Sequence(number, 0, span, length) for number, (span, length) in enumerate(zip(spans, lengths, strict=True))]


class Keys:
    """The keys and values of one sequence of a call, read a range at a time."""

    def __init__(self, inputs: DecodeInputs, number: int) -> None:
        self.k, self.v = inputs.k_cache, inputs.v_cache
        self.table = inputs.page_table
        self.number = number
        self.page_size = inputs.k_cache.shape[1]

    def __call__(self, keys: slice) -> tuple[Tensor, Tensor]:
        """k and v of a range of keys, (1, keys, kv_heads, dim): views, or gathered from pages.

        Raises:
            ValueError: the page table names a page that is not there.
        """
        if self.table is None:
            row = slice(self.number, self.number + 1)
            return self.k[row, keys], self.v[row, keys]
        first = keys.start // self.page_size
        pages = self.table[self.number, first : -(-keys.stop // self.page_size)]
        self._check(pages, first)
        within = slice(keys.start - first * self.page_size, keys.stop - first * self.page_size)
        if self.page_size >= LARGE_PAGE:
            parts = list(self._parts(pages.tolist(), within))
            k, v = ([cache[page, part] for page, part in parts] for cache in (self.k, self.v))
            return _joined(k)[None], _joined(v)[None]
        k, v = (cache.index_select(0, pages).flatten(0, 1)[None, within] for cache in (self.k, self.v))
        return k, v

    def _parts(self, pages: list[int], within: slice) -> Iterator[tuple[int, slice]]:
        """The pages, each with the slice of its tokens, of a range of tokens that counts from the first page."""
        for index, page in enumerate(pages):
            begin = index * self.page_size
            yield page, slice(max(within.start - begin, 0), min(within.stop - begin, self.page_size))

    def _check(self, pages: Tensor, first: int) -> None:
        count = self.k.shape[0]
        lowest, highest = (int(x) for x in torch.aminmax(pages))
        if lowest < 0 or highest >= count:
            wrong = next(index for index, page in enumerate(pages.tolist()) if not 0 <= page < count)
            raise ValueError(
                f"page_table must name pages in 0 .. {count - 1} within the lengths, got {int(pages[wrong])} at "
                f"[{self.number}, {first + wrong}]"
            )


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
