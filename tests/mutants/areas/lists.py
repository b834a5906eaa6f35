"""Lists of tiles, the order of the forward pass's queue, and positions in mixed tiles."""

from __future__ import annotations

from ..mutant import Mutant, mutants

TILELANG = "kernels/tilelang"
FILE = f"{TILELANG}/test_tile_lists.py"
LISTS = (f"{FILE}::test_lists_beside_every_pair",)
ORDER = (f"{TILELANG}/forward/test_longest_first.py",)

MUTANTS: list[Mutant] = [
    *mutants(
        f"{TILELANG}/tile_lists.py",
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
        f"{TILELANG}/tile_lists.py",
        (f"{FILE}::test_ranges_hide_what_an_expression_cannot_tell",),
        {
            "lists: no end of the mask's own range": ("(k.last >= lo) & (k.first < hi)", "(k.last >= lo)"),
            "lists: no begin of the mask's own range": ("(k.last >= lo) & (k.first < hi)", "(k.first < hi)"),
        },
    ),
    *mutants(
        f"{TILELANG}/tile_lists.py",
        (f"{FILE}::test_without_a_mask_and_of_a_matrix_nothing_is_listed",),
        {"lists: a matrix of pairs is read for its tiles": ("return len(indices) > 1 and", "return False and")},
    ),
    *mutants(
        f"{TILELANG}/tile_lists.py",
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
        f"{TILELANG}/kept_lists.py",
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
]
