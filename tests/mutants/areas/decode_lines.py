"""Lines of the tiles that decode calls visit: what makes them, and the plan that deals them."""

from __future__ import annotations

from ..mutant import Mutant, mutants

DECODE = "kernels/tilelang/decode"
LINES = (f"{DECODE}/test_lines.py",)
KERNEL = (f"{DECODE}/test_lines_kernel.py::test_the_kernel_writes_the_same[long]",)
PLAN = (f"{DECODE}/test_plan_of_lines.py",)

MUTANTS: list[Mutant] = [
    *mutants(
        "kernels/decode_boxes.py",
        LINES,
        {
            "lines: hidden tiles are visited": ("(kinds != Kind.HIDDEN) & (k_lo", "(k_lo"),
            "lines: tiles without keys are visited": ("(kinds != Kind.HIDDEN) & (k_lo < rows.seqlen)", "(kinds != 0)"),
            "lines: the last keys need no mask": ("(k_lo + block_N <= rows.seqlen)", "(k_lo < rows.seqlen)"),
            "lines: one head stands for its group": ("first if count == 1 else first + (count - 1)", "first"),
            "lines: packed sequences have no item of their own": (
                "group // block_M + torch.arange(sizes.batch, device=item.device)",
                "group // block_M",
            ),
            "lines: the last query of an item is one more": ("q_len * group) - 1", "q_len * group)"),
            "lines: queries count from the first key": (
                "begin, low, high = seqlen - q_len,",
                "begin, low, high = 0 * b,",
            ),
        },
    ),
    *mutants(
        f"{DECODE}/lines/visits.py",
        LINES,
        {
            "lines: counts are of the tile too": ("(upto - 1).where", "upto.where"),
            "lines: of short calls with a FixedSplit too few": (
                "(call.fixed > 0 or of_jobs >= fewest)",
                "(of_jobs >= fewest)",
            ),
        },
    ),
    *mutants(
        f"{DECODE}/lines/kernel.py",
        KERNEL,
        {
            "line kernel: other warps' tiles do not count": ("if i < thread // WARP:", "if i < 0:"),
            "line kernel: other steps' tiles do not count": ("visited += totals[step % 2, i]", "visited = 0"),
            "line kernel: the first head stands for its group": (
                "kv_head * arg.group + i, tile",
                "kv_head * arg.group, tile",
            ),
            "line kernel: the last keys need no mask": ("(tile + 1) * arg.block_N <= rows.seqlen, 1", "tile >= 0, 1"),
            "line kernel: a tile whole for one head is whole": ("whole = T.min(whole, T.max", "whole = T.max(0, T.max"),
        },
    ),
    *mutants(
        f"{DECODE}/lines/entries.py",
        PLAN,
        {
            "plan of lines: hidden tiles cost": (
                "T.max(before(arg, line, keys.end) - before(arg, line, keys.first), 1)",
                "T.max(keys.end - keys.first, 1)",
            ),
            "plan of lines: a worker begins at a rank": (
                "tile = tile_in(entry(arg, line, before(arg, line, its_first) + rank)) - its_first",
                "tile = rank",
            ),
        },
    ),
    *mutants(
        f"{DECODE}/plan_kernel.py",
        PLAN,
        {
            "plan of lines: jobs are those of the first kv head": ("T.truncmod(item, arg.kv_heads) if", "0 if"),
            "plan of lines: jobs cost as items": ("(1 if arg.by_job else arg.kv_heads)", "arg.kv_heads"),
        },
    ),
]
