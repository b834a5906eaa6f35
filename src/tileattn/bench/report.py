"""The results of a run as tables for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tileattn.bench.baselines.base import OWN
from tileattn.bench.cases import DIRECTIONS
from tileattn.bench.compare import NOISE, Comparison, Standing, best_baseline_ms, compare, standings
from tileattn.bench.cost import Cost, costs
from tileattn.bench.results import Missing, Results, Row
from tileattn.measure.ceilings import Ceiling, overall
from tileattn.measure.units import human_bytes

DASH = "—"


def render(results: Results) -> RenderableType:
    """The full report of a run: measurements, missing ones with reasons, and the summary."""
    parts: list[RenderableType] = [Text(_title(results), style="bold"), measurements(results)]
    parts += [Text.assemble((f"{DASH} refused: ", "yellow"), line) for line in grouped(results.refused)]
    parts += [Text.assemble(("✗ failed: ", "bold red"), line) for line in grouped(results.failed)]
    parts += doubts(results)
    if notes := _sampled(results):
        parts.append(Text(notes, style="dim"))
    if (ceiling := overall(results.ceilings)) is not None:
        parts.append(Text(f"{ceiling_text(ceiling)}, {ceiling.when} the cases"))
    if measured_costs := costs(results):
        parts.append(_costs(measured_costs))
    if comparisons := compare(results):
        parts.append(_summary(comparisons))
    if named := standings(results):
        parts += [_standings(named), *map(Text, behind_lines(named))]
    return Group(*parts)


def doubts(results: Results) -> list[RenderableType]:
    """A warning for each thing that makes the times doubtful."""
    return [Text.assemble(("! warning: ", "bold yellow"), line) for line in results.doubts]


def ceiling_text(ceiling: Ceiling) -> str:
    """The ceilings as text."""
    return f"ceilings: cuBLAS bf16 {ceiling.matmul_tflops:.0f} TFLOPS, copy {ceiling.copy_tbps:.2f} TB/s"


def measurements(results: Results) -> Table:
    """The table of measurements: a heading per case, and a line per backend; fits 80 columns."""
    table = _table()
    table.add_column("case (batch,seqlen,heads)", no_wrap=True)
    for heading in ("ms", "TFLOPS", "speed", "error", "memory"):
        table.add_column(heading, justify="right", no_wrap=True)
    of, whole = ("o", "") if results.direction == "fwd" else ("dq, dk and dv", ", forward and backward")
    table.caption = (
        f"speed: × the fastest baseline's. error: largest relative error of a row of {of} against float64. "
        f"memory: peak beyond the inputs{whole}."
    )
    table.caption_justify = "left"
    for case in results.cases():
        table.add_row(Text(case, style="bold"))
        for backend in results.backends():
            row = results.row(case, backend)
            cells = _cells(row, best_baseline_ms(results, case)) if row else _blank(results, case, backend)
            if cells:
                table.add_row(_label(results, case, backend), *cells)
    return table


def _table(title: str | None = None) -> Table:
    return Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False, collapse_padding=True)


def _title(results: Results) -> str:
    versions = results.versions
    parts = [results.gpu, f"torch {versions['torch']}"]
    parts += [f"{name} {versions[name]}" for name in ("tileattn", "tilelang") if name in versions]
    dtypes = sorted({row.dtype for row in results.rows})
    return " · ".join([*parts, *dtypes, DIRECTIONS[results.direction]])


def _label(results: Results, case: str, backend: str) -> Text:
    if backend != OWN:
        return Text(f"  {backend}")
    chosen = results.implementation.get(case)
    return Text(f"  {OWN} ({chosen})" if chosen else f"  {OWN}", style="cyan")


def _cells(row: Row, best_baseline_ms: float | None) -> tuple[str, ...]:
    speed = f"{best_baseline_ms / row.ms:.2f}×" if best_baseline_ms else DASH
    return _ms(row.ms), _tflops(row.tflops), speed, f"{row.error:.1e}", human_bytes(row.peak_bytes)


def _blank(results: Results, case: str, backend: str) -> tuple[str, ...] | None:
    """The cells of a missing row: dashes for a refusal, "failed" for a failure, else nothing."""
    if any((entry.case, entry.backend) == (case, backend) for entry in results.failed):
        return ("[red]failed[/red]", DASH, DASH, DASH, DASH)
    if any((entry.case, entry.backend) == (case, backend) for entry in results.refused):
        return (DASH,) * 5
    return None


def _ms(ms: float) -> str:
    return f"{ms:.3f}" if ms < 100 else f"{ms:.1f}"


def _tflops(tflops: float) -> str:
    return f"{tflops:.0f}" if tflops >= 10 else f"{tflops:.3f}"


def grouped(missing: Sequence[Missing]) -> list[str]:
    """One line per backend and reason, with the names of its cases."""
    groups: dict[tuple[str, str], list[str]] = {}
    for entry in missing:
        groups.setdefault((entry.backend, entry.reason), []).append(entry.case)
    return [f"{backend}: {reason} [{', '.join(cases)}]" for (backend, reason), cases in groups.items()]


def _sampled(results: Results) -> str:
    lines = [f"{case}: error over {text}" for case, text in results.checked.items() if text != "all rows"]
    return "\n".join(lines)


def _summary(comparisons: Sequence[Comparison]) -> Table:
    table = _table("tileattn's speed")
    table.add_column("against", no_wrap=True)
    for heading in ("cases", "geometric mean", "lowest"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("at", no_wrap=True)
    for each in comparisons:
        cells = (str(each.cases), f"{each.geometric_mean:.2f}×", f"{each.lowest:.2f}×")
        table.add_row(each.baseline, *cells, each.lowest_case)
    return table


def _standings(named: Mapping[str, Standing]) -> Table:
    table = _table("against the best baseline of each row")
    table.add_column("rows of", no_wrap=True)
    for heading in ("rows", "at or ahead", "geometric mean"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, standing in named.items():
        table.add_row(name, str(standing.rows), str(standing.at_or_ahead), f"{standing.geometric_mean:.3f}×")
    return table


def behind_lines(named: Mapping[str, Standing]) -> list[str]:
    """The rows behind the best baseline, the slowest first, for each group except "all"."""
    lines = []
    for name, standing in named.items():
        if name == "all" or not standing.behind:
            continue
        ties = f", {standing.ties} by less than {NOISE:.0%}" if standing.ties else ""
        rows = ", ".join(f"{case} {ratio:.3f}×" for case, ratio in standing.behind)
        lines.append(f"{name}, {len(standing.behind)} behind{ties}: {rows}")
    return lines


def _costs(measured_costs: Sequence[Cost]) -> Table:
    table = _table("what a modification costs")
    table.add_column("case", no_wrap=True)
    for heading in ("ms", "baseline", "cost"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("the baseline is", no_wrap=True)
    for each in measured_costs:
        table.add_row(each.case, _ms(each.ms), _ms(each.plain_ms), f"{each.ratio:.2f}×", each.compared_with)
    table.caption = "baseline: what the visible tiles of 128 x 128 cost in the plain kernel of the same run."
    table.caption_justify = "left"
    return table
