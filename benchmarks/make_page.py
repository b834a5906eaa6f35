"""Writes docs/benchmarks.md from committed result files. make_pictures.py draws its pictures.

    python benchmarks/make_page.py

Nothing is measured here. A test checks that the committed page is what this script writes from `SOURCES`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import floor
from pathlib import Path

from tileattn.bench import results
from tileattn.bench.baselines.base import OWN, is_own
from tileattn.bench.cases import DIRECTIONS
from tileattn.bench.compare import Standing, best_baseline_ms, compare, standings
from tileattn.bench.cost import costs
from tileattn.bench.draws import standing as draw_standing
from tileattn.bench.modules import results as module_results
from tileattn.bench.plot import LABELS, by_length
from tileattn.bench.report import grouped
from tileattn.bench.results import Results, Row
from tileattn.measure.ceilings import Ceiling, overall
from tileattn.measure.units import human_bytes

# The result file of each suite that the page shows; None where there is none yet. A newer measurement is named here
# when its file is committed. The key is what the files' names begin with: the suite, and the direction unless forward.
SOURCES: dict[str, str | None] = {
    "fa": "forward/fa-h200.json",
    "variants": "variants/variants-h200.json",
    "heads": "forward/heads-h200.json",
    "fp8": "forward/fp8-h200.json",
    "fa-bwd": "backward/fa-bwd-h200.json",
    "variants-bwd": "variants/variants-bwd-h200.json",
    "heads-bwd": None,
    "random": "forward/random-h200.json",
    "random-bwd": "backward/random-bwd-h200.json",
    "memory-fwdbwd": "memory/memory-fwdbwd-h200.json",
    "varlen": "packed/varlen-h200.json",
    "varlen-bwd": "packed/varlen-bwd-h200.json",
    # Of benchmarks/published_rows.py.
    "tilelang-full": "forward/tilelang-full-h200.json",
    "tilelang-causal": "forward/tilelang-causal-h200.json",
    "tilelang-4096x8192-full": "forward/tilelang-4096x8192-full-h200.json",
    "tilelang-4096x8192-causal": "forward/tilelang-4096x8192-causal-h200.json",
    "triton-d64": "triton/fwd-d64-causal-fp16-h200.json",
    "triton-full-d64": "triton/fwd-d64-full-fp16-h200.json",
    "triton-d128": "triton/fwd-d128-causal-fp16-h200.json",
    "triton-full-d128": "triton/fwd-d128-full-fp16-h200.json",
    "triton-bwd-d64": "triton/bwd-d64-causal-fp16-h200.json",
    "triton-full-bwd-d64": "triton/bwd-d64-full-fp16-h200.json",
    "triton-bwd-d128": "triton/bwd-d128-causal-fp16-h200.json",
    "triton-full-bwd-d128": "triton/bwd-d128-full-fp16-h200.json",
    "triton-fp32-d64": "triton/fwd-d64-causal-fp32-h200.json",
    "triton-fp32-d128": "triton/fwd-d128-causal-fp32-h200.json",
    "triton-fp32-bwd-d64": "triton/bwd-d64-causal-fp32-h200.json",
    "triton-fp32-bwd-d128": "triton/bwd-d128-causal-fp32-h200.json",
}
# The result files of `tileattn bench --suite modules`, which have a format of their own; forward, then training.
MODULES: tuple[str, ...] = ("memory/modules-h200.json", "memory/modules-fwdbwd-h200.json")
# Nothing is said of these as long as nothing has been measured.
OPTIONAL = tuple(key for key in SOURCES if key not in ("fa", "variants", "heads", "fp8"))
# What a reader should know of a file: shown below its tables. A row that failed stays in its file when it is mended.
_SLOW_HOST = (
    "the machine's host was slow in this run: Triton's tutorial needed 0.262 ms for (4, 1024, 16, 128), where the run "
    "before had 0.073"
)
_SLOW_BACKWARD = (
    "The machine's host was slow in this run: the row of 1024 tokens is the host's time. In the [run "
    "before](../benchmarks/results/{file}) it had {before} ms, {ratio} times as fast as FA-2{more}. Kernels changed "
    "little in between: in turns with those of 6f002c6, without the host, [the rows of 1024, 4096 and 16384 tokens "
    "took {turns} of the time](../benchmarks/results/triton/grid-h200.txt)."
)
_SLOW_TUTORIAL = (
    "The machine's host was slow in this run: the tutorial's {ms} ms for 1024 tokens are the host's. In the [run "
    "before](../benchmarks/results/{file}) they were {before} ms."
)
REMARKS = {
    "triton/fwd-d64-causal-fp16-h200.json": _SLOW_TUTORIAL.format(
        ms=0.096, before=0.068, file="triton/fwd-d64-causal-fp16-before-h200.json"
    ),
    "triton/fwd-d128-causal-fp16-h200.json": _SLOW_TUTORIAL.format(
        ms="0.190", before=0.069, file="triton/fwd-d128-causal-fp16-before-h200.json"
    ),
    "triton/bwd-d64-causal-fp16-h200.json": _SLOW_BACKWARD.format(
        file="triton/bwd-d64-causal-fp16-before-h200.json",
        before=0.188,
        ratio=1.4,
        more=", and the one of 16384 tokens had 31.6 ms, 1.03 times as fast as the tutorial; why not here is unknown",
        turns="0.98, 0.98 and 1.00",
    ),
    "triton/bwd-d128-causal-fp16-h200.json": _SLOW_BACKWARD.format(
        file="triton/bwd-d128-causal-fp16-before-h200.json",
        before=0.236,
        ratio=1.08,
        more="",
        turns="0.99, 0.98 and 1.00",
    ),
    "backward/fa-bwd-h200.json": (
        "With `deterministic=True` [an earlier run](../benchmarks/results/backward/deterministic-h200.json) took 1.23 "
        "times as long over the rows of head dim 64 (1.09 to 1.30), 1.22 times at 128 (1.09 to 1.33), and as long at "
        "256 and 192/128, where dq has a kernel of its own anyway."
    ),
    "packed/varlen-h200.json": (
        f"`D128 causal (32,512,16) uniform` is the host's time, not the GPU's; {_SLOW_HOST}. Since then a call's "
        "launch of the plan costs the host less. [Before](../benchmarks/results/packed/varlen-before-h200.json) the "
        "row had 0.095 ms, 0.936 of dense; it was not measured again."
    ),
}

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"
PICTURES = ROOT / "docs" / "benchmarks"

MISSING = "–"
BF16 = f"{OWN}-bf16"

METHOD = """\
# Benchmarks

This page shows how fast {passes}, beside other implementations (the
*baselines*) and beside the most that the GPU reaches. [`benchmarks/make_page.py`](../benchmarks/make_page.py) writes it
from the result files that it names; to change a figure, measure it. [The index of the
files](../benchmarks/results/README.md) describes their format.

## Method

- **Work.** TFLOPS count `2 * batch * heads * (head_dim + head_dim_v)` for each visible (query, key) pair: two per
  multiply-add of QKᵀ and PV, nothing for the softmax. A square causal mask counts as exactly half of all pairs, as in
  the FlashAttention papers; any other mask is counted pair by pair.
- **Time** is the median time of a call between two CUDA events on its stream. Before each call 256 MiB are overwritten,
  so that no call finds its inputs in the L2 cache. That takes longer than a launch, so the host's time is not included.
  What a user does once (compiling, block masks, dense masks) is done ahead.
- **Baselines.** All implementations of a row run in one process on the same tensors, in rounds. Each round measures all
  of them for 40 ms, in another order. Over the rounds each follows each other one equally often (a Williams square),
  because after a kernel that draws little power the next runs at a higher clock. "Against best" is the time of the
  fastest baseline of that row over ours: above 1 we are ahead; where we are behind it is bold. Runs differ by up to
  2 %, so a smaller difference is a tie.
- **Ceilings.** The same method measures a cuBLAS product (bf16, 8192 x 8192 x 8192) and a copy on the device (1 GiB,
  counting bytes read and bytes written) before the first row and after the last; the mean of both is shown.
- **Error** is the largest relative error of a row of the output against float64 on the same inputs, which are standard
  normal. A result of ours that breaks the tolerance rule (at most twice the error of PyTorch's eager attention in the
  same dtype, plus a rounding) is a failure and has no time.
"""

METHOD_BACKWARD = """\
The backward pass is measured like the forward pass. What is timed is `torch.autograd.grad(o, (q, k, v), do)`, for all
implementations alike, so kernels before and after the main one are included. The forward pass has run before and is not
included; gradients are not accumulated. TFLOPS count the five products, QKᵀ again, dO·Vᵀ, Pᵀ·dO, dS·K and dSᵀ·Q:
`2 * batch * heads * (3 * head_dim + 2 * head_dim_v)` for each visible pair, 2.5 times the forward where the head dims
are equal. The error is the largest of dq, dk and dv, of a row as above, except that rows smaller than the median row
are measured by that one, because large terms cancel in them. Memory is that of forward and backward."""


@dataclass(frozen=True)
class Source:
    """A result file: its name in benchmarks/results, and what is in it."""

    name: str
    results: Results


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(load(), load_modules()))


def load() -> dict[str, Source]:
    """The result files of `SOURCES`, by its keys."""
    return {key: Source(name, results.load(RESULTS / name)) for key, name in SOURCES.items() if name is not None}


def load_modules() -> dict[str, module_results.Results]:
    """The result files of `MODULES`, by their names."""
    return {name: module_results.load(RESULTS / name) for name in MODULES}


def page(sources: Mapping[str, Source], modules: Mapping[str, module_results.Results] | None = None) -> str:
    """The page in Markdown. sources: by the keys of `SOURCES`. modules: by the names of their files."""
    sections = {
        "fa": _plain, "random": partial(_random, grid=sources.get("fa")),
        "variants": _variants, "heads": _heads, "fp8": _fp8,
        "fa-bwd": _plain, "random-bwd": partial(_random, grid=sources.get("fa-bwd")),
        "variants-bwd": _variants, "heads-bwd": _heads, "memory-fwdbwd": _memory,
        "varlen": _packed, "varlen-bwd": _packed,
        **{key: _tilelang for key in SOURCES if key.startswith("tilelang-")},
        **{key: _triton for key in SOURCES if key.startswith("triton-")},
    }  # fmt: skip
    backward = any(source.results.direction != "fwd" for source in sources.values())
    method = METHOD.format(passes="forward and backward passes are" if backward else "the forward pass is")
    parts = [method]
    for key, section in sections.items():
        if key in sources:
            parts.append(section(sources[key]))
            if remark := REMARKS.get(sources[key].name):
                parts.append(f"{remark}\n")
    parts += [_modules(name, measured) for name, measured in (modules or {}).items()]
    if absent := [f"`{key}`" for key in SOURCES if key not in sources and key not in OPTIONAL]:
        parts.append(f"## Not measured yet\n\nThe suites {' and '.join(absent)}.\n")
    return "\n".join(parts)


# Plain attention


def _plain(source: Source) -> str:
    measured = source.results
    backward = measured.direction != "fwd"
    of = f"TFLOPS{' of the backward pass' if backward else ''}"
    pictures = [
        f"![{of} against sequence length at head dim {dim}, full and causal]"
        f"(benchmarks/{picture(measured.direction, dim).name})"
        for dim in head_dims(measured)
    ]
    parts = ["## Backward pass", METHOD_BACKWARD] if backward else ["## Forward pass"]
    parts += [_provenance(source), *pictures, _summary(measured)]
    parts += [
        f"### {_backward_of(measured, title)}\n\n{_speed_table(measured, rows)}"
        for title, rows in _sections(measured).items()
    ]
    return _joined([*parts, _notes(measured)])


def _summary(measured: Results) -> str:
    """tileattn against each baseline over all rows, and against the best baseline of each row."""
    per_baseline = [
        [_label(each.baseline), str(each.cases), f"{each.geometric_mean:.2f}×", _ratio(each.lowest), each.lowest_case]
        for each in compare(measured)
    ]
    parts = [
        "Our speed over the rows that both ran:",
        _table(["against", "rows", "geometric mean", "lowest", "at"], per_baseline, left=(0, 4)),
        "Against the best baseline of each row:",
        _standings(standings(measured)),
    ]
    return _joined(parts).rstrip("\n")


def _standings(named: Mapping[str, Standing]) -> str:
    rows = [
        [name, str(each.rows), str(each.at_or_ahead), str(each.ties), f"{each.geometric_mean:.3f}×"]
        for name, each in named.items()
    ]
    return _table(["rows of", "rows", "at or ahead", "behind by a tie", "geometric mean"], rows)


def _sections(measured: Results) -> dict[str, list[Row]]:
    """Our rows and those of which only baselines have a time, under the headings of the page."""
    in_grid = {case for panel in by_length(measured.rows).values() for _, case in panel.groups}
    sections: dict[str, list[Row]] = {}
    for row in {row.case: row for row in reversed(measured.rows)}.values():
        title = f"Head dim {row.head_dim}, {row.variant}" if row.case in in_grid else "Other shapes"
        sections.setdefault(title, []).insert(0, row)
    return dict(sorted(sections.items(), key=lambda item: _first(measured, item[1])))


def _first(measured: Results, rows: Sequence[Row]) -> int:
    return measured.cases().index(rows[0].case)


def _speed_table(measured: Results, rows: Sequence[Row]) -> str:
    """TFLOPS of every implementation in each row; the ratio is in bold where we are behind."""
    backends, ceiling = measured.backends(), overall(measured.ceilings)
    compared = len(backends) > 1
    headings = ["case", *map(_label, backends)]
    headings += ["against best"] * compared + ["of cuBLAS"] * (ceiling is not None)
    headings += ["error"] + ["baselines' error"] * compared
    table = []
    for each in rows:
        cells = [each.case, *(_tflops(measured.row(each.case, backend)) for backend in backends)]
        cells += [_against_best(measured, each.case)] * compared
        cells += [_of_ceiling(measured.row(each.case, OWN), ceiling)] if ceiling is not None else []
        table.append([*cells, *_errors(measured, each.case)[: 1 + compared]])
    return _table(headings, table)


def _against_best(measured: Results, case: str) -> str:
    return _times_faster(measured.row(case, OWN), best_baseline_ms(measured, case))


def _times_faster(ours: Row | None, ms: float | None) -> str:
    """A baseline's milliseconds over ours, in bold where we are behind."""
    if ours is None or ms is None:
        return MISSING
    ratio = ms / ours.ms
    return _ratio(ratio) if ratio >= 1 else f"**{_ratio(ratio)}**"


def _of_ceiling(row: Row | None, ceiling: Ceiling) -> str:
    return MISSING if row is None else f"{row.tflops / ceiling.matmul_tflops:.0%}"


def _errors(measured: Results, case: str) -> list[str]:
    """Our error and the smallest of the baselines' errors."""
    ours = measured.row(case, OWN)
    baselines = [row.error for row in measured.rows if row.case == case and not is_own(row.backend)]
    return [f"{ours.error:.1e}" if ours else MISSING, f"{min(baselines):.1e}" if baselines else MISSING]


# Random shapes

RANDOM = """\
Kernels are tuned on shapes such as those above; a model has others. `tileattn bench --suite random` draws {cases} cases
from a seed (here {seeds}): batch 1 to 32, 6 to 64 query heads, 1 to 16 of them for each kv head, nine pairs of head
dims, 333 to 65,536 tokens, fewer queries than keys in some, full and causal attention, causal windows and documents.
[`shapes.py`](../src/tileattn/bench/draws/shapes.py) has the distribution. The implementations of a row are measured in
random order. A row in which tileattn reaches less than {least} of the fastest baseline's speed is measured again in ten
rounds, and the second figure counts. A round measures each implementation for 15 ms. FA-2 and cuDNN run rows without a
mask or with a square causal one. FA-4 runs each row that it accepts, documents as packed sequences. Rows without a
baseline are in no mean."""


def _random(source: Source, grid: Source | None) -> str:
    """The speed at random shapes beside that on the fixed grid; grid: the file of the suite fa in this direction."""
    measured = source.results
    named = draw_standing.standings(measured)
    lines = [(f"random, {name}", each) for name, each in named.items()]
    if grid is not None:
        lines.append(("the fixed grid", draw_standing.standing(grid.results, grid.results.cases())))
    table = [
        [name, str(len(each.ratios)), _mean(each), _ratio(min(each.ratios.values())), str(each.under())]
        for name, each in lines
        if each.ratios
    ]
    slowest = [[case, _against_best(measured, case)] for case, _ in named["all"].worst()]
    intro = RANDOM.format(
        cases=len(next(iter(measured.draws.values()))), seeds=", ".join(measured.draws), least=draw_standing.LEAST
    )
    alone, missing = named["all"].alone, named["all"].missing
    parts = [
        f"## {_backward_of(measured, 'Random shapes')}",
        _provenance(source),
        intro,
        f"![The speed of each row against its best baseline](benchmarks/{random_picture(measured.direction).name})",
        _table(["rows of", "rows", "geometric mean", "lowest", f"under {draw_standing.LEAST}"], table),
        "The slowest rows:",
        _table(["case", "against best"], slowest),
        f"No baseline ran: {'; '.join(alone)}." if alone else "",
        f"Not measured: {'; '.join(missing)}." if missing else "",
        _notes(measured),
    ]
    return _joined(parts)


def _mean(each: draw_standing.Standing) -> str:
    return MISSING if each.geometric_mean is None else f"{each.geometric_mean:.3f}×"


# Variants


def _variants(source: Source) -> str:
    measured = source.results
    by_shape: dict[str, list[Row]] = {}
    for row in {row.case: row for row in measured.rows}.values():
        by_shape.setdefault(row.case.replace(f" {row.variant} ", " "), []).append(row)
    intro = (
        "**Cost** is our time over what the row's visible tiles of 128 x 128 cost without the modification, in our own "
        "plain kernel in the same run. What it is compared with stands beside it: the causal or full kernel; a share "
        "of the full kernel's tiles; or, where that takes longer, reading the bias once at the copy's speed. Times in "
        "ms."
    )
    trained = (
        "`dbias`: the gradient of the bias is computed too, and what it is compared with includes writing it once. "
        "Other tensors of modifications have no gradient here."
    )
    tables = [
        f"### {_backward_of(measured, shape)}\n\n{_variants_table(measured, rows)}" for shape, rows in by_shape.items()
    ]
    parts = [f"## {_backward_of(measured, 'Variants')}", _provenance(source), intro]
    parts += [trained] if any(row.as_case().terms.dbias for row in measured.rows) else []
    return _joined([*parts, _summary(measured), *tables, _notes(measured)])


def _variants_table(measured: Results, rows: Sequence[Row]) -> str:
    backends = measured.backends()
    compared = len(backends) > 1
    cost_of = {each.case: each for each in costs(measured)}
    table = []
    for each in rows:
        cost = cost_of.get(each.case)
        cells = [each.variant, *(_ms(measured.row(each.case, backend)) for backend in backends)]
        cells += [_tflops(measured.row(each.case, OWN))] + [_against_best(measured, each.case)] * compared
        cells += [f"{cost.ratio:.2f}×", cost.compared_with] if cost is not None else [MISSING, MISSING]
        table.append([*cells, _errors(measured, each.case)[0]])
    headings = ["variant", *map(_label, backends), "TFLOPS"]
    headings += ["against best"] * compared + ["cost", "compared with", "error"]
    return _table(headings, table)


# Grouped heads and head dims in between

MAIN = ((64, 64), (128, 128), (256, 256))
TUNED = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))


def _heads(source: Source) -> str:
    measured = source.results
    ours = [row for row in measured.rows if row.backend == OWN]
    grouped = [row for row in ours if row.kv_heads < row.heads]
    rows = {row.case: row for row in reversed(ours) if row not in grouped}
    table = [
        [row.case, _ms(row), _ms(plain), MISSING if plain is None else _ratio(plain.ms / row.ms)]
        for row in grouped
        for plain in [_ungrouped(row, ours)]
    ]
    parts = [
        f"## {_backward_of(measured, 'Grouped heads and head dims')}",
        _provenance(source),
        "Query heads that share keys and values, beside as many that do not. Times in ms.",
        _table(["case", "grouped", "ungrouped", "speed"], table),
        "Head dims, and our TFLOPS over those of the next larger tuned one.",
        _speed_table(measured, list(reversed(rows.values()))),
        _table(["head dim", "TFLOPS", "next tuned", "TFLOPS", "share"], _shares(list(reversed(rows.values())))),
        _notes(measured),
    ]
    return _joined(parts)


def _ungrouped(row: Row, rows: Iterable[Row]) -> Row | None:
    """The row that differs only in kv_heads, with a kv head for each query head."""
    facts = (row.head_dim, row.heads, row.heads, row.seqlen_q, row.batch)
    return next((x for x in rows if (x.head_dim, x.heads, x.kv_heads, x.seqlen_q, x.batch) == facts), None)


def _shares(rows: Sequence[Row]) -> list[list[str]]:
    """The speed of other head dims than the main ones, as a share of that of the next larger tuned head dims."""
    by_dims = {(row.head_dim, row.head_dim_v): row for row in rows}
    lines = []
    for (dim, dim_v), row in by_dims.items():
        larger = next((dims for dims in TUNED if dims[0] > dim and dims[1] >= dim_v and dims in by_dims), None)
        if larger is None or (dim, dim_v) in MAIN:
            continue
        next_row = by_dims[larger]
        names = [f"{x}" if x == y else f"{x}/{y}" for x, y in ((dim, dim_v), larger)]
        share = f"{row.tflops / next_row.tflops:.0%}"
        lines.append([names[0], _tflops(row), names[1], _tflops(next_row), share])
    return lines


# fp8


def _fp8(source: Source) -> str:
    measured = source.results
    table = []
    for case in measured.cases():
        fp8, bf16 = measured.row(case, OWN), measured.row(case, BF16)
        ratio = _ratio(bf16.ms / fp8.ms) if fp8 and bf16 else MISSING
        errors = [f"{row.error:.1e}" if row else MISSING for row in (fp8, bf16)]
        table.append([case, _tflops(fp8), _tflops(bf16), ratio, *errors])
    intro = (
        "tileattn in float8_e4m3fn, with a descale for each batch element and kv head, beside tileattn in bf16 on the "
        "values that were quantised. Both errors are against float64 on those values, so that fp8's includes the "
        "quantisation. TFLOPS."
    )
    headings = ["case", "fp8", "bf16", "fp8 over bf16", "error, fp8", "error, bf16"]
    return _joined(["## fp8", _provenance(source), intro, _table(headings, table), _notes(measured)])


# Memory

MEMORY_PICTURE = PICTURES / "memory.png"


def _memory(source: Source) -> str:
    measured = source.results
    backends = measured.backends()
    table = [
        [
            case,
            *(human_bytes(row.peak_bytes) if (row := measured.row(case, backend)) else MISSING for backend in backends),
        ]
        for case in measured.cases()
    ]
    intro = (
        "The most that forward and backward allocate at one time beyond q, k, v and do: o, the gradients, and "
        "intermediate tensors."
    )
    alt = "Peak memory of forward and backward against the sequence length"
    parts = ["## Memory", _provenance(source), intro, f"![{alt}](benchmarks/{MEMORY_PICTURE.name})"]
    return _joined([*parts, _table(["case", *map(_label, backends)], table), _notes(measured)])


# Packed sequences


DENSE = f"{OWN}-dense"


def _packed(source: Source) -> str:
    """Sequences of one length, compared with the dense kernel, and of skewed lengths; ratios are those of times."""
    measured = source.results
    baselines = [backend for backend in measured.backends() if backend not in (OWN, DENSE)]
    intro = (
        "`varlen_attention`. `uniform`: sequences of one length, beside our own kernel on the same tokens as a batch "
        '("of dense": its time over ours). `skewed`: 64 sequences of a log-normal distribution with that mean. Times '
        "in ms; ratios are a baseline's time over ours, bold where we are behind."
    )
    headings = [
        "case",
        OWN,
        *map(_label, [*baselines, DENSE]),
        *(f"against {_label(baseline)}" for baseline in baselines),
        "of dense",
    ]
    table = []
    for row in (row for row in measured.rows if row.backend == OWN):
        others = [measured.row(row.case, backend) for backend in (*baselines, DENSE)]
        ratios = [_times_faster(row, other.ms if other else None) for other in others]
        table.append([row.case, _ms(row), *map(_ms, others), *ratios, f"{row.error:.1e}"])
    title = f"## {_backward_of(measured, 'Packed sequences')}"
    return _joined([title, _provenance(source), intro, _table([*headings, "error"], table)])


# TileLang's own example


def _tilelang(source: Source) -> str:
    """One shape of TileLang's example of FlashAttention."""
    measured = source.results
    row = measured.rows[0]
    title = f"## TileLang's example, {row.seqlen_q} queries, {row.seqlen_k} keys, {row.variant}"
    intro = (
        "The shape of TileLang's own FlashAttention (the flash_attention example of tile-ai/tilelang): batch "
        f"{row.batch}, {row.heads} heads, head dim {row.head_dim}, {row.dtype}."
    )
    if row.causal and row.seqlen_q != row.seqlen_k:
        intro += " Queries are aligned with the last keys, and pairs are counted one by one."
    table = _speed_table(measured, measured.rows[:: len(measured.backends())])
    return _joined([title, _provenance(source), intro, table, _notes(measured)])


# Modules


def _modules(name: str, measured: module_results.Results) -> str:
    """The modules of tileattn.nn against naive attention, as FlashTile's table has them."""
    shape = measured.shape
    intro = (
        f"[`{name}`](../benchmarks/results/{name}): {measured.gpu}, {shape.dtype}, {measured.date[:10]}, commit "
        f"`{(measured.commit or 'unknown')[:12]}`. Batch {shape.batch}, embed_dim {shape.embed_dim}, {shape.heads} "
        f"heads (`gqa`: over {shape.kv_heads}), {'causal' if shape.causal else 'full'}. Times and memory include the "
        "projections. Ratios are against `naive` at the same length."
    )
    table = []
    for seqlen in measured.lengths():
        for row in (row for row in measured.rows if row.seqlen == seqlen):
            ratios = (measured.faster(row), measured.smaller(row))
            faster, smaller = (MISSING if ratio is None else f"{ratio:.3g}×" for ratio in ratios)
            cells = [str(seqlen), f"`{row.module}`", f"{row.ms:.3g}", faster, human_bytes(row.peak_bytes), smaller]
            table.append([*cells, f"{row.error:.1e}"])
    reasons: dict[tuple[str, str], list[str]] = {}
    for entry in measured.missing:
        reasons.setdefault((entry.module, entry.reason), []).append(str(entry.seqlen))
    missing = [f"- `{module}` at {', '.join(lengths)}: {reason}" for (module, reason), lengths in reasons.items()]
    headings = ["seqlen", "module", "ms", "speed", "memory", "less memory", "error"]
    title = f"## Modules of tileattn.nn, {DIRECTIONS[shape.direction]}, {shape.dtype}"
    notes = "\n".join(["Missing:", "", *missing]) if missing else ""
    drawn = f"![Time and memory of each module by length](benchmarks/{modules_picture(name).name})"
    return _joined([title, intro, drawn, _table(headings, table, left=(1,)), notes])


# Triton


def _triton(source: Source) -> str:
    """One head dim and mask of the Triton kernels, which dispatch takes where TileLang refuses."""
    measured = source.results
    ((dtype, head_dim, variant),) = {(row.dtype, row.head_dim, row.variant) for row in measured.rows}
    name = f"The Triton backend, {'float32, ' if dtype == 'fp32' else ''}head dim {head_dim}, {variant}"
    title = f"## {_backward_of(measured, name)}"
    return _joined([title, _provenance(source), _speed_table(measured, measured.rows[:: len(measured.backends())])])


# What all sections share


def _backward_of(measured: Results, title: str) -> str:
    """The title of a section of the backward pass, which no section of the forward pass has."""
    return title if measured.direction == "fwd" else f"{title}, backward"


def _provenance(source: Source) -> str:
    """Where the figures come from, and the ceilings of that run."""
    measured = source.results
    shown = ("tileattn", "tilelang", "torch", "triton", "flash-attn-4", "cuda", "cudnn")
    versions = ", ".join(f"{name} {measured.versions[name]}" for name in shown if name in measured.versions)
    dtypes = ", ".join(dict.fromkeys(row.dtype for row in measured.rows))
    commit = f"commit `{measured.commit[:12]}`" if measured.commit else "no commit recorded"
    ceiling = overall(measured.ceilings)
    reached = (
        f"cuBLAS reached {ceiling.matmul_tflops:.0f} TFLOPS, a copy {ceiling.copy_tbps:.2f} TB/s ({ceiling.when})."
        if ceiling is not None
        else "This run did not measure the ceilings."
    )
    file = f"[`{source.name}`](../benchmarks/results/{source.name})"
    return f"{file}: {measured.gpu}, {dtypes}, {measured.date[:10]}, {commit}; {versions}. {reached}"


def _notes(measured: Results) -> str:
    """What is missing, and why."""
    lines = [f"- refused: {line}" for line in grouped(measured.refused)]
    lines += [f"- failed: {line}" for line in grouped(measured.failed)]
    return "\n".join(["Missing:", "", *lines]) if lines else ""


def _label(backend: str) -> str:
    return LABELS.get(backend, backend)


def _ratio(ratio: float) -> str:
    """Two decimals, cut and not rounded: 0.996 is not ahead."""
    return f"{floor(ratio * 100) / 100:.2f}×"


def _tflops(row: Row | None) -> str:
    return MISSING if row is None else f"{row.tflops:.0f}"


def _ms(row: Row | None) -> str:
    return MISSING if row is None else f"{row.ms:.3f}"


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """A Markdown table; columns are aligned right but for those of `left`."""
    rule = ["---" if index in left else "---:" for index in range(len(headings))]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (headings, rule, *rows))


def _joined(parts: Iterable[str]) -> str:
    """Paragraphs, with a line between; empty ones are left out."""
    return "\n\n".join(part for part in parts if part) + "\n"


# Pictures


def picture(direction: str, head_dim: int) -> Path:
    """The path of the picture of a head dim."""
    return PICTURES / f"{DIRECTIONS[direction]}-d{head_dim}.png"


def random_picture(direction: str) -> Path:
    """The path of the picture of the suite random in a direction."""
    return PICTURES / f"random-{direction}.png"


def modules_picture(name: str) -> Path:
    """The path of the picture of a result file of `MODULES`."""
    return PICTURES / Path(name).with_suffix(".png").name


def head_dims(measured: Results) -> list[int]:
    """The head dims with enough lengths for a picture."""
    return sorted({head_dim for _, head_dim in by_length(measured.rows)})


if __name__ == "__main__":
    main()
