"""Writes the page about the speed of decoding (`PAGE`) from a committed result file of the suite decode.

    python benchmarks/make_decode_page.py

Nothing is measured here. A test checks that the committed page is what this script writes from `SOURCE`. To begin the
page: commit a result file, name it in `SOURCE` (and one of decode-ratios in `RATIOS_SOURCE`), run this script, and name
the page in mkdocs.yml. make_pictures.py draws the page's picture as well.
"""

from __future__ import annotations

from pathlib import Path

from tileattn.bench.baselines.base import OWN
from tileattn.bench.decode import plot, report, results
from tileattn.bench.decode.ceilings import overall
from tileattn.bench.decode.goals import goals
from tileattn.bench.decode.ratios import cases as ratios
from tileattn.bench.decode.ratios.report import outcomes
from tileattn.bench.decode.results import Results
from tileattn.bench.decode.rows import FAILED
from tileattn.bench.decode.summary import FLOOR, best_us, standings

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "decode-speed.md"
# There is no page as long as SOURCE is None.
SOURCE: str | None = "decode/decode-h200.json"
RATIOS_SOURCE: str | None = "decode/decode-ratios-h200.json"

PICTURE = ROOT / "docs" / "benchmarks" / "decode.png"
LABELS = {
    "tileattn-planning": "tileattn, planning",
    "tileattn-fixed": "FixedSplit(1024)",
    "fa3": "FA-3",
    "fa2": "FA-2",
    "cudnn": "cuDNN",
    "flashinfer": "FlashInfer",
    "xqa": "XQA",
}
INTRODUCTION = """\
# Speed of decoding

A model that generates text computes attention of one new query per sequence, over the keys and values of all tokens so
far, once for each layer and token. Such a call multiplies little and reads much: each key and value once. So a call can
take no less time than the memory needs to deliver them, and the measure is **bandwidth**: the bytes of K and V divided
by the time of a call, in GB/s. Two ceilings are measured in the same run: a *copy* of 2 GiB (read and written bytes
count) and a kernel that only *reads* 2 GiB.

A row is named by its batch (sequences), context (keys of each) and heads (query heads / KV heads); head dim 128, one
query per sequence. Large rows show whether a kernel reaches the memory's speed, small ones what it adds to that: a row
of 4 MB could take 1 microsecond, and a launch alone takes longer. Calls are timed in a CUDA graph, each on caches that
are not in the L2 cache; [Method](method.md#decoding) has the details.
[`benchmarks/make_decode_page.py`](../benchmarks/make_decode_page.py) writes this page from the result files that it
names.
"""
BASELINES = """\
The baselines are FA-3 (FlashAttention-3), FlashInfer's tensor-core kernels and XQA (TensorRT-LLM's kernels, in
FlashInfer), which read pages; and for contiguous caches FA-2 and cuDNN, through PyTorch's
`scaled_dot_product_attention`. Speed is the baseline's time over ours: above 1 we are faster. "Best" is the fastest
baseline of each row.
"""
TABLES = """\
## All rows

Times are microseconds per call; "GB/s", "of copy" and "of read" are tileattn's bandwidth and its parts of the two
ceilings. "tileattn" uses a plan that was made ahead, as the layers of a model share one; "tileattn, planning" makes one
in each call. `-`: the baseline does not take the row; the reasons are at the end. "Error" is the largest relative error
of a row of o against float64. Bold: below 0.92 of the best.
"""
RATIOS = """\
## What options cost

The time of a call with an option, as a multiple of a plain call's in the same run ("at most" is what we require; for
the last groups microseconds, or the time of SDPA's kernels). Of each group the worst row.
"""


def page(
    measured: Results,
    source: str,
    of_ratios: Results | None = None,
    ratios_source: str | None = None,
    picture: str = "",
) -> str:
    """The page for a result file.

    Args:
        measured: of the suite decode.
        source: its path below benchmarks/results.
        of_ratios: of the suite decode-ratios, if it was measured.
        ratios_source: its path.
        picture: the path of the picture, seen from the page; "" for none.
    """
    parts = [INTRODUCTION, _provenance(measured, source)]
    if picture:
        parts.append(f"![GB/s of K and V by the bytes that a call reads, beside other implementations]({picture})\n")
    parts += [BASELINES, *_absent(measured), *_summary(measured)]
    if measured.device == "cuda":
        parts += _requirements(measured)
    if of_ratios is not None and ratios_source is not None:
        parts += _of_ratios(of_ratios, ratios_source)
    return "\n".join([*parts, TABLES, *_tables(measured), *_notes(measured, of_ratios)])


def _requirements(measured: Results) -> list[str]:
    """What was required of this GPU before it was measured, and whether it is met."""
    lines = [
        "## What was required\n",
        'Required before anything was measured, of an H200. Sizes are bytes of K and V, MB = 2^20; "best" is here the '
        "best of\nFA-3, FlashInfer and XQA.\n",
        "| required | met | rows that meet it | worst | at |",
        "| --- | --- | ---: | ---: | --- |",
    ]
    for goal in goals(measured):
        rows = f"{goal.met} of {goal.rows}" if goal.rows else "none ran"
        lines.append(f"| {goal.text} | {goal.verdict} | {rows} | {goal.lowest} | {goal.at} |")
    return [*lines, ""]


def _of_ratios(measured: Results, source: str) -> list[str]:
    suite = ratios.suite(measured.device)
    ran = outcomes(measured, suite)
    lines = [RATIOS, _provenance(measured, source)]
    lines += ["| group | met | at most | worst | row | method |", "| --- | ---: | ---: | ---: | --- | --- |"]
    for group in dict.fromkeys(each.comparison.group for each in ran):
        of_group = [each for each in ran if each.comparison.group == group]
        worst = max(of_group, key=lambda each: each.measure / each.comparison.most)
        of, met = worst.comparison, sum(each.met for each in of_group)
        unit = "×" if of.reference else " us"
        bounds = f"{of.most:.2f}{unit} | {worst.measure:.2f}{unit}"
        lines.append(f"| {group} | {met} of {len(of_group)} | {bounds} | {of.case.name} | {of.method} |")
    return [*lines, ""]


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


def _absent(measured: Results) -> list[str]:
    """Names the baselines that ran in no row: "best" is without them."""
    ran = {row.backend for row in measured.rows}
    absent = [LABELS[name] for name in measured.backends if name in LABELS and name not in ran]
    if not absent:
        return []
    names = " and ".join(absent)
    return [
        f"**In this run {names} failed in every row** (the reasons are at the end): no figure here is beside them.\n"
    ]


def _summary(measured: Results) -> list[str]:
    lines = [
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
        lines += [f"### {kind.capitalize()}\n", f"| batch, context, heads | {' | '.join(headings)} |"]
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


def _notes(measured: Results, of_ratios: Results | None) -> list[str]:
    lines = [f"- {line}" for line in report.missing_lines(measured)]
    if of_ratios is not None:
        lines += [f"- of the options: {line}" for line in report.missing_lines(of_ratios)]
    return ["## What is missing\n", *(lines or ["Nothing."]), ""]


def main() -> None:
    """Writes the page and its picture."""
    import drawn

    if SOURCE is None:
        raise SystemExit("SOURCE names no result file yet")
    measured = results.load(RESULTS / SOURCE)
    drawn.save(plot.draw(measured), PICTURE)
    of_ratios = None if RATIOS_SOURCE is None else results.load(RESULTS / RATIOS_SOURCE)
    PAGE.write_text(page(measured, SOURCE, of_ratios, RATIOS_SOURCE, str(PICTURE.relative_to(PAGE.parent))))
    print(PAGE)


if __name__ == "__main__":
    main()
