"""Masks: what they allow, and the ranges that let tiles be skipped or left without a mask."""

from __future__ import annotations

from ..mutant import Mutant, mutants

RANGES = ("variant/test_mask_ranges.py",)

MUTANTS: list[Mutant] = [
    *mutants(
        "variant/masks.py",
        RANGES,
        {
            "causal: hides its own position": ("        return k <= q\n", "        return k < q\n"),
            "causal: keys end one early": ("return 0, q_hi + 1", "return 0, q_hi"),
            "causal: full keys end one late": ("return 0, q_lo + 1", "return 0, q_lo + 2"),
            "causal: queries begin one late": ("return k_lo, seqlen_k", "return k_lo + 1, seqlen_k"),
            "causal: full queries begin one early": ("return k_hi, seqlen_k", "return k_hi - 1, seqlen_k"),
            "window: hides its first key": (
                "(k >= q - self.left) & (k <= q + self.right)",
                "(k > q - self.left) & (k <= q + self.right)",
            ),
            "window: hides its last key": ("return k <= q + self.right", "return k < q + self.right"),
            "window: keys begin one late": ("else q_lo - self.left", "else q_lo - self.left + 1"),
            "window: keys end one early": ("else q_hi + self.right + 1", "else q_hi + self.right"),
            "window: full keys begin with the first query's": ("else q_hi - self.left", "else q_lo - self.left"),
            "window: full keys end with the last query's": ("else q_lo + self.right + 1", "else q_hi + self.right + 1"),
            "window: queries begin with the last key's": ("else k_lo - self.right", "else k_hi - self.right"),
            "window: queries end one early": ("else k_hi + self.left + 1", "else k_hi + self.left"),
            "window: full queries begin with the first key's": ("else k_hi - self.right", "else k_lo - self.right"),
            "window: full queries end with the last key's": ("else k_lo + self.left + 1", "else k_hi + self.left + 1"),
            "prefix: one key longer": ("(k < self._length(b)) | (k <= q)", "(k <= self._length(b)) | (k <= q)"),
            "prefix: full keys end with the last query's": (
                "maximum(self._length(b), q_lo + 1)",
                "maximum(self._length(b), q_hi + 1)",
            ),
            "prefix: queries by the last key": ("where(k_lo < self._length(b)", "where(k_hi < self._length(b)"),
            "prefix: full queries by the first key": ("where(k_hi < self._length(b)", "where(k_lo < self._length(b)"),
            "documents: keys end one early": (
                "load(self.last, b, maximum(q_hi, 0)) + 1",
                "load(self.last, b, maximum(q_hi, 0))",
            ),
            "documents: full before the first key": ("where((q_lo >= 0) & (q_hi < end)", "where((q_hi < end)"),
            "documents: full by the first query": ("(q_lo >= 0) & (q_hi < end)", "(q_lo >= 0) & (q_lo < end)"),
            "padding: keys begin with the longest run": (
                "load(self.begin, b), load(self.end, b)",
                "load(self.run_begin, b), load(self.end, b)",
            ),
            "padding: full to the last key": (
                "load(self.run_begin, b), load(self.run_end, b)",
                "load(self.run_begin, b), load(self.end, b)",
            ),
            "padding: queries by the first key": ("(k_hi >= load(self.begin, b))", "(k_lo >= load(self.begin, b))"),
            "padding: full queries by the first key": (
                "(k_hi < load(self.run_end, b))",
                "(k_lo < load(self.run_end, b))",
            ),
            "and: full keys of either": ("intersection(*(mask.full_range(", "hull(*(mask.full_range("),
            "and: full queries of either": ("intersection(*(mask.full_q_range(", "hull(*(mask.full_q_range("),
            "or: not where both": ("self.x.allows(b, h, q, k) | self", "self.x.allows(b, h, q, k) ^ self"),
            "or: keys of both alone": ("hull(*(mask.kv_range(", "intersection(*(mask.kv_range("),
            "or: queries of both alone": ("hull(*(mask.q_range(", "intersection(*(mask.q_range("),
        },
    ),
    *mutants(
        "variant/mask_bounds.py",
        RANGES,
        {
            "documents: first keys of one tile alone": (
                "first.flip(1).cummin(1).values.flip(1), last",
                "first, last",
            ),
            "documents: last keys of one tile alone": ("last.cummax(1).values, run_start", "last, run_start"),
            "or: joins ranges that are apart": ("(maximum(x_lo, y_lo) <= minimum(x_hi, y_hi)) & ", ""),
            "or: joins ranges one apart": (
                "maximum(x_lo, y_lo) <= minimum(x_hi, y_hi)",
                "maximum(x_lo, y_lo) <= minimum(x_hi, y_hi) + 1",
            ),
        },
    ),
]
