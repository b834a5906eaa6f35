"""Lists of tiles, the order of the forward pass's queue, positions in mixed tiles, and Triton's loops over lists."""

from __future__ import annotations

from ..mutant import Mutant, mutants

TILELANG = "kernels/tilelang"
FILE = f"{TILELANG}/test_tile_lists.py"
LISTS = (f"{FILE}::test_lists_beside_every_pair",)
EMULATED = f"{TILELANG}/lists/test_kernel_emulated.py"
ORDER = (f"{TILELANG}/forward/test_longest_first.py",)
TRITON = "kernels/triton"
VISITS = (
    f"{TRITON}/test_lists.py::test_the_forward_pass_visits_what_is_not_hidden[by-head-1]",
    f"{TRITON}/test_lists.py::test_outputs_and_gradients[by-head-more-queries]",
)
PACKED = f"{TILELANG}/test_packed_lists.py"
WALK = f"{TILELANG}/packed/test_listed_walk.py"

MUTANTS: list[Mutant] = [
    *mutants(
        "kernels/tile_lists.py",
        LISTS,
        {
            "lists: whole tiles first": ("rank = (kinds + 2) % 3", "rank = (kinds + 1) % 3"),
            "lists: mixed tiles are not visited": ("(kinds != Kind.HIDDEN).sum(1)", "(kinds == Kind.WHOLE).sum(1)"),
            "lists: heads share a plane": ("lines * by_head, order)", "0, order)"),
            "lists: the last keys need no mask": (
                "(2, sizes.seqlen_k % cut.block_N)",
                "(2, 0)",
            ),
        },
    ),
    *mutants(
        "kernels/tile_lists.py",
        (f"{FILE}::test_ranges_hide_what_an_expression_cannot_tell",),
        {
            "lists: no end of the mask's own range": ("(k.last >= lo) & (k.first < hi)", "(k.last >= lo)"),
            "lists: no begin of the mask's own range": ("(k.last >= lo) & (k.first < hi)", "(k.first < hi)"),
        },
    ),
    *mutants(
        "kernels/tile_lists.py",
        (f"{FILE}::test_without_a_mask_and_of_a_matrix_nothing_is_listed",),
        {"lists: a matrix of pairs is read for its tiles": ("return len(indices) > 1 and", "return False and")},
    ),
    *mutants(
        f"{TILELANG}/lists/registers.py",
        (f"{TILELANG}/lists/test_analysis.py",),
        {
            "lists: the span of a difference": ("return a - d, b - c", "return a - c, b - d"),
            "lists: a comparison that may hold always holds": ("(b < c, a < d)", "(a < d, a < d)"),
            "lists: a minimum by the wrong span": (
                "(y, x) if y.span[1] <= x.span[0]",
                "(y, x) if y.span[0] <= x.span[0]",
            ),
        },
    ),
    *mutants(
        "variant/intervals/integers.py",
        (f"{TILELANG}/lists/test_analysis.py::test_run_time_numbers",),
        {"intervals: the same remainder in several quotients": ("one = first == last", "one = first <= last")},
    ),
    *mutants(
        "variant/intervals/linear.py",
        (f"{TILELANG}/lists/test_analysis.py::test_run_time_numbers",),
        {
            "intervals: a point with another factor": (
                "constant = times * point.lo + constant",
                "constant = point.lo + constant",
            )
        },
    ),
    *mutants(
        f"{TILELANG}/lists/analysis.py",
        ("kernels/tilelang/lists/test_analysis.py::test_whose_a_wide_load_is",),
        {
            "lists: batch elements share a wide load": (
                'has_symbol(expr, "b") or has_symbol(expr, "h")',
                'has_symbol(expr, "h")',
            )
        },
    ),
    *mutants(
        f"{TILELANG}/lists/kernel.py",
        (f"{EMULATED}::test_the_same_bits_as_by_pytorch[dilated]",),
        {
            "lists: the kernel's equal lines from the first row on": ("& (row > number)", "& (row < number)"),
            "lists: the kernel's later warps begin as the first": ("all_whole + first - mixed", "all_whole - mixed"),
        },
    ),
    *mutants(
        f"{TILELANG}/lists/kernel.py",
        (f"{EMULATED}::test_the_same_bits_as_by_pytorch[everything]",),
        {
            "lists: the kernel masks no last keys": ("(column + 1) * arg.block_N > arg.seqlen_k", "column < 0"),
            "lists: the kernel masks no last queries": ("(row + 1) * arg.block_M > arg.seqlen_q", "row < 0"),
        },
    ),
    *mutants(
        "kernels/tile_lists.py",
        ORDER,
        {
            "lists: the shortest rows first": ("descending=True, stable=True", "descending=False, stable=True"),
        },
    ),
    *mutants(
        f"{TILELANG}/forward/launch.py",
        ORDER,
        {
            "lists: heads follow one another from the start": (
                "-(-ROUNDS_AHEAD * MULTIPROCESSORS // pairs), lines",
                "1, 1",
            )
        },
    ),
    *mutants(
        "kernels/kept_lists.py",
        (
            f"{FILE}::test_a_write_in_place_is_seen",
            f"{FILE}::test_the_lists_of_a_dead_tensor_are_not_found",
            f"{FILE}::test_lists_of_tensors_that_are_gone_are_dropped",
            f"{FILE}::test_other_numbers_sizes_and_tensors_do_not",
        ),
        {
            "lists: a write in place is not seen": ("found.versions == versions and", "True and"),
            "lists: a dead tensor's lists are found": ("_are(found.tensors, read)", "True"),
            "lists: dead tensors' lists are kept": ("if any(tensor() is None for tensor", "if all(False for tensor"),
            "lists: numbers do not count": ("tuple(operands.ints), ", ""),
        },
    ),
    *mutants(
        f"{TILELANG}/forward/hopper/mixed_tiles.py",
        (f"{TILELANG}/forward/test_mixed_tiles.py",),
        {"lists: the distance of another diagonal": ("((i - row) - (j - column))", "((i - row) + (j - column))")},
    ),
    *mutants(
        f"{TRITON}/tile/lines.py",
        VISITS,
        {
            "lists: Triton's loops leave out whole tiles": ("counts + 2 * number + 1", "counts + 2 * number"),
            "lists: Triton's heads share a line": ("b * batch_step + h * head_step", "b * batch_step"),
            "lists: Triton's loops repeat a tile": ("ahead, tile_of(at + 1,", "ahead, tile_of(at,"),
        },
    ),
    *mutants(
        f"{TRITON}/tile/lines.py",
        (f"{TRITON}/test_lists.py::test_tiles_of_lists_that_are_several_of_a_kernel[far-32]",),
        {"lists: Triton's steps within a tile": ("- place) * plan.listed + at) * block", ") * plan.listed) * block")},
    ),
    *mutants(
        f"{TRITON}/lists.py",
        (f"{TRITON}/test_lists.py::test_long_calls_of_masks_with_gaps_take_lists",),
        {
            "lists: a row's bits depend on the batch": (
                "q_shape[1] * k_shape[1] >= FEWEST_PAIRS",
                "q_shape[0] * q_shape[1] * k_shape[1] >= FEWEST_PAIRS",
            ),
        },
    ),
    *mutants(
        f"{TILELANG}/packed_lists.py",
        (f"{PACKED}::test_lists_beside_every_pair", f"{PACKED}::test_lines_are_those_of_dense_calls"),
        {
            "packed lists: unwritten entries are read": ("(line < work[0, COUNT]) & (record", "(record"),
            "packed lists: heads share a plane": ("0, shape.lines * by_head, order)", "0, 0, order)"),
            "packed lists: a sequence's last keys need no mask": (
                "beyond = key + cut.block_N > lines.seqlen_k",
                "beyond = key < 0",
            ),
            "packed lists: positions without alignment": (
                "lines.seqlen_q.clamp(min=1) - 1, lines.seqlen_k - lines.seqlen_q",
                "lines.seqlen_q.clamp(min=1) - 1, lines.seqlen_k * 0",
            ),
            "packed lists: tiles behind a sequence are visited": (
                "lines.used & (row < lines.seqlen_q)",
                "lines.used",
            ),
        },
    ),
    *mutants(
        f"{TILELANG}/packed_lists.py",
        (f"{PACKED}::test_tiles_of_a_run_ascend_by_length",),
        {"packed lists: runs are mixed": ("first * (2 * capacity + 1) + counts", "counts")},
    ),
    *mutants(
        f"{TILELANG}/packed_lists.py",
        (f"{PACKED}::test_memory_is_bounded", f"{PACKED}::test_which_calls"),
        {
            "packed lists: any number of bytes": ("<= MOST_BYTES for cut in cuts", "<= 2**60 for cut in cuts"),
            "packed lists: longer than the tensors": (
                "min(packed.max_seqlen_q, total_q), min(packed.max_seqlen_k, total_k)",
                "packed.max_seqlen_q, packed.max_seqlen_k",
            ),
        },
    ),
    *mutants(
        "kernels/kept_lists.py",
        (f"{PACKED}::test_lengths_that_were_written_in_place_are_seen",),
        {
            "packed lists: lengths written in place are not seen": (
                "for number in tensors_of(variant)), *bounds]",
                "for number in tensors_of(variant))]",
            )
        },
    ),
    *mutants(
        f"{TILELANG}/forward/packed.py",
        (f"{WALK}::test_forward",),
        {
            "packed lists: a cluster's lists have the rows of a block": (
                "Cut(config.cluster * config.block_M",
                "Cut(2 * config.block_M",
            )
        },
    ),
    *mutants(
        f"{TILELANG}/backward/listed.py",
        (f"{WALK}::test_short_calls_have_none_by_the_rows_of_the_tensors",),
        {"packed lists: every backward pass has them": ("prepare(listed if pays else None)", "prepare(listed)")},
    ),
    *mutants(
        f"{TILELANG}/lists/packed_lines.py",
        (f"{TILELANG}/lists/test_packed_emulated.py::test_the_same_bits_as_by_pytorch[wide-cross]",),
        {
            "packed lists: the kernel's equal lines from the last tile on": ("(other < number)", "(other > number)"),
            "packed lists: sequences share bounds of wide loads": (
                "of.sequence * arg.heads + plane if",
                "plane if",
            ),
            "packed lists: the kernel's rows without alignment": (
                "offset, last_row = of.seqlen_k - of.seqlen_q, T",
                "offset, last_row = 0, T",
            ),
        },
    ),
    *mutants(
        f"{TILELANG}/backward/hopper/queries_task.py",
        (f"{TILELANG}/test_tile_lists_lowering.py::test_a_block_without_a_tile_looks_for_no_line",),
        {
            "packed lists: a block without a tile reads any line": (
                "T.if_then_else(at.exists, line",
                "T.if_then_else(True, line",
            )
        },
    ),
]
