"""Lists of tiles (tile_lists.py) of packed calls, made on the device before a launch. Imports no TileLang.

A packed call's kernels take their tiles of queries, or of keys, from a work list (packed/work_list.py). Here each of
its entries has a line: the n-th tile of a sequence whose run begins at entry `first` has the line ``first + n``. The
device knows how many entries there are and which sequence each is of, so a line's lengths and positions come from its
record, as tensors. Lines behind the last entry, and those of unused tail rows, list nothing.

In the forward pass the tiles of a sequence are taken by length: its longest lines first, a mixed tile counted twice.

The host reads nothing, and shapes depend on bounds that it knows: the rows of the tensors, and the longest that a
sequence may be. So a CUDA graph captures the operations with the call. The kernel of most masks (lists/) makes the same
lists in one launch or a few.

Memory: 4 bytes for each entry and each tile of the longest sequence, 8 or 12 an entry; where the mask depends on the
head, so many for each. Calls that would take more than `MOST_BYTES` walk over ranges.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...call.facts import AttentionCall, Packed
from ...call.inputs import Operands
from ...variant.evaluated import values_of
from ...variant.intervals.tiles import Kind
from ...variant.intervals.values import Ends
from ...variant.program import program
from .. import tile_lists
from ..tile_lists import Cut, TileLists, depends_on, fill_lists, is_listed, kinds_of, numbers_of
from .packed.work_list import COUNT, FIRST, K_LEN, Q_LEN, SEQUENCE, capacity

MOST_BYTES = 2**28


class PackedSizes(NamedTuple):
    """What the host knows of the sizes of a packed call.

    Attributes:
        sequences: how many there are.
        heads: of queries.
        total_q, total_k: rows of the tensors.
        max_seqlen_q, max_seqlen_k: the most rows of a sequence, as the caller says, and at most all.
    """

    sequences: int
    heads: int
    total_q: int
    total_k: int
    max_seqlen_q: int
    max_seqlen_k: int

    @classmethod
    def of(cls, packed: Packed, total_q: int, total_k: int, heads: int) -> PackedSizes:
        longest = min(packed.max_seqlen_q, total_q), min(packed.max_seqlen_k, total_k)
        return cls(packed.cu_seqlens_q.numel() - 1, heads, total_q, total_k, *longest)


class Shape(NamedTuple):
    """Of the lists of a call: planes, one for each head or one for all, lines of a plane, and tiles of a line."""

    planes: int
    lines: int
    capacity: int


class _Lines(NamedTuple):
    """What each line is of: int64 (lines, 1) tensors on the device, of zeros for a line that lists nothing.

    used: bool, whether the line is of a tile of a sequence that has queries and keys.
    number: which of its sequence's tiles it is of.
    """

    used: Tensor
    sequence: Tensor
    number: Tensor
    seqlen_q: Tensor
    seqlen_k: Tensor

    def part(self, lines: slice) -> _Lines:
        return _Lines(*(each[lines] for each in self))


class _Tiles(NamedTuple):
    """The tiles of some lines: positions of queries and keys, whether a tile exists, and whether it ends beyond the
    last key, or query (`Cut.masks_queries`), so that a kernel masks it."""

    q: Ends
    k: Ends
    exists: Tensor
    beyond: Tensor


def may_be_listed(call: AttentionCall) -> bool:
    """Whether a packed call takes its tiles from lists for some sizes."""
    return call.packed and call.variant != "" and call.dtype.itemsize == 2 and is_listed(call.variant)


def packed_pays(call: AttentionCall, sizes: PackedSizes, cuts: tuple[Cut, ...]) -> bool:
    """Whether a packed call takes its tiles from lists, by what the host knows: as a dense one of its longest sequence
    would (:func:`tile_lists.pays`), if none of the lists is too large.

    Its kernels must be those of the Hopper schedules, which the caller knows.

    Args:
        cuts: of its kernels.
    """
    if not may_be_listed(call):
        return False
    tiles = -(-sizes.max_seqlen_q // tile_lists.USUAL_TILE) * -(-sizes.max_seqlen_k // tile_lists.USUAL_TILE)
    return tiles >= tile_lists.FEWEST_TILES and all(bytes_of(call.variant, sizes, cut) <= MOST_BYTES for cut in cuts)


def bytes_of(variant: str, sizes: PackedSizes, cut: Cut) -> int:
    """The bytes that the lists of a call take."""
    shape = _shape(variant, sizes, cut)
    return 4 * shape.planes * shape.lines * (shape.capacity + (3 if cut.longest_first else 2))


def _shape(variant: str, sizes: PackedSizes, cut: Cut) -> Shape:
    return shape_of(sizes, cut, _differs_by(variant, "h"))


def shape_of(sizes: PackedSizes, cut: Cut, by_head: bool) -> Shape:
    """The shape of a call's lists; `by_head`: whether the mask depends on the head."""
    listed, block = (sizes.max_seqlen_q, cut.block_M) if cut.by_keys else (sizes.max_seqlen_k, cut.block_N)
    rows, tile = (sizes.total_k, cut.block_N) if cut.by_keys else (sizes.total_q, cut.block_M)
    return Shape(sizes.heads if by_head else 1, capacity(rows, sizes.sequences, tile), max(-(-listed // block), 1))


@functools.lru_cache(maxsize=1024)
def _differs_by(variant: str, name: str) -> bool:
    return depends_on(program(variant), name)


def make_packed_lists(variant: str, operands: Operands, sizes: PackedSizes, cut: Cut, work: Tensor) -> TileLists:
    """The lists of a packed call.

    The line of tile n of a sequence's run and head h is ``h * head_step + first + n``; there is no step by sequences.

    Args:
        variant: the key of a mask, and of score modifications, which have no part in it.
        operands: of the variant; tensors on the device.
        sizes: whose rows are at least 1.
        cut: with `longest_first`, `rows` of :class:`TileLists` has for each sequence's lines, in their places, its
            tiles in ascending order of length: kernels take them from the last place on. The lines stay in the order
            of tiles.
        work: the work list, int32 (1 + entries, WIDTH), of tiles of the cut's rows.
    """
    shape = _shape(variant, sizes, cut)
    lines = _lines(work)
    tiles = work.new_empty(*shape)
    counts = work.new_empty(shape.planes, shape.lines, 2)
    planes_at_once = max(tile_lists.MOST_AT_ONCE // (shape.lines * shape.capacity), 1)
    lines_at_once = min(max(tile_lists.MOST_AT_ONCE // shape.capacity, 1), shape.lines)
    for first in range(0, shape.planes, planes_at_once):
        heads = slice(first, min(first + planes_at_once, shape.planes))
        for line in range(0, shape.lines, lines_at_once):
            part = slice(line, min(line + lines_at_once, shape.lines))
            kinds = _kinds_of_lines(variant, operands, sizes, cut, lines.part(part), heads)
            # A part has all lines, or one plane.
            of_part, of_counts = (x[heads, part].view(-1, x.shape[2]) for x in (tiles, counts))
            fill_lists(kinds.flatten(0, 1), of_part, of_counts)
    order = _by_length(counts, work, shape.capacity) if cut.longest_first else None
    by_head = _differs_by(variant, "h")
    return TileLists(tiles.flatten(0, 1), counts.flatten(0, 1), 0, shape.lines * by_head, order)


def _lines(work: Tensor) -> _Lines:
    """The lines of a work list's entries. What lies behind the last entry was never written."""
    line = torch.arange(len(work) - 1, device=work.device)
    record = work[1:].long()
    used = (line < work[0, COUNT]) & (record[:, Q_LEN] > 0) & (record[:, K_LEN] > 0)
    sequence, number, seqlen_q, seqlen_k = (
        torch.where(used, each, 0)[:, None]
        for each in (record[:, SEQUENCE], line - record[:, FIRST], record[:, Q_LEN], record[:, K_LEN])
    )
    return _Lines(used[:, None], sequence, number, seqlen_q, seqlen_k)


def _kinds_of_lines(
    variant: str, operands: Operands, sizes: PackedSizes, cut: Cut, lines: _Lines, heads: slice
) -> Tensor:
    """The kinds of the tiles of some lines: int8 (planes, lines, capacity)."""
    traced, values, device = program(variant), values_of(operands), lines.used.device
    count = _shape(variant, sizes, cut).capacity
    of = _tiles_by_keys(sizes, cut, lines, count) if cut.by_keys else _tiles_by_queries(sizes, cut, lines, count)
    b: int | Ends = numbers_of(lines.sequence, sizes.sequences) if _differs_by(variant, "b") else 0
    h: int | Ends = 0
    if _differs_by(variant, "h"):
        h = numbers_of(torch.arange(heads.start, heads.stop, device=device)[:, None, None], sizes.heads)
    kinds: Any = kinds_of(traced, values, lines.seqlen_k, of.q, of.k, b, h)
    kinds = torch.where(of.beyond, kinds.clamp(max=Kind.MIXED), kinds)
    kinds = torch.where(of.exists, kinds, Kind.HIDDEN)
    return kinds.expand(heads.stop - heads.start, len(lines.used), count).to(torch.int8)


def _tiles_by_queries(sizes: PackedSizes, cut: Cut, lines: _Lines, count: int) -> _Tiles:
    """Of lines that are of tiles of queries. Tiles of keys are the same in all: the last one of a sequence may be
    judged by more keys than it has, which makes it mixed at worst."""
    row, offset = lines.number * cut.block_M, lines.seqlen_k - lines.seqlen_q
    last_row = torch.minimum(row + cut.block_M, lines.seqlen_q.clamp(min=1)) - 1
    key = torch.arange(0, count * cut.block_N, cut.block_N, device=row.device)
    return _Tiles(
        Ends(row + offset, last_row + offset, _span_of_queries(sizes), cut.block_M - 1),
        Ends(key, key + (cut.block_N - 1), (0, count * cut.block_N - 1), cut.block_N - 1),
        lines.used & (key < lines.seqlen_k),
        _is_beyond(cut, lines, row, key),
    )


def _tiles_by_keys(sizes: PackedSizes, cut: Cut, lines: _Lines, count: int) -> _Tiles:
    """Of lines that are of tiles of keys. Positions of queries depend on a sequence's lengths."""
    key = lines.number * cut.block_N
    last_key = torch.minimum(key + cut.block_N, lines.seqlen_k.clamp(min=1)) - 1
    row = torch.arange(0, count * cut.block_M, cut.block_M, device=key.device)
    of_row = lines.seqlen_q.clamp(min=1) - 1, lines.seqlen_k - lines.seqlen_q
    first_row, last_row = (torch.minimum(each, of_row[0]) + of_row[1] for each in (row, row + (cut.block_M - 1)))
    return _Tiles(
        Ends(first_row, last_row, _span_of_queries(sizes), cut.block_M - 1),
        Ends(key, last_key, (0, sizes.max_seqlen_k - 1), cut.block_N - 1),
        lines.used & (row < lines.seqlen_q),
        _is_beyond(cut, lines, row, key),
    )


def _is_beyond(cut: Cut, lines: _Lines, row: Tensor, key: Tensor) -> Tensor:
    """Whether tiles that begin at these rows and keys end beyond the last key, or query (`Cut.masks_queries`)."""
    beyond = key + cut.block_N > lines.seqlen_k
    return beyond | (row + cut.block_M > lines.seqlen_q) if cut.masks_queries else beyond


def _span_of_queries(sizes: PackedSizes) -> tuple[int, int]:
    """Bounds of all queries' positions; a line that lists nothing has position 0."""
    return 1 - sizes.max_seqlen_q, sizes.max_seqlen_k - 1


def _by_length(counts: Tensor, work: Tensor, capacity: int) -> Tensor:
    """The tiles of each run in ascending order of length, equal ones in the order of their rows, int32 (all lines,).

    Of counts (planes, lines, 2) of lines of `capacity` tiles.
    """
    line = torch.arange(counts.shape[1], device=work.device)
    # Behind the last entry each line is a run of its own.
    first = torch.where(line < work[0, COUNT], work[1:, FIRST].long(), line)
    # Lines of a run are neighbours, and runs ascend: sorted together, each run keeps its places.
    order = (first * (2 * capacity + 1) + counts.sum(2)).sort(dim=1, stable=True).indices
    return (order - first).to(torch.int32).flatten()
