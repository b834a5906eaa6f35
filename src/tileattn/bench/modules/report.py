"""The table of the suite."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tileattn.bench.cases import DIRECTIONS
from tileattn.bench.modules.results import Results
from tileattn.measure.units import human_bytes


def title(results: Results) -> str:
    """What was measured, on what."""
    shape = results.shape
    return (
        f"Modules of tileattn.nn, {DIRECTIONS[shape.direction]}: batch {shape.batch}, embed_dim {shape.embed_dim}, "
        f"{shape.heads} heads (gqa: over {shape.kv_heads}), causal, {shape.dtype}, {results.gpu}"
    )


def render(results: Results) -> RenderableType:
    """The table, and below it what was not measured and why."""
    table = Table(title=title(results), title_justify="left")
    for name in ("seqlen", "module", "ms", "speed vs naive", "memory", "memory reduction", "error"):
        table.add_column(name, justify="left" if name == "module" else "right")
    for seqlen in results.lengths():
        for row in [row for row in results.rows if row.seqlen == seqlen]:
            table.add_row(
                str(seqlen), row.module, f"{row.ms:.3g}", _times(results.faster(row)), human_bytes(row.peak_bytes),
                _times(results.smaller(row)), f"{row.error:.1e}",
            )  # fmt: skip
        table.add_section()
    reasons: dict[tuple[str, str], list[str]] = {}
    for entry in results.missing:
        reasons.setdefault((entry.module, entry.reason), []).append(str(entry.seqlen))
    lines = [Text(f"{name} at {', '.join(lengths)}: {reason}") for (name, reason), lengths in reasons.items()]
    return Group(table, *lines)


def _times(factor: float | None) -> str:
    return "-" if factor is None else f"{factor:.3g}x"
