"""The tiles of keys that a decode call visits, where its mask may hide tiles between others. Imports no TileLang.

A job (records.py) goes by its mask's range of keys. A user's function has no range, of masks joined by `|` the range is
a hull, and blocks that a model chooses lie anywhere. Of these the interval analysis tells which tiles are hidden from
all rows of a job, and which are whole: a job's rows are a box of queries and of the heads of a group.

These tiles are listed in *lines*, made on the device before the planning kernel, as part of the plan. There is one for
each tile of query rows, or, where the mask depends on the head, for each of its jobs. A line of T tiles is

    at t, 0 <= t <= T    how many of the tiles before t are visited
    from T + 1 on        of each tile that is visited, in ascending order, its number times 2, and 1 if it is whole

and one number more, that nobody reads. What lies behind a sequence's tiles is not read either. Here operations of
PyTorch make lines; the kernel of most masks makes the same ones (launch.py). Nothing is read on the host, and
shapes depend on sizes alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .....call.decoding import DecodeCall, DecodeInputs, DecodeSizes
from .....variant.evaluated import values_of
from .....variant.expression import Expr
from .....variant.intervals.tiles import Kind, tile_kinds
from .....variant.intervals.values import Ends
from .....variant.program import Program, program
from .....variant.reading import evaluate
from .... import tile_lists
from ...lists.analysis import Analysis, Widths, analysis
from .. import records
from ..ranges import differs_by_head, mask_differs_by_head, names_in_range

# Fewer tiles of jobs are read before their lines would be made: by the kernel, and by some 100 operations.
FEWEST_TILES, FEWEST_BY_OPERATIONS = 2**12, 2**17
# Tiles of all lines: the plan would take more than 1 GB, and places in it are int32.
MOST_TILES = 2**27
# Kernels that make lines are compiled for so many queries, at most, and keys of a job's tile.
QUERIES, MOST_KEYS = (1, 64), 64
# Lines are made together up to so many tiles, so that bounds in 64 bits take some 100 MB at most.
MOST_AT_ONCE = 2**21


def widths(queries: int) -> Widths:
    """By how much the last query of a job's tile exceeds the first, at most, and the last key."""
    return queries - 1, MOST_KEYS - 1


def analysis_of(variant: str, queries: int) -> Analysis | None:
    """What the kernel computes for a tile of at most so many queries, one of QUERIES; None where there is no kernel."""
    found = analysis(variant, widths(queries))
    return None if found is None or found.row_loads or found.column_loads else found


def is_listed(call: DecodeCall, sizes: DecodeSizes, block_M: int, block_N: int) -> bool:
    """Whether a call that has rows visits the tiles of lines.

    With a FixedSplit it does whenever the mask may have gaps, so that one kernel computes calls of all sizes.
    """
    if not call.variant or not tile_lists.is_listed(call.variant) or 0 in (sizes.batch, sizes.capacity):
        return False
    lines = lines_of(call, sizes, block_M, block_N)
    of_jobs = lines.items * sizes.kv_heads * lines.tiles
    fewest = FEWEST_TILES if analysis_of(call.variant, lines.queries) else FEWEST_BY_OPERATIONS
    return lines.items * lines.planes * lines.tiles <= MOST_TILES and (call.fixed > 0 or of_jobs >= fewest)


def lines_of(call: DecodeCall, sizes: DecodeSizes, block_M: int, block_N: int) -> Lines:
    """The lines of a call."""
    traced, group = program(call.variant), sizes.heads // sizes.kv_heads
    rows = (sizes.total_q if call.packed else sizes.max_seqlen_q) * group
    items = (records.packed_items if call.packed else records.dense_items)(sizes.batch, rows, block_M)
    planes = sizes.kv_heads if mask_differs_by_head(traced) else 1
    return Lines(traced, sizes, block_M, block_N, items, planes, -(-sizes.capacity // block_N))


class Rows(NamedTuple):
    """Of some items: the sequence, its number of keys, the first and the last position of queries; (items, 1, 1)."""

    b: Tensor
    seqlen: Tensor
    q_lo: Tensor
    q_hi: Tensor


class Lines(NamedTuple):
    """Which lines a call has, and how they are made.

    Attributes:
        traced: the variant.
        sizes: of the call.
        block_M, block_N: packed query rows of a job, and keys of a tile.
        items: see records.py.
        planes: lines of an item. Line number ``item * planes + kv_head`` is of a job; with one plane ``item`` of all.
        tiles: of a line.
    """

    traced: Program
    sizes: DecodeSizes
    block_M: int
    block_N: int
    items: int
    planes: int
    tiles: int

    @property
    def rows_of_each(self) -> int:
        """Rows of the plan that a line takes."""
        return records.line_rows(self.tiles)

    @property
    def rows(self) -> int:
        """Rows of the plan that all lines take."""
        return self.items * self.planes * self.rows_of_each

    @property
    def most_queries(self) -> int:
        """By how much the last query of an item exceeds the first, at most."""
        group = self.sizes.heads // self.sizes.kv_heads
        return max(min(self.sizes.max_seqlen_q - 1, -(-(self.block_M - 1) // group)), 0)

    @property
    def queries(self) -> int:
        """For how many queries of an item the kernel is that makes lines: one of QUERIES."""
        return next((each for each in QUERIES if self.most_queries < each), QUERIES[-1])

    def write(self, inputs: DecodeInputs, out: Tensor) -> None:
        """Writes all lines to rows of the plan.

        The planning kernel reports lengths that are wrong; here they are clamped, and lines are of any tiles then.
        """
        table = out.view(self.items, self.planes, -1)
        at_once = max(MOST_AT_ONCE // (self.tiles * self.planes), 1)
        for first in range(0, self.items, at_once):
            end = min(first + at_once, self.items)
            rows = self.rows_of(inputs, torch.arange(first, end, device=out.device))
            _fill(*self.seen(inputs, rows), table[first:end])

    def rows_of(self, inputs: DecodeInputs, item: Tensor) -> Rows:
        """The rows of items, as the planning kernel finds them."""
        sizes, block_M, ends = self.sizes, self.block_M, inputs.cu_seqlens_q
        group, longest = sizes.heads // sizes.kv_heads, sizes.max_seqlen_q
        if ends is None:
            q_tiles = -(-longest * group // block_M)
            b, q_tile = item // q_tiles, item % q_tiles
            q_len = torch.full_like(b, longest)
        else:
            ends = ends.long()
            first_items = ends[:-1] * group // block_M + torch.arange(sizes.batch, device=item.device)
            b = (torch.searchsorted(first_items, item, right=True) - 1).clamp(0, sizes.batch - 1)
            q_tile, q_len = item - first_items[b], ends.diff()[b].clamp(0, longest)
        seqlen = inputs.seqlens_k.long().clamp(0, sizes.capacity)[b]
        row0 = q_tile * block_M
        last = torch.minimum(row0 + block_M, q_len * group) - 1
        begin, low, high = seqlen - q_len, -longest, sizes.capacity - 1
        q_lo = q_hi = (begin + row0 // group).clamp(low, high)
        if self.most_queries > 0:  # else the analysis sees that they are the same
            q_hi = (begin + last // group).clamp(low, high).clamp(q_lo, q_lo + self.most_queries)
        b, seqlen, q_first = (each[:, None, None] for each in (b, seqlen, q_lo))
        return Rows(b, seqlen, q_first, q_first if q_hi is q_lo else q_hi[:, None, None])

    def seen(self, inputs: DecodeInputs, rows: Rows) -> tuple[Tensor, Tensor]:
        """Which tiles are visited, and which are whole: bool (items, planes, tiles)."""
        sizes, block_N, traced = self.sizes, self.block_N, self.traced
        k_lo = torch.arange(self.tiles, device=rows.b.device) * block_N
        k_hi = torch.minimum(k_lo + (block_N - 1), (rows.seqlen - 1).clamp(min=0)).maximum(k_lo)
        values = values_of(inputs.operands)
        kinds = tile_kinds(
            traced.allows,
            values,
            Ends(rows.q_lo, rows.q_hi, (-sizes.max_seqlen_q, sizes.capacity - 1), self.most_queries),
            Ends(k_lo, k_hi, (0, sizes.capacity - 1), block_N - 1),
            Ends(rows.b, rows.b, (0, sizes.batch - 1), 0),
            self._heads(rows.b.device),
        ).expand(len(rows.b), self.planes, self.tiles)
        seen = (kinds != Kind.HIDDEN) & (k_lo < rows.seqlen)
        place = {**values, "b": rows.b, "q_lo": rows.q_lo, "q_hi": rows.q_hi, "seqlen_k": rows.seqlen}
        if names_in_range(traced):
            lo, hi = (evaluate(bound, place) if isinstance(bound, Expr) else bound for bound in traced.kv_range)
            seen = seen & (k_hi >= lo) & (k_lo < hi)
        if any(isinstance(bound, Expr) for bound in traced.full_range) and not any(
            map(differs_by_head, traced.full_range)
        ):
            lo, hi = (evaluate(bound, place) if isinstance(bound, Expr) else bound for bound in traced.full_range)
            kinds = kinds.where((k_lo < lo) | (k_hi >= hi), Kind.WHOLE)
        # Keys behind the sequence's last have scores as well, which the mask hides.
        return seen, (kinds == Kind.WHOLE) & (k_lo + block_N <= rows.seqlen)

    def _heads(self, device: torch.device) -> Ends:
        """The heads of all rows of each plane: those of a kv head's group, or all, of which the mask knows nothing."""
        count = self.sizes.heads // self.planes
        first = torch.arange(self.planes, device=device)[:, None] * count
        return Ends(first, first if count == 1 else first + (count - 1), (0, self.sizes.heads - 1), count - 1)


def _fill(seen: Tensor, whole: Tensor, lines: Tensor) -> None:
    """Writes lines, int32 (items, planes, numbers)."""
    tiles = seen.shape[-1]
    upto = seen.cumsum(-1)
    lines[..., 0] = 0
    lines[..., 1 : tiles + 1] = upto
    # What is hidden is written behind all entries that there can be.
    place = (upto - 1).where(seen, tiles) + (tiles + 1)
    entry = torch.arange(tiles, device=lines.device) * 2 + whole
    lines.scatter_(-1, place, entry.to(torch.int32))
