"""How the plan of a decode call deals its sequences to the blocks of the GPU, computed on the host.

The planning kernel (kernels/tilelang/decode/plan_kernel.py) deals on the device. :func:`deal` is its rule in plain
Python, for one query tile per sequence and work that is dealt freely; a test compares both.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from tileattn.viz.style import BLUE, GREEN, LIGHT, ORANGE, RED, counted, empty_figure, heading, titled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OVERHEAD = 1  # of a job, in tiles
LEAST_KEYS = 128  # of a block
MOST_WORK = 0.75  # of the blocks: where fewer share jobs of one length evenly, the others stay idle
BLOCKS_OF_SM = 2  # blocks that share a multiprocessor (Hopper)
TILES_OF_FEW = 20  # of a multiprocessor: with no more, one block of each has work
COLOURS = (BLUE, ORANGE, GREEN, RED, "#56B4E9", "#CC79A7", "#F0E442")


@dataclass(frozen=True)
class Part:
    """The tiles of keys [first, end) of one sequence and kv head, which one block computes."""

    block: int
    sequence: int
    kv_head: int
    first: int
    end: int


def deal(lengths: Sequence[int], kv_heads: int, block_N: int, blocks: int) -> list[Part]:
    """The parts of all blocks, in order. Blocks without work have none; a job without keys is a part of no tiles."""
    jobs = [(b, head, -(-length // block_N)) for b, length in enumerate(lengths) for head in range(kv_heads)]
    starts = list(accumulate((max(tiles, 1) + OVERHEAD for _, _, tiles in jobs), initial=0))
    tiles, multiprocessors = starts[-1] - OVERHEAD * len(jobs), max(blocks // BLOCKS_OF_SM, 1)
    is_short = tiles <= TILES_OF_FEW * multiprocessors
    workers = even_workers(len(jobs), multiprocessors if is_short else blocks)
    active = _active(tiles, len(jobs), workers, block_N)
    begins = []
    for block in range(active):
        place = block * starts[-1] // active
        job = bisect_right(starts, place) - 1
        tile = place - starts[job]
        begins.append((job, tile) if tile < max(jobs[job][2], 1) else (job + 1, 0))
    begins.append((len(jobs), 0))
    parts = []
    for block in range(active):
        (job, tile), (last, cut) = begins[block], begins[block + 1]
        for number in range(job, last + (cut > 0)):
            b, head, tiles = jobs[number]
            parts.append(Part(block, b, head, tile if number == job else 0, cut if number == last else tiles))
    return parts


def even_workers(jobs: int, blocks: int) -> int:
    """How many blocks are to work: a multiple of the jobs or, if there are more jobs, equally many of them each."""
    even = blocks // jobs * jobs if jobs <= blocks else -(-jobs // -(-jobs // blocks))
    return even if even >= MOST_WORK * blocks else blocks


def _active(tiles: int, jobs: int, workers: int, block_N: int) -> int:
    """How many of the workers get work: no more than it takes for the longest share to have as few tiles."""
    share = max(-(-tiles // workers), LEAST_KEYS // block_N, 1)
    active = -(-tiles // share)
    return min(-(-active // jobs) * jobs, workers)


def draw_plan(lengths: Sequence[int], kv_heads: int, block_N: int, blocks: int) -> Figure:
    """Draws a bar per block: the tiles of keys that it has, in colours by sequence."""
    parts = deal(lengths, kv_heads, block_N, blocks)
    figure = empty_figure(9.0, 3.6)
    axes = figure.subplots()
    heights = [0] * blocks
    for sequence in range(len(lengths)):
        own = [part for part in parts if part.sequence == sequence]
        colour = COLOURS[sequence % len(COLOURS)]
        for part in own:
            tiles = part.end - part.first
            axes.bar(part.block, tiles, 1.0, heights[part.block], color=colour, edgecolor=LIGHT, linewidth=0.4)
            heights[part.block] += tiles
    titled(axes, "colours: sequences; a line between two parts", "block", f"tiles of {block_N} keys")
    axes.set_xlim(-0.5, blocks - 0.5)
    working = [height for height in heights if height]
    pieces = [(part.sequence, part.kv_head) for part in parts]
    cut = sum(pieces.count(piece) > 1 for piece in set(pieces))
    fewest, most = min(working, default=0), max(working, default=0)
    each = f"{fewest} to {most}" if fewest < most else str(most)
    below = (
        f"{counted(len(lengths), 'sequence')} x {counted(kv_heads, 'kv head')} on {counted(len(working), 'block')} of "
        f"{blocks}: {each} tiles each; {cut} of {len(set(pieces))} jobs are cut into parts"
    )
    heading(figure, "How a plan deals sequences to blocks", below)
    return figure
