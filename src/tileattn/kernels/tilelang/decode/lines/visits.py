"""The tiles of keys that a decode call visits, where its mask may hide tiles between others. Imports no TileLang.

A job (records.py) goes by its mask's range of keys. Where a mask has none, or one that says little, the interval
analysis tells which tiles are hidden from all rows of a job, and which are whole (kernels/decode_boxes.py).

These tiles are listed in *lines*, made on the device before the planning kernel, as part of the plan. There is one for
each tile of query rows, or, where the mask depends on the head, for each of its jobs. A line of T tiles is

    at t, 0 <= t <= T    how many of the tiles before t are visited
    from T + 1 on        of each tile that is visited, in ascending order, its number times 2, and 1 if it is whole

and one number more, that nobody reads. What lies behind a sequence's tiles is not read either. Here operations of
PyTorch make lines; the kernel of most masks makes the same ones (launch.py). Nothing is read on the host, and
shapes depend on sizes alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .....call.decoding import DecodeCall, DecodeInputs, DecodeSizes
from .....variant.program import program
from .... import tile_lists
from ....decode_boxes import Boxes
from ...lists.analysis import Analysis, Widths, analysis
from .. import records

# Fewer tiles of jobs are read before their lines would be made: by the kernel, and by some 100 operations.
FEWEST_TILES, FEWEST_BY_OPERATIONS = 2**12, 2**17
# Tiles of all lines: the plan would take more than 1 GB, and places in it are int32.
MOST_TILES = 2**27
# Kernels that make lines are compiled for so many queries, at most, and keys of a job's tile.
QUERIES, MOST_KEYS = (1, 64), 64


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
    return lines.all_tiles <= MOST_TILES and (call.fixed > 0 or of_jobs >= fewest)


def lines_of(call: DecodeCall, sizes: DecodeSizes, block_M: int, block_N: int) -> Lines:
    """The lines of a call."""
    rows = (sizes.total_q if call.packed else sizes.max_seqlen_q) * (sizes.heads // sizes.kv_heads)
    items = (records.packed_items if call.packed else records.dense_items)(sizes.batch, rows, block_M)
    lines: Lines = Lines.of(program(call.variant), sizes, block_M, block_N, items)
    return lines


class Lines(Boxes):
    """Which lines a call has, and how they are made: one for each box."""

    __slots__ = ()

    @property
    def rows_of_each(self) -> int:
        """Rows of the plan that a line takes."""
        return records.line_rows(self.tiles)

    @property
    def rows(self) -> int:
        """Rows of the plan that all lines take."""
        return self.items * self.planes * self.rows_of_each

    @property
    def queries(self) -> int:
        """For how many queries of an item the kernel is that makes lines: one of QUERIES."""
        return next((each for each in QUERIES if self.most_queries < each), QUERIES[-1])

    def write(self, inputs: DecodeInputs, out: Tensor) -> None:
        """Writes all lines to rows of the plan."""
        table = out.view(self.items, self.planes, -1)
        for items, seen, whole in self.parts(inputs, out.device):
            _fill(seen, whole, table[items])


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
