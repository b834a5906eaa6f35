"""What decoding must reach on an H200, held against a result file: one line for each requirement.

Sizes are bytes of K and V; a ceiling is the copy's of the same run. "Best" is the best of FlashAttention-3, FlashInfer
and XQA in the row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import geometric_mean

from tileattn.bench.baselines.base import OWN
from tileattn.bench.decode.ceilings import overall
from tileattn.bench.decode.results import Results
from tileattn.bench.decode.rows import Row
from tileattn.bench.decode.summary import LARGE, PAGED, speeds

MIB = 2**20
US_AT_1K, US_AT_1K_UNGROUPED = 7.5, 10.5  # batch 1, context 1k


@dataclass(frozen=True)
class Goal:
    """One requirement.

    Attributes:
        text: what is required.
        rows: how many rows it is about; 0 if none of them ran.
        met: how many of these meet it; for a mean, all or none.
        lowest: the measure of the row that is farthest off, or the mean.
        at: that row; "" for a mean.
    """

    text: str
    rows: int
    met: int
    lowest: str
    at: str = ""

    @property
    def verdict(self) -> str:
        """In a table: "yes", "no", or "-" without rows."""
        return "-" if not self.rows else "yes" if self.met == self.rows else "no"


def goals(results: Results) -> list[Goal]:
    """All requirements that a run of the suite decode can show."""
    own = [row for row in results.rows if row.backend == OWN]
    ratios = speeds(results, PAGED)
    found = []
    if (ceiling := overall(results.ceilings)) is not None:
        for least, share in ((64, 0.75), (128, 0.85), (256, 0.90)):
            rows = [(row, row.gbps / ceiling[0]) for row in own if row.kv_bytes >= least * MIB and row.page != 1]
            found.append(_each(f"K and V from {least} MB: {share:.0%} of the copy ceiling", rows, share))
        page_1 = [(row, row.gbps / ceiling[0]) for row in own if row.kv_bytes >= 512 * MIB and row.page == 1]
        found.append(_each("page 1 from 512 MB: 75% of the copy ceiling", page_1, 0.75))
    large = [(row, ratio) for row, ratio in ratios if row.kv_bytes >= LARGE and row.page != 1]
    found.append(_each("from 512 MB: 0.97 of the best", large, 0.97))
    page_1 = [(row, ratio) for row, ratio in ratios if row.kv_bytes >= LARGE and row.page == 1]
    found.append(_each("page 1 from 512 MB: 0.92 of the best", page_1, 0.92))
    found.append(_mean("mean against the best, under 512 MB: 1.10", ratios, lambda row: row.kv_bytes < LARGE, 1.10))
    found.append(_mean("mean against the best, from 512 MB: 0.99", ratios, lambda row: row.kv_bytes >= LARGE, 0.99))
    found.append(_mean("mean against the best, all rows (aim): 1.05", ratios, lambda row: True, 1.05))
    found.append(_each("no row under 0.92 of the best", ratios, 0.92))
    found.append(at_1k(own))
    long = [(row, ratio) for row, ratio in ratios if row.batch == 1 and row.context > 1024]
    found.append(_each("batch 1, 8k to 128k: at least the best", long, 1.0))
    return found


def at_1k(own: Sequence[Row]) -> Goal:
    """The microseconds of one sequence of 1k."""
    rows = [row for row in own if (row.batch, row.context) == (1, 1024) and row.page != 1]
    bound = {row.case: US_AT_1K_UNGROUPED if row.heads == row.kv_heads else US_AT_1K for row in rows}
    ranked = sorted(rows, key=lambda row: bound[row.case] / row.us)
    met = sum(row.us <= bound[row.case] for row in rows)
    text = f"batch 1 at 1k: {US_AT_1K} us or less, {US_AT_1K_UNGROUPED} at 32/32"
    return Goal(text, len(rows), met, f"{ranked[0].us:.2f} us" if rows else "", ranked[0].case if rows else "")


def _each(text: str, rows: Sequence[tuple[Row, float]], least: float) -> Goal:
    if not rows:
        return Goal(text, 0, 0, "")
    row, lowest = min(rows, key=lambda each: each[1])
    return Goal(text, len(rows), sum(share >= least for _, share in rows), f"{lowest:.3f}", row.case)


def _mean(text: str, rows: Sequence[tuple[Row, float]], belongs: Callable[[Row], bool], least: float) -> Goal:
    ratios = [ratio for row, ratio in rows if belongs(row)]
    if not ratios:
        return Goal(text, 0, 0, "")
    mean = geometric_mean(ratios)
    return Goal(text, len(ratios), len(ratios) * (mean >= least), f"{mean:.3f}")
