"""Lines of the tiles that are visited (lists.py), in the decode kernel: where a program's line is, and its steps.

Loops by lines count steps, whose tiles they find as those of the other kernels do (tile/lines.py).
"""

import triton
import triton.language as tl


@triton.jit
def line_of(lines, of_lines, item, h_kv, tiles_of_keys, seqlen_k, plan: tl.constexpr):
    """Of a program: the counts of its line, the tiles of its line, and the ends of its loops (`phases` in tiles.py).

    of_lines: numbers of a line, of these its counts, and lines of a tile of rows.

    Without lines counts and tiles are 0 and the ends are what is given, so they are with a FixedSplit. A sequence
    without keys has no steps: the line of rows of no sequence is another's.
    """
    if plan.listed == 0:
        counts, tiles, ends = 0, 0, tiles_of_keys
    else:
        line_size, line_counts, planes = of_lines
        number = item * planes + tl.where(planes > 1, h_kv, 0)
        counts = lines + number.to(tl.int64) * line_size
        tiles = counts + line_counts
        if plan.fixed:
            ends = tiles_of_keys
        else:
            mixed = tl.where(seqlen_k > 0, tl.load(counts), 0)
            visited = tl.where(seqlen_k > 0, tl.load(counts + 1), 0)
            ends = (0, mixed, visited, visited)
    return counts, tiles, ends


@triton.jit
def fixed_part(number, start, end, counts, line_size, plan: tl.constexpr):
    """The steps of a fixed part of the keys from start to end: rows of keys or, with lines, ranks in the line.

    counts, line_size: as of :func:`line_of`; size 0: there is one list, of all tiles.
    """
    if plan.listed == 0:
        lo, hi = tl.maximum(number * plan.fixed, start), tl.minimum((number + 1) * plan.fixed, end)
    else:
        first = number * (plan.fixed // plan.block_N)
        behind = first + plan.fixed // plan.block_N
        lo = tl.load(counts + number, mask=line_size > 0, other=0)
        hi = tl.load(counts + number + 1, mask=line_size > 0, other=0)
        lo = tl.where(line_size > 0, lo, tl.maximum(first, start // plan.block_N))
        hi = tl.where(line_size > 0, hi, tl.minimum(behind, tl.cdiv(end, plan.block_N)))
    return lo, hi
