"""The results of the decode suite as tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tileattn.bench.baselines.base import OWN
from tileattn.bench.decode.ceilings import overall
from tileattn.bench.decode.goals import Goal, goals
from tileattn.bench.decode.results import Results
from tileattn.bench.decode.rows import FAILED
from tileattn.bench.decode.summary import FLOOR, best_us, slow, standings

MOST_NAMED = 4  # rows of one reason that are named; more are counted


def render(results: Results) -> RenderableType:
    """The full report of a run: measurements, missing ones with reasons, and the summary."""
    parts: list[RenderableType] = [
        Text(title(results, "decode, one query per sequence"), style="bold"),
        measurements(results),
    ]
    parts += map(Text, notes(results))
    if named := standings(results):
        table = _table("tileattn's speed, the plan made ahead")
        for heading in ("against", "rows of", "rows", "geometric mean", "lowest", "at"):
            table.add_column(
                heading, no_wrap=True, justify="left" if heading in ("against", "rows of", "at") else "right"
            )
        for each in named:
            mean, lowest = f"{each.geometric_mean:.3f}×", f"{each.lowest:.2f}×"
            table.add_row(each.against, each.group, str(each.rows), mean, lowest, each.lowest_case)
        parts.append(table)
    if results.device == "cuda":
        parts.append(requirements(goals(results)))
    return Group(*parts)


def requirements(found: Sequence[Goal]) -> Table:
    """The requirements of an H200, and whether the rows meet them."""
    table = _table("requirements (H200)")
    for heading in ("requirement", "met", "rows", "of", "worst", "at"):
        table.add_column(heading, no_wrap=True, justify="left" if heading in ("requirement", "met", "at") else "right")
    for goal in found:
        table.add_row(goal.text, goal.verdict, str(goal.met), str(goal.rows), goal.lowest, goal.at)
    return table


def notes(results: Results) -> list[str]:
    """The lines below the table: ceilings, missing measurements, rows left out, slow rows."""
    lines = []
    if (ceiling := overall(results.ceilings)) is not None:
        copy, read = ceiling
        lines.append(
            f"ceilings: copy {copy:.0f} GB/s, read {f'{read:.0f} GB/s' if read else 'not measured (no Triton)'}"
        )
    lines += missing_lines(results)
    if below := slow(results):
        rows = ", ".join(f"{case} {ratio:.2f}×" for case, ratio in below)
        lines.append(f"below {FLOOR} of the best baseline: {rows}")
    return lines


def missing_lines(results: Results) -> list[str]:
    """What was refused or failed, with reasons, and the rows left out."""
    lines = []
    groups: dict[tuple[str, str, str], list[str]] = {}
    for entry in results.missing:
        groups.setdefault((entry.kind, entry.backend, entry.reason), []).append(entry.case)
    for (kind, backend, reason), cases in groups.items():
        named = ", ".join(cases) if len(cases) <= MOST_NAMED else f"{len(cases)} rows"
        lines.append(f"{kind}: {backend}: {reason} [{named}]")
    if results.left_out:
        lines.append(f"left out, K and V beyond 64 GiB: {', '.join(results.left_out)}")
    return lines


def measurements(results: Results) -> Table:
    """A line per row: microseconds of all, tileattn's GB/s and its parts of the ceilings, and its speed."""
    table = _table(None)
    table.add_column("page (batch,context,heads)", no_wrap=True)
    others = [backend for backend in results.backends if backend != OWN]
    shown = [other.removeprefix(f"{OWN}-") for other in others]
    for heading in (OWN, "GB/s", "% copy", "% read", *shown, "speed", "error"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.caption = (
        "microseconds per call (planning: with a plan in each call); speed: × the fastest baseline's; GB/s of K and V "
        "by tileattn, and in % of the copy's and the read's; error: largest relative error of a row of tileattn's o."
    )
    table.caption_justify = "left"
    ceiling = overall(results.ceilings)
    for case in results.done:
        own, best = results.row(case, OWN), best_us(results, case)
        cells = ["failed", *"---"]
        if own is not None:
            cells = [us(own.us), f"{own.gbps:.0f}", *(_percent(own.gbps, each) for each in ceiling or (None, None))]
        cells += [us(row.us) if (row := results.row(case, each)) else _blank(results, case, each) for each in others]
        cells.append(f"{best / own.us:.2f}×" if own and best else "-")
        table.add_row(case, *cells, f"{own.error:.1e}" if own else "-")
    return table


def us(value: float) -> str:
    """Microseconds in a table."""
    return f"{value:.2f}" if value < 100 else f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def _percent(gbps: float, ceiling: float | None) -> str:
    return f"{100 * gbps / ceiling:.0f}" if ceiling else "-"


def _blank(results: Results, case: str, backend: str) -> str:
    failed = any((each.case, each.backend, each.kind) == (case, backend, FAILED) for each in results.missing)
    return "failed" if failed else "-"


def _table(title: str | None) -> Table:
    return Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False, collapse_padding=True)


def title(results: Results, what: str) -> str:
    """The first line of a report: where it was measured, with which versions, and what."""
    versions = results.versions
    parts = [results.gpu, f"torch {versions['torch']}"]
    parts += [f"{name} {versions[name]}" for name in (OWN, "tilelang") if name in versions]
    return " · ".join([*parts, results.dtype, what])
