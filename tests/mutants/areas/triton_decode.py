"""Triton's decode kernels, in the interpreter: rows and sequences, caches, parts and their merging."""

from __future__ import annotations

from ..mutant import Mutant, mutants

DECODE = "kernels/triton/decode"
FIXED = f"{DECODE}/test_fixed_split.py"
LAUNCH = (f"{DECODE}/test_launch.py",)
PACKED = (f"{DECODE}/test_decode.py::test_packed_in_small_tiles[3]",)
WINDOW = (f"{DECODE}/test_decode.py::test_pages_before_a_window_are_not_read[16-3]",)
SINK = (
    f"{DECODE}/test_decode.py::test_sink[16-5]",
    f"{DECODE}/test_decode.py::test_packed_prefill_beside_decoding[5-0-1]",
)
HEADS = (f"{DECODE}/test_decode.py::test_variants_in_small_tiles[ranges of heads]",)
GROUPS = (f"{DECODE}/test_decode.py::test_groups[3-10-2]",)
PARTS = (
    f"{FIXED}::test_what_nobody_has_written_is_not_read[7-30]",
    f"{FIXED}::test_each_sequence_is_split_by_its_own_length",
)
BITS = (
    f"{FIXED}::test_bits_are_those_of_one_program_for_all_parts",
    f"{FIXED}::test_bits_do_not_depend_on_the_rest_of_a_call",
    f"{FIXED}::test_the_variant_of_a_fixed_split_has_one_loop",
)
LINES = (
    f"{DECODE}/test_lines.py::test_lines_are_of_what_rows_see[by-head-None]",
    f"{DECODE}/test_lines.py::test_lines_are_of_what_rows_see[third-fixed]",
)
BY_LINES = (
    f"{DECODE}/test_lines.py::test_rows_that_see_nothing_and_no_pages",
    f"{DECODE}/test_lines.py::test_what_is_not_hidden_is_visited[by-head-3]",
)
ALL_TILES = (f"{DECODE}/test_lines.py::test_all_tiles_of_a_list_are_those_of_the_range",)

MUTANTS: list[Mutant] = [
    *mutants(
        f"{DECODE}/sequences.py",
        PACKED,
        {
            "triton decode: tiles of packed sequences begin one late": (
                "begin * group // rows + number <= tile",
                "begin * group // rows + number < tile",
            ),
            "triton decode: rows of no sequence belong to none": (
                "tl.minimum(tl.maximum(end, begin), q_rows), q_rows)",
                "tl.minimum(tl.maximum(end, begin), q_rows), begin)",
            ),
            "triton decode: the first tile of each packed sequence": (
                "tl.maximum(tile - first_tile, 0) * rows",
                "tl.maximum(tile - first_tile, 0) * 0",
            ),
        },
    ),
    *mutants(
        f"{DECODE}/sequences.py",
        LAUNCH,
        {
            "triton decode: negative lengths": (
                "tl.minimum(tl.maximum(given, 0), capacity)",
                "tl.minimum(given, capacity)",
            ),
            "triton decode: decreasing lengths are not told": ("wrong = (end < begin) | ", "wrong = "),
            "triton decode: too many queries are not told": ("(end - begin > max_seqlen_q)", "(end < begin)"),
        },
    ),
    *mutants(
        f"{DECODE}/sequences.py",
        SINK,
        {
            "triton decode: rows of no sequence have a sink": (
                "tl.where(b < batch, tl.load(sink + head)",
                "tl.where(b <= batch, tl.load(sink + head)",
            )
        },
    ),
    *mutants(
        f"{DECODE}/cache.py",
        WINDOW,
        {
            "triton decode: keys that nothing sees are read": (
                "mask=readable[:, None] & (column < columns)",
                "mask=(readable[:, None] | True) & (column < columns)",
            ),
        },
    ),
    *mutants(
        f"{DECODE}/cache.py",
        LAUNCH,
        {
            "triton decode: entries beyond the last page are not told": (
                "wrong = readable & ((page < 0) | (page >= pages))",
                "wrong = readable & (page < 0)",
            ),
        },
    ),
    *mutants(
        f"{DECODE}/kernel.py",
        WINDOW,
        {
            "triton decode: pages before a window are read": (
                "readable = (key >= bounds[0]) & (key < bounds[1])",
                "readable = key < bounds[1]",
            ),
        },
    ),
    *mutants(
        f"{DECODE}/kernel.py",
        GROUPS,
        {
            "triton decode: heads of other groups": ("h_kv * group + row % group", "h_kv + row % group"),
            "triton decode: positions of rows, not of queries": (
                "(seqlen_k - q_len + row // group)[:, None]",
                "(seqlen_k - q_len + row)[:, None]",
            ),
        },
    ),
    *mutants(
        f"{DECODE}/kernel.py",
        PARTS,
        {
            "triton decode: parts of the cache": (
                "tl.maximum(end - start, 0), plan.step_N), splits)",
                "tl.maximum(end - start, 0) + 9999, plan.block_N), splits)",
            ),
        },
    ),
    *mutants(
        f"{DECODE}/plan.py",
        HEADS,
        {"triton decode: ranges of the first head": ("if _differs_by_head(traced):", "if False:")},
    ),
    *mutants(
        f"{DECODE}/plan.py",
        BITS,
        {"triton decode: fixed parts have loops without the mask": ("elif call.fixed:", "elif False:")},
    ),
    *mutants(
        f"{DECODE}/merge.py",
        PARTS,
        {
            "triton decode: empty parts are read": ("tl.where(part_l[:, None] == 0, 0.0, part)", "part"),
            "triton decode: parts are not rescaled": ("acc * alpha[:, None])", "acc)"),
            "triton decode: sums are not rescaled": ("tl.fma(part_l, weight, l * alpha)", "tl.fma(part_l, weight, l)"),
            "triton decode: rows that do not exist are merged": (
                "& (q_len * group <= slot_rows)\n",
                "& (q_len * group <= q_len * group)\n",
            ),
        },
    ),
    *mutants(
        f"{DECODE}/merge.py",
        BITS,
        {
            "triton decode: one fixed part too few": (
                "tl.max(tl.where(exists, seqlen, 0), 0), fixed), splits)",
                "tl.max(tl.where(exists, seqlen - fixed, 0), 0), fixed), splits)",
            ),
        },
    ),
    *mutants(
        f"{DECODE}/lists.py",
        LINES,
        {
            "triton lines: hidden tiles are listed": ("(place - 1).where(seen, tiles)", "(place - 1)"),
            "triton lines: whole tiles are mixed": ("mixed, whole = seen & ~whole,", "mixed, whole = seen,"),
            "triton lines: fixed parts count their first tile as before": ("* self.part - 1\n", "* self.part\n"),
            "triton lines: whole tiles lie in the places of mixed ones": (
                "(of_whole + place[..., -1:]).where",
                "of_whole.where",
            ),
        },
    ),
    *mutants(
        f"{DECODE}/lines.py",
        BY_LINES,
        {
            "triton lines: all kv heads have the first one's": (
                "tl.where(planes > 1, h_kv, 0)",
                "tl.where(planes > 1, 0, 0)",
            ),
            "triton lines: mixed tiles have no mask": ("(0, mixed, visited, visited)", "(0, 0, visited, visited)"),
        },
    ),
    *mutants(
        f"{DECODE}/lines.py",
        ALL_TILES,
        {
            "triton lines: all tiles are those of the sequence": (
                "tl.maximum(first, start // plan.block_N)",
                "tl.maximum(first, 0)",
            ),
        },
    ),
]
