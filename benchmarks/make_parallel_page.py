"""Writes the page about the speed of several GPUs (`PAGE`) from a committed result file of the suite parallel.

    python benchmarks/make_parallel_page.py

Nothing is measured here. A test checks that the committed page is what this script writes from `SOURCE`. To begin the
page: commit a result file, name it in `SOURCE`, run this script, and name the page in mkdocs.yml. make_pictures.py
draws the page's picture as well.
"""

from __future__ import annotations

from pathlib import Path

from tileattn.bench.baselines.base import OWN
from tileattn.bench.cases import DIRECTIONS
from tileattn.bench.parallel import plot, report, results
from tileattn.bench.parallel.results import IDEAL, Results, Row
from tileattn.measure.units import human_bytes

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "parallel-speed.md"
PICTURE = ROOT / "docs" / "benchmarks" / "parallel.png"
# There is no page if SOURCE is None.
SOURCE: str | None = "parallel/suite-h200.json"

INTRODUCTION = """\
# Speed on several GPUs

How near [`Plan.attention`](parallel.md) comes to the **ideal**: as many GPUs at once, each with its part of the heads
of the whole sequence, by `tileattn.attention` and without communication. The slowest GPU counts, for the ideal as well.
In each round all implementations run, in a random order; a time is the median over rounds.
[`benchmarks/make_parallel_page.py`](../benchmarks/make_parallel_page.py) writes this page from the result file that it
names.
"""
BASELINES = """\
PyTorch is its `context_parallel`: for causal attention the ring over SDPA's kernels, cuDNN and FA-2, with both ways of
rotation (`set_rotate_method`); for windows and documents FlexAttention with its load balancers. Of all these the
fastest of each row counts, and is named. "Faster" is its time over ours. It may pass the ideal where its kernel is
faster than ours; where we pass it, the measurement is wrong. "Sent" is what a GPU sends in a call. "Memory" is the most
that is allocated on a GPU, with the inputs. "Difference" is that of o, or of the gradients, from one GPU.
"""
HEADINGS = (
    "case", "ideal, ms", "tileattn, ms", "TFLOPS a GPU", "of the ideal", "PyTorch, ms", "of the ideal", "faster",
    "sent", "memory", "difference",
)  # fmt: skip


def page(measured: Results, source: str, picture: str = "") -> str:
    """The page for a result file.

    Args:
        measured: of the suite parallel.
        source: its path below benchmarks/results.
        picture: the path of the picture, seen from the page; "" for none.
    """
    parts = [INTRODUCTION, _provenance(measured, source)]
    if picture:
        parts.append(f"![The speed of tileattn and of PyTorch as a part of the ideal, by case]({picture})\n")
    parts.append(BASELINES)
    for direction in measured.directions():
        parts += [f"## {DIRECTIONS[direction].capitalize()}\n", *_table(measured, direction), ""]
    parts += [*_others(measured), *_host(measured)]
    lines = [f"- {line}" for line in report.missing_lines(measured)]
    return "\n".join([*parts, "## What is missing\n", *(lines or ["Nothing."]), ""])


def _provenance(measured: Results, source: str) -> str:
    listed = ", ".join(f"{name} {version}" for name, version in measured.versions.items())
    return (
        f"[`{source}`](../benchmarks/results/{source}): {measured.ranks} × {measured.gpu}, {measured.dtype}, head dim "
        f"{measured.head_dim}, {measured.date[:10]}, commit `{(measured.commit or 'unknown')[:12]}`; {listed}.\n"
    )


def _table(measured: Results, direction: str) -> list[str]:
    """A line for each case: the ideal, tileattn and the best of PyTorch's."""
    lines = [f"| {' | '.join(HEADINGS)} |", "| --- |" + " ---: |" * (len(HEADINGS) - 1)]
    for case in measured.cases():
        own = measured.row(case, OWN, direction)
        if own is not None:
            lines.append(_line(measured, own, measured.row(case, IDEAL, direction)))
    return lines


def _line(measured: Results, own: Row, ideal: Row | None) -> str:
    theirs = measured.best_of_pytorch(own.case, own.direction)
    sent = "-" if own.sent_bytes is None else human_bytes(own.sent_bytes)
    difference = f"{max(own.errors.values()):.1e}" if own.errors else "-"
    note = report.note(measured, own)
    cells = [
        f"{own.case} ({note})" if note else own.case, f"{ideal.ms:.2f}" if ideal else "-", f"{own.ms:.2f}",
        f"{own.tflops:.0f}", _part(measured, own), f"{theirs.ms:.2f} ({theirs.backend})" if theirs else "-",
        _part(measured, theirs), f"{theirs.ms / own.ms:.2f}×" if theirs else "-", sent, human_bytes(own.peak_bytes),
        difference,
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _part(measured: Results, row: Row | None) -> str:
    ratio = None if row is None else measured.of_ideal(row)
    return "-" if ratio is None else f"{ratio:.1%}"


def _others(measured: Results) -> list[str]:
    """Rows of algorithms that were named, if there are any."""
    rows = [row for row in measured.rows if row.backend.startswith(f"{OWN}-")]
    if not rows:
        return []
    lines = [
        "## By algorithm\n",
        "| case | pass | algorithm | ms | of the ideal |",
        "| --- | --- | --- | ---: | ---: |",
    ]
    lines += [
        f"| {row.case} | {DIRECTIONS[row.direction]} | {row.backend.removeprefix(f'{OWN}-')} | {row.ms:.2f} | "
        f"{_part(measured, row)} |"
        for row in rows
    ]
    return [*lines, ""]


def _host(measured: Results) -> list[str]:
    if not measured.host_costs:
        return []
    lines = ["## The host's time\n", f"Until a forward call returns, after the first: {measured.host_shape}.\n"]
    lines += ["| call | microseconds |", "| --- | ---: |"]
    lines += [f"| `{cost.what}` | {cost.us:.0f} |" for cost in measured.host_costs]
    return [*lines, ""]


def main() -> None:
    """Writes the page and its picture."""
    import drawn

    if SOURCE is None:
        raise SystemExit("SOURCE names no result file yet")
    measured = results.load(RESULTS / SOURCE)
    drawn.save(plot.draw(measured), PICTURE)
    PAGE.write_text(page(measured, SOURCE, str(PICTURE.relative_to(PAGE.parent))))
    print(PAGE)


if __name__ == "__main__":
    main()
