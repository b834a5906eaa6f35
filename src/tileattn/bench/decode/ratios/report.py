"""The results of the suite decode-ratios as a table for the terminal: one line for each comparison."""

from __future__ import annotations

from dataclasses import dataclass

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tileattn.bench.decode.ratios.cases import Comparison, Suite
from tileattn.bench.decode.report import missing_lines, title, us
from tileattn.bench.decode.results import Results


@dataclass(frozen=True)
class Outcome:
    """A comparison that ran.

    us: of what is judged.
    reference_us: of the reference; None without one.
    """

    comparison: Comparison
    us: float
    reference_us: float | None

    @property
    def measure(self) -> float:
        """What `most` bounds."""
        return self.us if self.reference_us is None else self.us / self.reference_us

    @property
    def met(self) -> bool:
        return self.measure <= self.comparison.most


def outcomes(results: Results, suite: Suite) -> list[Outcome]:
    """The comparisons whose methods both ran."""
    found = []
    for comparison in suite.comparisons:
        judged = results.row(comparison.case.name, comparison.method)
        name = comparison.reference
        reference = None if name is None else results.row(comparison.case.name, name)
        if judged is not None and (name is None or reference is not None):
            found.append(Outcome(comparison, judged.us, reference.us if reference else None))
    return found


def render(results: Results, suite: Suite) -> RenderableType:
    """All comparisons, what is missing, and how many of each group are met."""
    table = _table()
    for heading in ("shown", "row", "method", "us", "against", "us", "ratio", "at most", "met"):
        table.add_column(heading, no_wrap=True, justify="right" if heading in ("us", "ratio", "at most") else "left")
    ran = outcomes(results, suite)
    for each in ran:
        of = each.comparison
        against = (of.reference, us(each.reference_us), f"{each.measure:.3f}") if each.reference_us else ("-", "-", "-")
        bound = f"{of.most:.2f}" + ("" if of.reference else " us")
        table.add_row(of.group, of.case.name, of.method, us(each.us), *against, bound, "yes" if each.met else "NO")
    counts = _table()
    for heading in ("shown", "met", "of", "worst", "at"):
        counts.add_column(heading, no_wrap=True, justify="right" if heading in ("met", "of", "worst") else "left")
    for group in dict.fromkeys(each.group for each in suite.comparisons):
        of_group = [each for each in ran if each.comparison.group == group]
        met, asked = sum(each.met for each in of_group), sum(each.group == group for each in suite.comparisons)
        worst = max(of_group, key=lambda each: each.measure / each.comparison.most, default=None)
        shown = (
            (f"{worst.measure:.3f}", f"{worst.comparison.case.name} {worst.comparison.method}") if worst else ("", "")
        )
        counts.add_row(group, str(met), str(asked), *shown)
    lines = [Text(line) for line in missing_lines(results)]
    return Group(Text(title(results, "what options of decode cost"), style="bold"), table, *lines, counts)


def _table() -> Table:
    return Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
