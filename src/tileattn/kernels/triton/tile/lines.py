"""Lists of tiles in kernels (kernels/tile_lists.py): where a program's line is, and the tile of each step of a loop.

A tile of a list may be several of a kernel (lists.py). Their steps follow one another.
"""

import triton
import triton.language as tl


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
