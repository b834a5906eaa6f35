"""The suite random as tables for the terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tileattn.bench import report
from tileattn.bench.draws.standing import LEAST, Standing, standings
from tileattn.bench.results import Results


def render(measured: Results) -> RenderableType:
    """The measurements, then the standings."""
    named = standings(measured)
    every = named["all"]
    parts: list[RenderableType] = [report.render(measured), _table(named)]
    for case, ratio in every.worst():
        first = measured.first_ms.get(case)
        parts.append(Text(f"  {ratio:.3f} {case}{', measured again' if first else ''}"))
    for title, cases in (("no baseline ran, in no mean", every.alone), ("not measured", every.missing)):
        parts += [Text(f"{title}: {'; '.join(cases)}", style="yellow")] if cases else []
    return Group(*parts)


def _table(named: dict[str, Standing]) -> Table:
    table = Table(title="Random shapes against the best baseline of each row", title_justify="left", box=None)
    for heading in ("cases", "rows", "geometric mean", "lowest", f"under {LEAST}"):
        table.add_column(heading, justify="left" if heading == "cases" else "right", no_wrap=True)
    for name, each in named.items():
        lowest = f"{min(each.ratios.values()):.3f}" if each.ratios else report.DASH
        mean = report.DASH if each.geometric_mean is None else f"{each.geometric_mean:.3f}"
        table.add_row(name, str(len(each.ratios)), mean, lowest, str(each.under()))
    return table
