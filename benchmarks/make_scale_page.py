"""Writes the page about attention on 4 to 1,024 GPUs (`PAGE`) from the cost model, and draws its picture.

    python benchmarks/make_scale_page.py      # or: make pages; the picture: make pictures

Nothing is measured here. A test checks that the committed page is what this script writes. The page changes with the
cost model, with the rates in parallel/prediction/rates.py, and with the result files of `tileattn bench --suite
parallel`, beside which it sets the model.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, NamedTuple

from parallel_rows import Compared, compared

from tileattn import Causal, SlidingWindow
from tileattn.measure.units import human_bytes
from tileattn.parallel import Simulation, Topology, simulate
from tileattn.parallel.prediction.rates import FIGURES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "parallel"
PAGE = ROOT / "docs" / "parallel-scale.md"
PICTURE = ROOT / "docs" / "parallel" / "scale.png"

GPUS = (4, 8, 16, 64, 256, 1024)
TOKENS = 2**20
WINDOW, DOCUMENTS = 4096, 64


class Case(NamedTuple):
    """What is predicted. arguments: of `simulate`, without the topology."""

    title: str
    colour: str
    kv_heads: int
    arguments: dict[str, Any]


@functools.cache
def documents() -> list[int]:
    """cu_seqlens of documents with log-normal lengths, sigma 1. Only `random()` keeps its sequence in all Pythons."""
    source, normal = random.Random(26), NormalDist()
    weights = [2.718281828459045 ** normal.inv_cdf(source.random()) for _ in range(DOCUMENTS)]
    return [0, *(round(TOKENS * each / sum(weights)) for each in accumulate(weights))]


CASES = (
    Case("Causal, 32 query heads, 8 key/value heads", "#D55E00", 8, {"mask": Causal()}),
    Case("Causal, 32 query heads, 32 key/value heads", "#0072B2", 32, {"mask": Causal()}),
    Case(
        f"A window of {WINDOW} keys, 32/8 heads", "#009E73", 8,
        {"mask": SlidingWindow(WINDOW - 1, 0), "layout": "contiguous"},
    ),
    Case(
        f"{DOCUMENTS} documents, 32/8 heads", "#CC79A7", 8,
        {"mask": Causal(), "documents": documents()},
    ),
)  # fmt: skip
SHORT = ("causal, 32/8", "causal, 32/32", f"window {WINDOW}, 32/8", f"{DOCUMENTS} documents, 32/8")


@functools.cache
def predicted(case: int, gpus: int, algorithm: str, sites: int = 1) -> Simulation:
    """What the model says of a case."""
    topology = Topology(gpus, site=None if sites == 1 else gpus // sites)
    shape = (1, TOKENS, 32, CASES[case].kv_heads, 128)
    return simulate(topology, shape=shape, algorithm=algorithm, **CASES[case].arguments)


# --- The page ---

INTRODUCTION = """\
# Attention at 4 to 1,024 GPUs: predictions

**Nothing on this page was measured on more than two GPUs.** The tables show what the cost model of
[`tileattn.parallel.simulate`](parallel.md#prediction) says of a sequence of 1,048,576 tokens, batch size 1, head dim
128, bf16, on 4 to 1,024 GPUs: 8 in a node, NVLink inside a node, 400 Gb/s of InfiniBand for each GPU between nodes.

The model counts exactly the scores that each GPU computes and the bytes that it receives, for this mask, layout and
algorithm; tests compare the bytes with real transfers. It assumes that kernels run at one speed whatever the size of a
call, that links reach one rate whatever the traffic of others, and that each call and each transfer costs a fixed time
more. It knows nothing of slow nodes, of congestion, or of transfers that take longer with more ranks. It is least
certain where calls are short: at the end of each table.
"""

COLUMNS = """\
*% of ideal* compares with equal work on all GPUs and free communication. *Received* is what the GPU with the most
traffic gets in a forward pass, all of it and from other nodes. *Algorithm* is what `algorithm="auto"` picks, with the
groups of heads whose transfers overlap with computation. *A flat ring* passes all keys and values from rank to rank.
"""


def page(rows: list[Compared], picture: str) -> str:
    """The page. picture: its path, seen from the page."""
    parts = [INTRODUCTION, *_rates(), *_beside(rows)]
    parts += ["## The tables\n", f"![% of ideal by the number of GPUs, a line for each mask]({picture})\n", COLUMNS]
    for number, case in enumerate(CASES):
        parts += [f"### {case.title}\n", *_table(number)]
        if "documents" in case.arguments:
            parts.append(_about_documents())
    parts += [*_two_sites(), WAYS]
    return "\n".join(parts)


WAYS = """\
## What the tables say

- Within a node, `auto` and a flat ring are both close to the ideal: NVLink hides behind the kernel.
- Between nodes, a flat ring sends all keys and values through each GPU's InfiniBand port. `"2d"` first shares the heads
  within a node, so that each port carries an eighth.
- Grouped heads (32/8) move a quarter of the bytes of 32/32, and so reach about four times as many GPUs.
- A window moves its halo only. With 1,024 tokens a GPU the fixed costs of calls and transfers are most of the time.
- Documents are cut over as few GPUs as balance needs, but these may be in different nodes, since the layout does not
  know of nodes. Their many short calls cost time as well.
- Between two sites, only grouped heads on few GPUs are worth it.

[`benchmarks/make_scale_page.py`](../benchmarks/make_scale_page.py) writes this page. For other shapes, masks and
rates, call `simulate` with a `Topology` of your own.
"""


def _rates() -> list[str]:
    names: dict[str, tuple[str, Callable[[float], str]]] = {
        "forward": ("forward kernel", lambda x: f"{x / 1e12:.0f} TFLOPS"),
        "backward": ("backward kernel", lambda x: f"{x / 1e12:.0f} TFLOPS"),
        "call": ("one more call of a kernel", lambda x: f"{1e6 * x:.1f} us"),
        "fast": ("NVLink, each way", lambda x: f"{x / 1e9:.0f} GB/s"),
        "transfer": ("one more transfer", lambda x: f"{1e6 * x:.1f} us"),
        "copy": ("copies within a GPU", lambda x: f"{x / 1e9:.0f} GB/s"),
        "network": ("InfiniBand, each way, a GPU", lambda x: f"{x / 1e9:.0f} GB/s"),
        "far": ("between two sites, each way, a GPU", lambda x: f"{x / 1e9:.2f} GB/s"),
    }
    lines = ["## The rates\n", "| of one GPU | rate | measured? | source |", "| --- | ---: | --- | --- |"]
    for name, (what, shown) in names.items():
        figure = FIGURES[name]
        kind = "measured on two GPUs" if figure.measured else "assumed"
        source = f"[`{figure.source}`](../{figure.source})" if figure.measured else figure.source
        lines.append(f"| {what} | {shown(figure.value)} | {kind} | {source} |")
    lines.append("")
    if not any(figure.measured for figure in FIGURES.values()):
        lines.append("**No rate was measured with this code yet.**\n")
    lines.append(
        "`torchrun --nproc-per-node 2 benchmarks/calibrate_parallel.py` measures the first five on a machine with two\n"
        "GPUs. `Topology.calibrated(file, ranks)` takes them from the file that it writes.\n"
    )
    return lines


def _beside(rows: list[Compared]) -> list[str]:
    lines = ["## The model beside measurements\n"]
    if not rows:
        return [
            *lines,
            "No file of `tileattn bench --suite parallel` is in the repository yet. "
            "[Measured on two GPUs](parallel.md#measured-on-two-gpus)\nhas what is known.\n",
        ]
    files = ", ".join(
        f"[`{name}`](../benchmarks/results/parallel/{name})" for name in sorted({row.file for row in rows})
    )
    ratios = sorted(row.predicted_ms / row.ms for row in rows)
    lines += [
        f"From {files}. Of {len(rows)} rows the model's time is {ratios[0]:.2f} to {ratios[-1]:.2f} times the measured "
        f"one, {ratios[len(ratios) // 2]:.2f} in the middle.\n",
        "| GPUs | case | implementation | pass | measured ms | predicted ms | predicted / measured |",
        "| --- | --- | --- | --- | ---: | ---: | ---: |",
    ]
    for row in rows:
        times = f"{_ms(row.ms)} | {_ms(row.predicted_ms)} | {row.predicted_ms / row.ms:.2f}"
        lines.append(f"| {row.ranks} x {row.gpu} | {row.case} | {row.backend} | {row.direction} | {times} |")
    return [*lines, ""]


def _table(number: int) -> list[str]:
    lines = [
        "| GPUs | tokens a GPU | algorithm | forward ms | % of ideal | both passes ms | % of ideal | received | "
        "from other nodes | a flat ring: both, % of ideal |",
        "| ---: | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for gpus in GPUS:
        found, ring = predicted(number, gpus, "auto"), predicted(number, gpus, "ring")
        forward, both = found.efficiency
        most = human_bytes(max(map(sum, found.received)))
        between = max(sum(each[1:]) for each in found.received)
        cells = [
            f"{gpus:,}", f"{TOKENS // gpus:,}", _algorithm(found), _ms(1e3 * max(found.forward)), f"{forward:.0%}",
            _ms(1e3 * _both(found)), f"{both:.0%}", most, human_bytes(between) if between else "-",
            f"{ring.efficiency[1]:.0%}",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def _about_documents() -> str:
    ends = documents()
    lengths = sorted(stop - start for start, stop in pairwise(ends))
    worst = min((predicted(len(CASES) - 1, gpus, "auto").balance, gpus) for gpus in GPUS)
    return (
        f"Lengths are log-normal, sigma 1, from {lengths[0]:,} to {lengths[-1]:,} tokens. The mean area of a GPU is at "
        f"least\n{worst[0]:.0%} of the largest (at {worst[1]:,} GPUs); 100 % would be perfect balance.\n"
    )


def _two_sites() -> list[str]:
    far = FIGURES["far"].value / 1e9
    lines = [
        "## Two sites\n",
        f"Half of the GPUs at each site, {far:.2f} GB/s for each GPU between them, both passes. No algorithm knows of "
        "sites:\nwhat is needed from the other site is fetched once for each GPU.\n",
        "| GPUs | 32/8 heads: algorithm | % of ideal | from the other site | a flat ring | 32/32 heads: algorithm | "
        "% of ideal | from the other site | a flat ring |",
        "| ---: | --- | ---: | ---: | ---: | --- | ---: | ---: | ---: |",
    ]
    for gpus in GPUS[2:]:
        cells = [f"{gpus:,}"]
        for number in (0, 1):
            found, ring = (predicted(number, gpus, algorithm, sites=2) for algorithm in ("auto", "ring"))
            far_bytes = human_bytes(max(each[2] for each in found.received))
            cells += [_algorithm(found), f"{found.efficiency[1]:.0%}", far_bytes, f"{ring.efficiency[1]:.0%}"]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def _algorithm(found: Simulation) -> str:
    groups = found.head_groups
    return f"{found.algorithm}, {groups} groups" if groups > 1 else found.algorithm


def _both(found: Simulation) -> float:
    return max(f + b for f, b in zip(found.forward, found.backward))


def _ms(ms: float) -> str:
    return f"{ms:,.0f}" if ms >= 100 else f"{ms:#.3g}"


# --- The picture ---


def draw() -> Figure:
    """% of ideal of both passes over the number of GPUs: "auto", and dashed a flat ring."""
    from matplotlib.figure import Figure

    from tileattn.bench.plot import FAINT, INK, style

    figure = Figure(figsize=(7.2, 3.7), layout="constrained")
    axes = figure.subplots()
    places = [math.log2(gpus) for gpus in GPUS]
    for algorithm, line, marker in (("auto", "-", "o"), ("ring", "--", "")):
        for number, case in enumerate(CASES):
            if algorithm == "ring" and number > 1:
                continue
            heights = [100 * predicted(number, gpus, algorithm).efficiency[1] for gpus in GPUS]
            label = SHORT[number] if algorithm == "auto" else f"{SHORT[number]}: a flat ring"
            axes.plot(places, heights, line, marker=marker, markersize=4, color=case.colour, linewidth=1.8, label=label)
    axes.set_xticks(places, [f"{gpus:,}" for gpus in GPUS])
    axes.set_xlabel("GPUs, 8 a node; 1,048,576 tokens in all", fontsize=9, color=FAINT)
    axes.set_ylabel("% of ideal, both passes", fontsize=9, color=FAINT)
    axes.set_title("Predicted, not measured", fontsize=10.5, color=INK, loc="left")
    style(axes)
    axes.set_ylim(0, 104)
    figure.legend(loc="outside right upper", frameon=False, fontsize=9)
    return figure


def main() -> None:
    """Writes the page."""
    PAGE.write_text(page(compared(RESULTS), str(PICTURE.relative_to(PAGE.parent))))
    print(PAGE)


if __name__ == "__main__":
    main()
