"""Fills docs/ladder.md: the code of the rungs between its markers, and the measured gains.

    python benchmarks/make_ladder.py

Nothing is measured here. Each marker is followed by text that this script replaces, up to `<!-- end -->`:

    <!-- code FILE PART -->    the lines between `// [PART]` and `// [/PART]` of a file of src/tileattn/kernels/mma
    <!-- rung RUNG -->         the gain of a rung over the one before it, from the result files in `SOURCES`
    <!-- gains -->             a table for each of these files

A test checks that the committed page is what this script writes. make_pictures.py draws its pictures.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

from tileattn.bench import results
from tileattn.bench.ladder.climb import Climbed, climbed
from tileattn.bench.ladder.plot import steps_of
from tileattn.bench.results import Results
from tileattn.kernels.mma.backend import parse
from tileattn.kernels.mma.rungs import ACCUMULATIONS, NAME, RUNGS

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
KERNELS = ROOT / "src" / "tileattn" / "kernels" / "mma"
PAGE = ROOT / "docs" / "ladder.md"
PICTURES = ROOT / "docs" / "ladder"

# Result files of `tileattn ladder --json`, in the order of the page. A measurement is named here when its file is
# committed to benchmarks/results.
SOURCES: tuple[str, ...] = (
    "ladder/d32-h200.json",
    "ladder/d64-h200.json",
    "ladder/d64-b2-h200.json",
    "ladder/d64-h48-h200.json",
    "ladder/d128-h200.json",
    "ladder/d512-h200.json",
)

BEFORE = dict(zip(RUNGS[1:-1], RUNGS))  # the last one, for large head dims, has none

_MARKED = re.compile(r"(<!-- (code|rung|gains)( [^>]*)? -->\n).*?(<!-- end -->)", re.DOTALL)
NOT_MEASURED = "Not measured yet.\n"


def main() -> None:
    """Write the page."""
    PAGE.write_text(filled(PAGE.read_text(), load(SOURCES)))


def load(names: Sequence[str]) -> dict[str, Results]:
    """The result files of `SOURCES`, by their names."""
    return {name: results.load(RESULTS / name) for name in names}


def filled(text: str, measured: dict[str, Results]) -> str:
    """The page, with everything between its markers replaced."""

    def replaced(match: re.Match[str]) -> str:
        contents = {
            "code": lambda: code(*match[3].split(maxsplit=1)),
            "rung": lambda: rung(match[3].strip(), measured.values()),
            "gains": lambda: gains(measured),
        }
        return f"{match[1]}{contents[match[2]]()}{match[4]}"

    return _MARKED.sub(replaced, text)


def code(file: str, part: str) -> str:
    """A part of a rung's source, as a block of Markdown."""
    source = (KERNELS / file).read_text()
    part_of_it = rf"^ *// \[{re.escape(part)}\]\n(.*?)^ *// \[/{re.escape(part)}\]\n"
    match = re.search(part_of_it, source, re.DOTALL | re.MULTILINE)
    if match is None:
        raise ValueError(f"{file} has no part // [{part}] ... // [/{part}]")
    return f"```cpp\n{textwrap.dedent(match[1])}```\n"


def gains(measured: dict[str, Results]) -> str:
    """A table for each result file."""
    return "\n".join(_section(name, each) for name, each in measured.items()) or NOT_MEASURED


def rung(name: str, measured: Iterable[Results]) -> str:
    """The speed of a rung with its best options, and its gain over the rung before it."""
    before = BEFORE.get(name, "")
    lines = []
    for each in measured:
        here, there = (_best(each, which) for which in (name, before))
        if here:
            pairs = [(here.get(acc), there.get(acc)) for acc in ACCUMULATIONS]
            cells = [cell for pair in pairs for cell in _reached(*pair)[: 1 + bool(before)]]
            lines.append(f"| {each.rows[0].case} | " + " | ".join(cells) + " |")
    if not lines:
        return NOT_MEASURED
    heading = " | ".join(f"{acc} sums" + f" | over {before}" * bool(before) for acc in ACCUMULATIONS)
    columns = heading.count("|") + 1
    return "\n".join([f"| measured, TFLOPS | {heading} |", "|---|" + "---:|" * columns, *lines]) + "\n"


def _best(measured: Results, name: str) -> dict[str, float]:
    """TFLOPS of a rung's fastest options, by accumulation."""
    best: dict[str, float] = {}
    for row in measured.rows:
        prefix, _, options = row.backend.partition(":")
        if prefix == NAME and (variant := parse(options)).rung == name:
            best[variant.acc] = max(best.get(variant.acc, 0.0), row.tflops)
    return best


def _reached(here: float | None, there: float | None) -> tuple[str, str]:
    if here is None:
        return "", ""
    return f"{here:.0f}", f"{here / there:.2f}×" if there is not None else ""


def picture(name: str) -> Path:
    """The path of the picture of a result file."""
    return PICTURES / Path(name).with_suffix(".png").name


def _section(name: str, measured: Results) -> str:
    row = measured.rows[0]
    all_steps = climbed(measured, steps_of(measured))
    fa2 = next((each.tflops for each in measured.rows if each.backend == "fa2"), None)
    beside = [each for each in measured.rows if not each.backend.startswith(NAME)]
    lines = [
        f"### {row.case}, {row.dtype}",
        "",
        f"[`{name}`](../benchmarks/results/{name}): {measured.gpu}, {measured.date[:10]}. "
        + ", ".join(f"{each.backend} {each.tflops:.0f} TFLOPS" for each in beside)
        + ".",
        "",
        f"![TFLOPS of each step](ladder/{picture(name).name})",
        "",
        "| step | ms | TFLOPS | gain over the best so far | against FA-2 | error |",
        "|---|---:|---:|---:|---:|---:|",
        *(_line(each, fa2) for each in all_steps),
    ]
    return "\n".join(lines) + "\n"


def _line(each: Climbed, fa2: float | None) -> str:
    gain = "" if each.gain is None else f"+{each.gain:.1%}"
    against = "" if fa2 is None else f"{each.row.tflops / fa2:.2f}×"
    row = each.row
    return f"| {each.label} | {row.ms:.3f} | {row.tflops:.1f} | {gain} | {against} | {row.error:.1e} |"


if __name__ == "__main__":
    main()
