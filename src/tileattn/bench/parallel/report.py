"""The suite as tables for the terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tileattn.bench.cases import DIRECTIONS
from tileattn.bench.parallel.results import IDEAL, MOST, Results, Row
from tileattn.measure.units import human_bytes

DASH = "-"
HEADINGS = ("case", "implementation", "ms", "TFLOPS/GPU", "of ideal", "sent", "memory", "error", "")


def render(measured: Results) -> RenderableType:
    """A table for each direction, the host's costs, and what is missing."""
    parts: list[RenderableType] = [_table(measured, direction) for direction in measured.directions()]
    if measured.host_costs:
        parts.append(_host_table(measured))
    parts += [Text(line) for line in missing_lines(measured)]
    return Group(*parts)


def title(measured: Results, direction: str) -> str:
    """What was measured, on what."""
    return f"{measured.ranks} x {measured.gpu}, {DIRECTIONS[direction]}, {measured.dtype}, head dim {measured.head_dim}"


def _table(measured: Results, direction: str) -> Table:
    table = Table(title=title(measured, direction), title_justify="left")
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading in ("case", "implementation", "") else "right")
    for case in measured.cases():
        rows = [row for row in measured.rows if (row.case, row.direction) == (case, direction)]
        for number, row in enumerate(sorted(rows, key=lambda row: (row.backend != IDEAL, row.ms))):
            table.add_row(case if number == 0 else "", *cells(measured, row))
        if rows:
            table.add_section()
    return table


def cells(measured: Results, row: Row) -> list[str]:
    """A row without its case."""
    ratio = measured.of_ideal(row)
    error = max(row.errors.values(), default=None)
    return [
        row.backend, f"{row.ms:.3f}", f"{row.tflops:.4g}", DASH if ratio is None else f"{ratio:.1%}",
        DASH if row.sent_bytes is None else human_bytes(row.sent_bytes), human_bytes(row.peak_bytes),
        DASH if error is None else f"{error:.1e}", note(measured, row),
    ]  # fmt: skip


def note(measured: Results, row: Row) -> str:
    """What is wrong with a row, or ""."""
    notes = [f"measurement wrong: over {MOST:.0%} of the ideal"] if row in measured.suspicious() else []
    return "; ".join([*notes, *([f"more than two roundings from one device: {row.wrong}"] if row.wrong else [])])


def _host_table(measured: Results) -> Table:
    table = Table(title=f"The host's time for a forward call: {measured.host_shape}", title_justify="left")
    for heading in ("call", "us"):
        table.add_column(heading, justify="left" if heading == "call" else "right")
    for cost in measured.host_costs:
        table.add_row(cost.what, f"{cost.us:.0f}")
    return table


def missing_lines(measured: Results) -> list[str]:
    """What was not measured and why, with the cases of each reason."""
    reasons: dict[tuple[bool, str, str], list[str]] = {}
    for each in measured.missing:
        cases = reasons.setdefault((each.failed, each.backend, each.reason), [])
        cases += [each.case] if each.case not in cases else []
    return [
        f"{'failed' if failed else 'refused'}: {backend}: {reason} [{'; '.join(cases)}]"
        for (failed, backend, reason), cases in sorted(reasons.items(), key=lambda each: not each[0][0])
    ]
