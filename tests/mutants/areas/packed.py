"""Packed sequences: the checks of cumulative lengths, and the work list that the planning kernel writes."""

from __future__ import annotations

from ..mutant import Mutant, mutants

PLAN = ("kernels/tilelang/packed/test_plan_kernel.py",)
SEQUENCE_PLAN = "kernels/tilelang/packed/plan_kernel.py"
CHECKS = ("call/test_sequences.py",)

MUTANTS: list[Mutant] = [
    *mutants(
        SEQUENCE_PLAN,
        PLAN,
        {
            "plan: equal costs have one place": ("(cost_j > cost) | ((cost_j == cost) & (j < run))", "cost_j > cost"),
            "plan: may begin anywhere": ("((j == 0) & (start != 0)) | ", ""),
            "plan: may decrease": (" | (end < start) | ", " | "),
            "plan: may end beyond the tensor": ("(j == sequences - 1) & (end > total)", "(j < 0)"),
            "plan: leaves the last tile out": ("rows + (tile - 1)", "rows"),
            "plan: lengths of q up to those of k": ("q_len > arg.max_seqlen_q", "q_len > arg.max_seqlen_k"),
            "plan: wrong lengths keep their rows": ("start = T.if_then_else(run < sequences, end, 0)", "start = 0"),
            "plan: unused tail rows have keys": (
                "_of_role(of_keys, arg.k[run], arg.q[run]), NOWHERE)",
                "_of_role(of_keys, arg.k[run], arg.q[run]), 0)",
            ),
            "plan: workspaces without room between": (" + run * PADDING", ""),
        },
    ),
    *mutants(
        "kernels/tilelang/packed/work_list.py",
        PLAN,
        {
            "plan: a list one record too short": ("total // tile + sequences + 1", "total // tile + sequences"),
        },
    ),
    *mutants(
        "call/sequences.py",
        CHECKS,
        {
            "cu_seqlens: may begin behind 0": ("if ends[0] != 0:", "if ends[0] < 0:"),
            "cu_seqlens: may decrease": ("if length < 0:", "if length < -1:"),
            "cu_seqlens: may end one beyond": ("if ends[-1] > total:", "if ends[-1] > total + 1:"),
        },
    ),
    *mutants(
        "call/sequences.py",
        CHECKS,
        {
            "cu_seqlens: one longer than the longest": ("if longest > max_seqlen:", "if longest > max_seqlen + 1:"),
        },
    ),
    *mutants(
        "kernels/torch/packed.py",
        (
            "api/test_varlen.py::test_each_sequence_by_itself",
            "api/test_varlen.py::test_dropout_does_not_depend_on_the_packing",
        ),
        {
            "packed: all sequences have the first one's number": (
                "sink, scale, dropout, number\n        )",
                "sink, scale, dropout, 0\n        )",
            ),
        },
    ),
    *mutants(
        "variant/scores.py",
        ("variant/test_scores.py::test_a_bias_on_packed_sequences_is_read_by_rows",),
        {
            "packed bias: rows from the wrong side": ("q - load(self.first, b)", "q + load(self.first, b)"),
        },
    ),
]
