"""Bits of mixed tiles: the kernel that makes them, and which calls have them."""

from __future__ import annotations

from ..mutant import Mutant, mutants

LISTS = "kernels/tilelang/lists"  # in the package and in the tests
EMULATED = f"{LISTS}/test_bits_emulated.py"
CHOICE = f"{LISTS}/test_bits.py"
LOWERING = "kernels/tilelang/test_mixed_bits_lowering.py"

MUTANTS: list[Mutant] = [
    *mutants(
        f"{LISTS}/bits_kernel.py",
        (f"{EMULATED}::test_every_pair[dilated]",),
        {
            "bits: queries beyond the last are seen": (" & (q < arg.seqlen_k)\n", "\n"),
            "bits: the distance of another diagonal": (
                "at.distance + (more_q - more_k)",
                "at.distance + (more_q + more_k)",
            ),
            "bits: the tile's line begins one late": ("arg.before[middle] <= place", "arg.before[middle] < place"),
            "bits: sorted lines in the rows' order": ("if arg.sorts == 1:", "if arg.sorts == 2:"),
            "bits: the second row of a thread is the next one": ("n, row + SECOND_ROW, ", "n, row + 1, "),
        },
    ),
    *mutants(
        f"{LISTS}/bits_kernel.py",
        (f"{EMULATED}::test_every_pair[loaded]",),
        {"bits: all batch elements have the first one's": ("arg.heads) * arg.by_batch)", "arg.heads) * 0)")},
    ),
    *mutants(
        f"{LISTS}/bits.py",
        (CHOICE,),
        {
            "bits: heads that differ share them": ('1 if depends_on(traced, "h") else heads', "heads"),
            "bits: packed calls have them": ("if call.packed or not may_have_bits", "if not may_have_bits"),
            "bits: a line's own tiles come before it": ("dtype=torch.int32) - mixed", "dtype=torch.int32)"),
            "bits: no loads are counted": ('node.op == "load" and (of_q or of_k)', 'node.op == "load" and False'),
        },
    ),
    *mutants(
        "kernels/tilelang/forward/defaults.py",
        (CHOICE,),
        {"bits: words by the expression give way": ("bits = bits and not (words and by_expression)", "bits = bits")},
    ),
    *mutants(
        "kernels/kept_lists.py",
        (CHOICE,),
        {"bits: a launch does not get them": ("lists.rows, lists.before, lists.bits)", "lists.rows)")},
    ),
    *mutants(
        "kernels/tilelang/tile/mixed_bits.py",
        (f"{LOWERING}::test_words_of_the_backward_pass",),
        {"bits: the words of another row": ("first_row + i, t]", "first_row, t]")},
    ),
]
