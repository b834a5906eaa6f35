"""Lists of tiles in kernels (kernels/tile_lists.py): where a program's line is, and the tile of each step of a loop.

A tile of a list may be several of a kernel (lists.py). Their steps follow one another.
"""

import triton
import triton.language as tl

from .tiles import phases


@triton.jit
def line_of(lists, b, h, first, seqlen, block: tl.constexpr, plan: tl.constexpr):
    """Of the program whose own tile begins at row `first`: its line, and how many steps have a mask, and are taken.

    lists: tiles, counts, batch_step and head_step of :class:`tileattn.kernels.tile_lists.TileLists`.
    seqlen, block: of what the loop walks over.
    """
    tiles, counts, batch_step, head_step = lists
    number = (b * batch_step + h * head_step + first // plan.line_rows).to(tl.int64)
    mixed = tl.load(counts + 2 * number) * plan.listed
    visited = tl.load(counts + 2 * number + 1) * plan.listed
    return tiles + number * tl.cdiv(seqlen, plan.listed * block), mixed, visited


@triton.jit
def over_keys(lists, operands, b, h, first, q_lo, q_hi, seqlen_k, plan: tl.constexpr):
    """How a program with a tile of queries walks over keys: its line, 0 without lists, and the ends of its loops.

    first: the tile's first row; q_lo, q_hi: positions of its first and last query. Ends are as of `phases` in tiles.py.
    """
    if plan.listed:
        line, mixed, visited = line_of(lists, b, h, first, seqlen_k, plan.block_N, plan)
        start, full_start, full_end, end = 0, mixed, visited, visited
    else:
        line = 0
        tensors, numbers = operands
        start, full_start, full_end, end = phases(
            plan.any_range(b, h, q_lo, q_hi, seqlen_k, tensors, numbers),
            plan.full_range(b, h, q_lo, q_hi, seqlen_k, tensors, numbers),
            0,
            seqlen_k,
            plan.block_N,
        )
    return line, start, full_start, full_end, end


@triton.jit
def tile_of(at, end, line, block: tl.constexpr, plan: tl.constexpr):
    """The first row of the tile of step `at` of a loop that ends at `end`, or of the last step; without lists `at`."""
    if plan.listed == 0:
        first = at
    else:
        at = tl.maximum(tl.minimum(at, end - 1), 0)
        place = at // plan.listed
        # The tile at this place, times plan.listed, and then at % plan.listed more.
        first = ((tl.load(line + place) - place) * plan.listed + at) * block
    return first


@triton.jit
def step_of(at, ahead, end, line, block: tl.constexpr, plan: tl.constexpr):
    """The first row of step `at`'s tile, and with lists that of the next step's.

    Read a step ahead, a tile's number is there when its copies begin. Read in its own step, Triton's pipeliner would
    take it for a load of its own, and begin the copies of K and V later or with more buffers.
    """
    if plan.listed == 0:
        first = at
    else:
        first, ahead = ahead, tile_of(at + 1, end, line, block, plan)
    return tl.multiple_of(first, block), ahead
