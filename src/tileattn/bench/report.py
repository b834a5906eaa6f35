"""A run's results as tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tileattn.bench.peers.base import OWN
from tileattn.bench.results import Missing, Results, Row

DASH = "—"


def render(results: Results) -> RenderableType:
    """Everything to be said of a run: measurements, what is missing and why, and the summary."""
    parts: list[RenderableType] = [Text(_title(results), style="bold"), measurements(results)]
    parts += [Text.assemble((f"{DASH} refused: ", "yellow"), line) for line in _grouped(results.refused)]
    parts += [Text.assemble(("✗ failed: ", "bold red"), line) for line in _grouped(results.failed)]
    if notes := _sampled(results):
        parts.append(Text(notes, style="dim"))
    if comparisons := compare(results):
        parts.append(_summary(comparisons))
    return Group(*parts)


def measurements(results: Results) -> Table:
    """A heading per case, and a line per backend under it; narrow enough for a terminal of 80 columns."""
    table = _table()
    table.add_column("case (batch,seqlen,heads)", no_wrap=True)
    for heading in ("ms", "TFLOPS", "speed", "error", "memory"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.caption = (
        "speed: × the fastest peer's. error: largest relative error of a row of o against float64. "
        "memory: peak beyond the inputs."
    )
    table.caption_justify = "left"
    for case in results.cases():
        table.add_row(Text(case, style="bold"))
        for backend in results.backends():
            row = results.row(case, backend)
            cells = _cells(row, _best_peer_ms(results, case)) if row else _blank(results, case, backend)
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
    return " · ".join([*parts, *dtypes])


def _label(results: Results, case: str, backend: str) -> Text:
    if backend != OWN:
        return Text(f"  {backend}")
    chosen = results.implementation.get(case)
    return Text(f"  {OWN} ({chosen})" if chosen else f"  {OWN}", style="cyan")


def _cells(row: Row, best_peer_ms: float | None) -> tuple[str, ...]:
    speed = f"{best_peer_ms / row.ms:.2f}×" if best_peer_ms else DASH
    return _ms(row.ms), _tflops(row.tflops), speed, f"{row.error:.1e}", human_bytes(row.peak_bytes)


def _blank(results: Results, case: str, backend: str) -> tuple[str, ...] | None:
    """Dashes for a refusal, "failed" for a failure, nothing for what was not asked for."""
    if any((entry.case, entry.backend) == (case, backend) for entry in results.failed):
        return ("[red]failed[/red]", DASH, DASH, DASH, DASH)
    if any((entry.case, entry.backend) == (case, backend) for entry in results.refused):
        return (DASH,) * 5
    return None


def _best_peer_ms(results: Results, case: str) -> float | None:
    return min((row.ms for row in results.rows if row.case == case and row.backend != OWN), default=None)


def _ms(ms: float) -> str:
    return f"{ms:.3f}" if ms < 100 else f"{ms:.1f}"


def _tflops(tflops: float) -> str:
    return f"{tflops:.0f}" if tflops >= 10 else f"{tflops:.3f}"


def human_bytes(count: float) -> str:
    """Bytes with a binary unit: 512 B, 1.5 KiB, 64.0 MiB."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def _grouped(missing: Sequence[Missing]) -> list[str]:
    """One line per backend and reason, naming its cases."""
    groups: dict[tuple[str, str], list[str]] = {}
    for entry in missing:
        groups.setdefault((entry.backend, entry.reason), []).append(entry.case)
    return [f"{backend}: {reason} [{', '.join(cases)}]" for (backend, reason), cases in groups.items()]


def _sampled(results: Results) -> str:
    lines = [f"{case}: error over {text}" for case, text in results.checked.items() if text != "all rows"]
    return "\n".join(lines)


@dataclass(frozen=True)
class Comparison:
    """How many times faster tileattn is than a peer (or the fastest peer of each case) over `cases` cases."""

    peer: str
    cases: int
    geometric_mean: float
    lowest: float
    lowest_case: str


def compare(results: Results) -> list[Comparison]:
    """tileattn against each peer, over the cases that both ran, then against the fastest peer of each case."""
    peers = [backend for backend in results.backends() if backend != OWN]
    own = {row.case: row.ms for row in results.rows if row.backend == OWN}
    found = []
    for peer in peers:
        times = {row.case: row.ms for row in results.rows if row.backend == peer}
        found.append(_comparison(peer, {case: times[case] / own[case] for case in own if case in times}))
    if len(peers) > 1:
        best = {case: _best_peer_ms(results, case) for case in own}
        found.append(_comparison("fastest peer", {case: ms / own[case] for case, ms in best.items() if ms}))
    return [comparison for comparison in found if comparison is not None]


def _comparison(peer: str, ratios: dict[str, float]) -> Comparison | None:
    if not ratios:
        return None
    mean = exp(sum(map(log, ratios.values())) / len(ratios))
    lowest_case = min(ratios, key=ratios.__getitem__)
    return Comparison(peer, len(ratios), mean, ratios[lowest_case], lowest_case)


def _summary(comparisons: Sequence[Comparison]) -> Table:
    table = _table("tileattn's speed")
    table.add_column("against", no_wrap=True)
    for heading in ("cases", "geometric mean", "lowest"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("at", no_wrap=True)
    for each in comparisons:
        cells = (str(each.cases), f"{each.geometric_mean:.2f}×", f"{each.lowest:.2f}×")
        table.add_row(each.peer, *cells, each.lowest_case)
    return table
