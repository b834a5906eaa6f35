"""How kernels read the lines of a call (visits.py): which of a job's tiles are visited.

The planning kernel counts a job's work in visited tiles. A part of a job is a run of tiles as without lines; the
kernels visit those of them that its line lists.
"""

from __future__ import annotations

from typing import Any

import tilelang.language as T
from tvm import tirx

from ..records import WIDTH

LISTED = ("first_line", "line_rows", "line_tiles")  # row of the first line in the plan; rows of a line; its tiles


def flat(plan: Any) -> Any:
    """The numbers of a plan, one after another."""
    rows, width = plan.shape
    return tirx.decl_buffer([rows * width], plan.dtype, plan.name, plan.data)


def line_at(arg: Any, number: Any) -> Any:
    """Where a line begins in the flat plan."""
    return (arg.first_line + number * arg.line_rows) * WIDTH


def before(arg: Any, line: Any, tile: Any) -> Any:
    """How many tiles of a line before this one are visited."""
    return flat(arg.plan)[line + tile]


def entry(arg: Any, line: Any, rank: Any) -> Any:
    """Twice the number of the rank-th tile that is visited, and 1 if it is whole."""
    return flat(arg.plan)[line + arg.line_tiles + 1 + rank]


def tile_in(entry: Any) -> Any:
    """The number of the tile."""
    return T.shift_right(entry, 1)


def ranks_of(f: Any, arg: Any, job: Any, lo: Any, hi: Any) -> dict[str, Any]:
    """Of the tiles [lo, hi) of a job: how many of its line are visited before them, and how many of them are."""
    if not f.call.listed:
        return {}
    rank = T.alloc_var("int32", init=before(arg, job.line, lo))[0]
    return {"rank": rank, "count": T.alloc_var("int32", init=before(arg, job.line, hi) - rank)[0]}


def count_of(f: Any, part: Any) -> Any:
    """How many tiles a part visits."""
    return part.count if f.call.listed else part.hi - part.lo


def entry_of(f: Any, arg: Any, job: Any, part: Any, number: Any) -> Any:
    """The entry of a tile that a part visits, by its number in the part; behind the last, of a tile without keys."""
    end = T.cast(2 * job.end, "int32")
    return T.if_then_else(number < part.count, entry(arg, job.line, part.rank + number), end)


def tile_of(f: Any, arg: Any, job: Any, part: Any, number: Any) -> Any:
    """The tile that a part visits, by its number in the part."""
    return tile_in(entry_of(f, arg, job, part, number)) if f.call.listed else part.lo + number


# --- In the planning kernel ---


def visited_by(arg: Any, item: Any, keys: Any, tiles: Any) -> Any:
    """How many of an item's tiles are visited, at least one."""
    if not arg.listed:
        return tiles
    line = T.alloc_var("int32", init=line_at(arg, item))[0]
    return T.alloc_var("int32", init=T.max(before(arg, line, keys.end) - before(arg, line, keys.first), 1))[0]


@T.macro
def tile_of_rank(arg, item, its_first, tiles, visited, rank):
    """The tile that is visited as the rank-th of a job, counted from the job's first; the first begins with the job.

    Beyond the last it is `tiles`.
    """
    tile = T.alloc_var("int32", init=0)
    if rank >= visited:
        tile = tiles
    else:
        if rank > 0:
            line = T.alloc_var("int32", init=line_at(arg, item))
            tile = tile_in(entry(arg, line, before(arg, line, its_first) + rank)) - its_first
    return tile
