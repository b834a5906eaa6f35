"""The keys and values of one sequence in a cache, on a CPU: the lengths on the host, and the reading of keys.

Contiguous caches and large pages are read as views, without a copy. Small pages are gathered for a tile of keys at a
time. Rows past the length, and table entries that no key of the range needs, are not read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ....call.decoding import DecodeInputs, DecodeSizes
from ....call.sequences import spans_of

# Pages of at least this many tokens are read as views, one by one: a range of keys lies in few of them.
LARGE_PAGE = 256
# Elements of a tile: of a view of the cache, and of a copy, gathered from pages or converted to float32. A copy is read
# again, and must stay in the processor's cache until then.
TILE = 2**21
COPIED_TILE = 2**18


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

    def __init__(self, inputs: DecodeInputs, number: int, buffers: dict[str, Tensor] | None = None) -> None:
        """Of sequence `number`. What :meth:`tiles` copies to lies in `buffers`, which the sequences of a call share:
        fresh memory costs page faults."""
        self.k, self.v = inputs.k_cache, inputs.v_cache
        self.table = inputs.page_table
        self.number = number
        self.page_size = inputs.k_cache.shape[1]
        self.buffers = {} if buffers is None else buffers

    def __call__(self, keys: slice) -> tuple[Tensor, Tensor]:
        """k and v of a range of keys, (1, keys, kv_heads, dim): views, or gathered from pages.

        Raises:
            ValueError: the page table names a page that is not there.
        """
        self.check(keys)
        most = keys.stop - keys.start + 2 * self.page_size  # whole pages, in one piece
        k, v = ([x for _, x in self._pieces(cache, keys, most, {})] for cache in (self.k, self.v))
        return _joined(k)[None], _joined(v)[None]

    def tiles(self, cache: Tensor, keys: slice, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
        """The rows of `cache`, which is `k` or `v`, of a checked range of keys, in `dtype`, a tile at a time.

        A tile is a view of the cache where it can be; else it is copied to a buffer that the next one overwrites, and
        that is small enough to stay in the processor's cache until the tile has been used.

        Args:
            cache: `k` or `v`.
            keys: the range, which :meth:`check` accepts.
            dtype: of the tiles.

        Yields:
            The keys of a tile and their rows (kv_heads, keys, dim).
        """
        of_key = cache.shape[2] * cache.shape[3]
        converts = cache.dtype != dtype
        for piece, rows in self._pieces(cache, keys, max(COPIED_TILE // of_key, 1), self.buffers):
            step = max((COPIED_TILE if converts else TILE) // of_key, 1)
            for begin in range(piece.start, piece.stop, step):
                tile = slice(begin, min(begin + step, piece.stop))
                x = rows[tile.start - piece.start : tile.stop - piece.start]
                if converts:
                    x = _buffer(self.buffers, "converted", step, x, dtype).copy_(x)
                yield tile, x.transpose(0, 1)

    def are_views(self, dtype: torch.dtype) -> bool:
        """Whether any range of keys is a view of the caches in `dtype`."""
        return self.table is None and self.k.dtype == dtype

    def check(self, keys: slice) -> None:
        """Raises ValueError if the page table names a page that is not there, for a range of keys."""
        if self.table is None:
            return
        first, pages, count = keys.start // self.page_size, self._pages_of(keys), self.k.shape[0]
        lowest, highest = (int(x) for x in torch.aminmax(pages))
        if lowest < 0 or highest >= count:
            wrong = next(index for index, page in enumerate(pages.tolist()) if not 0 <= page < count)
            raise ValueError(
                f"page_table must name pages in 0 .. {count - 1} within the lengths, got {int(pages[wrong])} at "
                f"[{self.number}, {first + wrong}]"
            )

    def _pages_of(self, keys: slice) -> Tensor:
        assert self.table is not None
        return self.table[self.number, keys.start // self.page_size : -(-keys.stop // self.page_size)]

    def _pieces(
        self, cache: Tensor, keys: slice, gathered: int, buffers: dict[str, Tensor]
    ) -> Iterator[tuple[slice, Tensor]]:
        """Parts of a range of keys with their rows (keys, kv_heads, dim).

        The whole range of a contiguous cache, each of several large pages, or `gathered` keys of small pages.
        """
        if self.table is None:
            yield keys, cache[self.number, keys]
            return
        size, pages = self.page_size, self._pages_of(keys)
        first = keys.start // size
        at_once = 1 if size >= LARGE_PAGE else max(gathered // size, 1)
        numbers = pages.tolist() if size >= LARGE_PAGE else []
        for index in range(0, pages.shape[0], at_once):
            begin = (first + index) * size
            piece = slice(max(keys.start, begin), min(keys.stop, begin + at_once * size))
            if numbers:
                rows = cache[numbers[index]]
            else:
                some = pages[index : index + at_once]
                into = _buffer(buffers, "gathered", min(at_once, pages.shape[0]), cache[: some.shape[0]], cache.dtype)
                rows = torch.index_select(cache, 0, some, out=into).flatten(0, 1)
            yield piece, rows[piece.start - begin : piece.stop - begin]


def _buffer(buffers: dict[str, Tensor], name: str, most: int, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Memory of `like`'s shape in `dtype`, where `most` rows fit: that of the name, or fresh if it is too small."""
    rows = max(most, like.shape[0])
    count, needed = like.numel(), rows * like[:1].numel()
    if name not in buffers or buffers[name].numel() < needed:
        buffers[name] = torch.empty(needed, dtype=dtype)
    return buffers[name][:count].view(like.shape)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
