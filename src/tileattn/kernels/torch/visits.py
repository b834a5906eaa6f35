"""The keys that blocks of rows visit under any mask, a user's function included.

The ranges that a mask defines say it for one range of keys. For functions, and for masks joined by `|`, the interval
analysis (:mod:`tileattn.variant.intervals`) says of each cell, a block of rows by `CELL` keys, whether it is hidden or
seen as a whole.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...variant.evaluated import EvaluatedMask
from ...variant.expression import has_symbol
from ...variant.intervals.tiles import Kind, common, grid, numbers, tile_kinds, traced
from ...variant.intervals.values import Ends
from ...variant.masks import And, Mask, Or
from .mask import KeyRange, ScoreMatrix, Stretch, key_ranges

CELL = 64
# Fewer hidden keys than this between two visited ones cost less than one tile more.
GAP = 128
# Below so many scores, of all heads, the analysis takes longer than it saves.
FEWEST_SCORES = 2**21


class Visits:
    """The visited keys of a matrix, for blocks of several sizes: its cells are analysed once, for the smallest.

    block_M: the smallest number of rows of a block, of which all others are multiples.
    """

    def __init__(self, matrix: ScoreMatrix, block_M: int) -> None:
        self.matrix, self.block_M = matrix, block_M
        mask, heads = matrix.mask, matrix.heads * (matrix.batch.stop - matrix.batch.start)
        few = heads * matrix.seqlen_q * matrix.seqlen_k < FEWEST_SCORES
        kinds = None if mask is None or few or not _is_analysed(mask) else _kinds(matrix, mask, block_M)
        # Where every cell is mixed, a mask's own ranges say as much.
        self.kinds = None if kinds is None or bool((kinds == Kind.MIXED).all()) else kinds

    def keys(self, block_M: int, gap: int | None = None) -> list[list[KeyRange]]:
        """The keys of each block of rows: one list for all batch elements, or a list for each if they differ.

        gap: hidden keys between two visited ones are visited too, if there are at most so many; None: `GAP`.
        """
        ranges, gap = key_ranges(self.matrix, block_M), GAP if gap is None else gap
        if self.kinds is None:
            return ranges
        cells = [_runs(element) for element in _pooled(self.kinds, block_M // self.block_M)]
        return [
            [_joined(seen, runs, gap) for seen, runs in zip(ranges[i % len(ranges)], cells[i % len(cells)])]
            for i in range(max(len(ranges), len(cells)))
        ]


def _is_analysed(mask: Mask) -> bool:
    """Whether the mask's own ranges may say less than the analysis does."""
    if isinstance(mask, And):
        return _is_analysed(mask.x) or _is_analysed(mask.y)
    return isinstance(mask, (EvaluatedMask, Or))


def _kinds(matrix: ScoreMatrix, mask: Mask, block_M: int) -> Tensor:
    """The kind of each cell for all heads together: int8 (batch or 1, blocks, cells)."""
    allows, values = (mask.program.allows, mask.values) if isinstance(mask, EvaluatedMask) else traced(mask)
    q, k = grid(matrix.seqlen_q, matrix.seqlen_k, block_M, CELL, matrix.device)
    first, end = matrix.numbers.start, matrix.numbers.stop
    element = matrix.arange(matrix.numbers)[:, None, None, None]
    b = Ends(element, element, (first, end - 1), 0) if has_symbol(allows, "b") else first
    h = numbers(matrix.heads, 3, matrix.device) if has_symbol(allows, "h") else 0
    kinds = tile_kinds(allows, values, q, k, b, h)
    kinds = kinds.reshape(-1, *kinds.shape[-3:]) if kinds.dim() > 2 else kinds[None, None]
    kinds = common(kinds, 1)
    return kinds[:1] if bool((kinds == kinds[:1]).all()) else kinds


def _pooled(kinds: Tensor, rows: int) -> Tensor:
    """The kinds of blocks that are `rows` times as high; the last block may be lower."""
    if rows == 1:
        return kinds
    more = -kinds.shape[1] % rows
    kinds = torch.cat([kinds, kinds[:, -1:].expand(-1, more, -1)], dim=1)
    return common(kinds.unflatten(1, (-1, rows)), 2)


def _runs(kinds: Tensor) -> list[list[tuple[int, int, int]]]:
    """For each row of cells its runs of equal kinds: (first cell, end, kind)."""
    count = kinds.shape[1]
    row, cell = (kinds[:, 1:] != kinds[:, :-1]).nonzero(as_tuple=True)
    ends: list[list[int]] = [[] for _ in kinds]
    for i, end in zip(row.tolist(), (cell + 1).tolist()):
        ends[i].append(end)
    firsts = [[0, *each] for each in ends]
    of_rows = [kinds[i, first].tolist() for i, first in enumerate(firsts)]
    return [list(zip(first, [*end, count], kind)) for first, end, kind in zip(firsts, ends, of_rows)]


def _joined(seen: KeyRange, runs: list[tuple[int, int, int]], gap: int) -> KeyRange:
    """A block's keys by both its range and its runs of cells."""
    visited, full = [], [(seen.full_lo, seen.full_hi)] if seen.full_lo < seen.full_hi else []
    for first, end, kind in runs:
        keys = max(first * CELL, seen.lo), min(end * CELL, seen.hi)
        if keys[0] < keys[1] and kind != Kind.HIDDEN:
            visited.append(keys)
            full += [keys] * (kind == Kind.WHOLE)
    parts, full = _merged(visited, gap), _merged(sorted(full), 0)
    if not parts:
        return KeyRange(0, 0, 0, 0)
    stretches = tuple(
        Stretch(lo, hi, tuple(each for each in full if each[0] < hi and lo < each[1])) for lo, hi in parts
    )
    return KeyRange(parts[0][0], parts[-1][1], seen.full_lo, seen.full_hi, stretches)


def _merged(spans: list[tuple[int, int]], gap: int) -> list[tuple[int, int]]:
    """Spans in order, of which those at most `gap` apart are joined."""
    joined: list[tuple[int, int]] = []
    for lo, hi in spans:
        if joined and lo - joined[-1][1] <= gap:
            joined[-1] = joined[-1][0], max(hi, joined[-1][1])
        else:
            joined.append((lo, hi))
    return joined
