"""Decoding: the torch backend's three ways, trees, the kept calls, and the merge of parts."""

from __future__ import annotations

from ..mutant import Mutant, mutants

TORCH = "kernels/torch/decode"
IDENTITIES = ("api/test_decode_identities.py",)
VALUES = ("api/test_decode_values.py",)
DAY = ("api/test_server_day.py::test_a_day_on_a_cpu[window]",)
CASES = ("test_conformance_decode.py::test_conformance",)
CAPACITY = ("kernels/torch/test_decode_capacity.py",)
BITS = ("api/test_decode_invariance.py::test_bits_do_not_depend_on_the_company[torch-window]",)

MUTANTS: list[Mutant] = [
    *mutants(
        f"{TORCH}/cache.py",
        DAY,
        {
            "decode: the last page that is cut is left out": (
                "keys.start // self.page_size : -(-keys.stop // self.page_size)]",
                "keys.start // self.page_size : keys.stop // self.page_size]",
            ),
            "decode: keys from the beginning of a page": (
                "yield piece, rows[piece.start - begin :",
                "yield piece, rows[0 :",
            ),
            "decode: packed sequences have the first one's keys": (
                "self.table[self.number, keys.start",
                "self.table[0, keys.start",
            ),
        },
    ),
    *mutants(
        f"{TORCH}/cache.py",
        VALUES,
        {
            "decode: one key more than the capacity": (
                "if not 0 <= length <= sizes.capacity:",
                "if not 0 <= length <= sizes.capacity + 1:",
            ),
            "decode: any negative length": (
                "if not 0 <= length <= sizes.capacity:",
                "if not length <= sizes.capacity:",
            ),
            "decode: one page beyond the cache": (
                "if lowest < 0 or highest >= count:",
                "if lowest < 0 or highest > count:",
            ),
        },
    ),
    *mutants(
        f"{TORCH}/sequences.py",
        CASES,
        {
            "decode: parts are not merged": (
                "state = part if state is None else join(state, part)",
                "state = part",
            ),
            "decode: parts begin before the keys that are seen": (
                "lo, hi = max(begin, seen.lo),",
                "lo, hi = begin,",
            ),
            "decode: masks of the first sequence": ("first=sequence.number", "first=0"),
            "decode: packed rows of no sequence are not written": (
                "if inputs.cu_seqlens_q is not None:\n        o.zero_()",
                "if False:\n        o.zero_()",
            ),
        },
    ),
    *mutants(
        f"{TORCH}/batch_invariant.py",
        BITS,
        {
            "fixed split: parts begin at the window": (
                "range(seen.lo // length * length, seen.hi, length)",
                "range(seen.lo, seen.hi, length)",
            ),
        },
    ),
    *mutants(
        f"{TORCH}/batch_invariant.py",
        CASES,
        {
            "fixed split: parts begin before the keys that are seen": (
                "part = KeyRange(max(begin, seen.lo),",
                "part = KeyRange(begin,",
            ),
            "fixed split: keys behind the last": (
                "hidden = (position < part.lo) | (position >= part.hi)",
                "hidden = position < part.lo",
            ),
            "fixed split: what is behind the last key stays": ("into[:, part.hi - begin :] = 0", "pass"),
        },
    ),
    *mutants(
        f"{TORCH}/capacity.py",
        CAPACITY,
        {
            "capacity: values that are not seen may be NaN": (
                "v = v.to(dtype).masked_fill(~used[:, :, None, None], 0.0)",
                "v = v.to(dtype)",
            ),
            "capacity: positions aligned top-left": (
                "position = (lengths - seqlens_q)[:, None] + row",
                "position = (lengths * 0)[:, None] + row",
            ),
            "capacity: keys behind the length": (
                "seen = rows.exists & (keys < rows.lengths[:, None, None, None])",
                "seen = rows.exists & (keys < sizes.capacity)",
            ),
            "capacity: pages that nobody sees are wrong": ("wrong & used,", "wrong,"),
            "capacity: a length may be negative": ("(lengths < 0) | ", ""),
        },
    ),
    *mutants(
        "variant/tree_mask.py",
        CASES,
        {
            "tree: all see the first draft": ("(k < first) |", "(k <= first) |"),
            "tree: the first draft is seen as a whole": (
                "return 0, load(self.first, b)",
                "return 0, load(self.first, b) + 1",
            ),
        },
    ),
    *mutants(
        "runtime/decoding.py",
        ("api/test_decode.py::test_a_plan_for_a_mask_with_other_numbers_is_an_error",),
        {"decode: a plan serves masks of any numbers": ("if not phase.of_mask:", "if True:")},
    ),
    *mutants(
        "runtime/decoding.py",
        CASES,
        {
            "tree: causal beside it": ("causal and tree_mask is None)", "causal)"),
        },
    ),
    *mutants(
        "runtime/decoding.py",
        VALUES,
        {
            "decode: pages of any rows at once": ("page_size & -page_size)", "page_size)"),
        },
    ),
    *mutants(
        "runtime/prepared_decode.py",
        VALUES,
        {
            "decode: a call is kept for any table": ("facts(seqlens_k), facts(page_table),", "facts(seqlens_k),"),
        },
    ),
    *mutants(
        "api/merge.py",
        IDENTITIES,
        {
            "merge: the other part's weight": (
                "_weighted(w_a / l, o_a) + _weighted(w_b / l, o_b)",
                "_weighted(w_b / l, o_a) + _weighted(w_a / l, o_b)",
            ),
            "merge: two parts without keys": ("m = m.masked_fill(m.isinf(), 0.0)", "m = m.masked_fill(m.isnan(), 0.0)"),
        },
    ),
]
