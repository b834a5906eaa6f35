"""Writes the page about the speed of decoding (`PAGE`) from a committed result file of the suite decode.

    python benchmarks/make_decode_page.py

Nothing is measured here. A test checks that the committed page is what this script writes from `SOURCE`. To begin the
page: commit a result file, name it in `SOURCE`, run this script, and name the page in mkdocs.yml.
"""

from __future__ import annotations

from pathlib import Path

from tileattn.bench.baselines.base import OWN
from tileattn.bench.decode import report, results
from tileattn.bench.decode.ceilings import overall
from tileattn.bench.decode.results import Results
from tileattn.bench.decode.rows import FAILED
from tileattn.bench.decode.summary import FLOOR, best_us, standings

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "decode-speed.md"
SOURCE: str | None = None  # such as "decode/decode-h200.json"; there is no page as long as nothing has been measured

LABELS = {
    "tileattn-planning": "with planning",
    "tileattn-fixed": "FixedSplit(1024)",
    "fa3": "FA-3",
    "fa2": "FA-2 (SDPA)",
    "cudnn": "cuDNN (SDPA)",
    "flashinfer": "FlashInfer",
    "xqa": "XQA",
}
INTRODUCTION = """\
# Speed of decoding

One new query per sequence over caches of keys and values: microseconds of a call in one CUDA graph over cold caches,
and the bytes of K and V over that time. [Method](method.md#decoding) says how it is measured.
[`benchmarks/make_decode_page.py`](../benchmarks/make_decode_page.py) writes this page from the result file that it
names.
"""


def page(measured: Results, source: str) -> str:
    """The page for a result file, `source` its path below benchmarks/results."""
    return "\n".join(
        [INTRODUCTION, _provenance(measured, source), *_summary(measured), *_tables(measured), *_notes(measured)]
    )


def _provenance(measured: Results, source: str) -> str:
    versions = {**measured.versions, **measured.baseline_versions}
    listed = ", ".join(f"{name} {version}" for name, version in versions.items())
    parts = [
        f"[`{source}`](../benchmarks/results/{source}): {measured.gpu}, {measured.dtype}, {measured.date[:10]}, commit "
        f"`{(measured.commit or 'unknown')[:12]}`; {listed}."
    ]
    if (ceiling := overall(measured.ceilings)) is not None:
        copy, read = ceiling
        parts.append(f"A copy reached {copy:.0f} GB/s" + (f", a read {read:.0f} GB/s." if read else "."))
    return " ".join(parts) + "\n"


def _summary(measured: Results) -> list[str]:
    lines = [
        "Our speed, the plan made ahead, over the best baseline of each row, then over each baseline:\n",
        "| against | rows of | rows | geometric mean | lowest | at |",
        "| --- | --- | ---: | ---: | ---: | --- |",
    ]
    for each in standings(measured):
        against = LABELS.get(each.against, each.against)
        mean = f"{each.geometric_mean:.3f}× | {each.lowest:.2f}×"
        lines.append(f"| {against} | {each.group} | {each.rows} | {mean} | {each.lowest_case} |")
    return [*lines, ""]


def _tables(measured: Results) -> list[str]:
    """A table for each kind of cache. Rows where we are below the floor are bold."""
    lines = []
    kinds = dict.fromkeys(case.partition(" (")[0] for case in measured.done)
    others = [backend for backend in measured.backends if backend != OWN]
    headings = [
        OWN,
        "GB/s",
        "of copy",
        "of read",
        *(LABELS.get(each, each) for each in others),
        "against best",
        "error",
    ]
    for kind in kinds:
        lines += [f"## {kind.capitalize()}\n", f"| batch, context, heads | {' | '.join(headings)} |"]
        lines.append("| --- |" + " ---: |" * len(headings))
        cases = [case for case in measured.done if case.partition(" (")[0] == kind]
        lines += [_line(measured, case, others) for case in cases]
        lines.append("")
    return lines


def _line(measured: Results, case: str, others: list[str]) -> str:
    own, best = measured.row(case, OWN), best_us(measured, case)
    shape = case.partition(" (")[2].removesuffix(")").replace(",", ", ")
    copy, read = overall(measured.ceilings) or (None, None)
    cells = [_time(measured, case, OWN)]
    cells += [f"{own.gbps:.0f}", _part(own.gbps, copy), _part(own.gbps, read)] if own else ["-"] * 3
    cells += [_time(measured, case, each) for each in others]
    ratio = best / own.us if own and best else None
    shown = "-" if ratio is None else f"{ratio:.2f}×"
    cells.append(f"**{shown}**" if ratio is not None and ratio < FLOOR else shown)
    return f"| {shape} | {' | '.join(cells)} | {f'{own.error:.1e}' if own else '-'} |"


def _time(measured: Results, case: str, backend: str) -> str:
    row = measured.row(case, backend)
    if row is not None:
        return report.us(row.us)
    failed = any((each.case, each.backend, each.kind) == (case, backend, FAILED) for each in measured.missing)
    return "failed" if failed else "-"


def _part(gbps: float, ceiling: float | None) -> str:
    return f"{gbps / ceiling:.0%}" if ceiling else "-"


def _notes(measured: Results) -> list[str]:
    return ["## What is missing\n", *(f"- {line}" for line in report.missing_lines(measured)), ""]


if __name__ == "__main__":
    if SOURCE is None:
        raise SystemExit("SOURCE names no result file yet")
    PAGE.write_text(page(results.load(RESULTS / SOURCE), SOURCE))
    print(PAGE)
