"""Draws all pictures that the README and the pages in docs/ show, each also for dark pages.

    python benchmarks/make_pictures.py      # or: make pictures

Nothing is measured here. Measured pictures are drawn from benchmarks/results, the tutorial's from tensors made here.
Each picture carries the data that it shows (`drawn.py`). A test draws all of them again and compares these data.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import drawn
import make_decode_page
import make_ladder
import make_page
import make_parallel_page
import torch
from make_page import LABELS, OWN, RESULTS, ROOT
from make_scale_page import PICTURE as SCALE_PICTURE
from make_scale_page import draw as draw_scale

from tileattn import (
    BlockSparse,
    Causal,
    Dilated,
    Documents,
    GlobalTokens,
    ImageTextDocuments,
    Mask,
    Neighborhood,
    SlidingWindow,
    Strided,
    viz,
)
from tileattn.bench import plot_memory
from tileattn.bench.cases import DIRECTIONS
from tileattn.bench.decode import plot as decode_plot
from tileattn.bench.decode import results as decode_results
from tileattn.bench.draws import plot as plot_draws
from tileattn.bench.draws import standing as draw_standing
from tileattn.bench.ladder import plot as plot_ladder
from tileattn.bench.modules import plot as modules_plot
from tileattn.bench.parallel import plot as parallel_plot
from tileattn.bench.parallel import results as parallel_results
from tileattn.bench.plot import COLOURS, FAINT, INK, by_length, legend_columns, style
from tileattn.bench.results import Results
from tileattn.measure.ceilings import overall

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

DOCS = ROOT / "docs"
WIDTH = 7.2  # inches of a figure that is as wide as a page's column: texts of 9 points are then easy to read
LOSSES = RESULTS / "training" / "train-gpt-losses-cpu.json"
CONTEXT_LOSSES = RESULTS / "parallel"  # of a training on two ranks and one on one


def main() -> None:
    """Write all pictures."""
    for path, draw in pictures().items():
        drawn.save(draw(), path)
        print(path.relative_to(ROOT), flush=True)


def pictures() -> dict[Path, Callable[[], Figure]]:
    """What draws each picture, by its path."""
    of_results = {**of_readme(), **of_benchmarks(), **of_decode(), **of_parallel(), **of_ladder(), **of_training()}
    return {**of_results, **of_tutorial(), **of_patterns()}


# Measured


def of_readme() -> dict[Path, Callable[[], Figure]]:
    """The forward pass: head dim 128, causal, for README.md, and all head dims, for docs/speed.md."""
    measured = make_page.load()["fa"].results
    return {
        DOCS / "benchmarks" / "forward-short.png": partial(speed_by_length, measured, (128,), ("causal",)),
        DOCS / "benchmarks" / "forward.png": partial(speed_by_length, measured, make_page.head_dims(measured)),
    }


def of_benchmarks() -> dict[Path, Callable[[], Figure]]:
    """For docs/benchmarks.md."""
    sources = make_page.load()
    plain = [sources[key].results for key in ("fa", "fa-bwd")]
    speeds = {
        make_page.picture(each.direction, head_dim): partial(speed_by_length, each, (head_dim,))
        for each in plain
        for head_dim in make_page.head_dims(each)
    }
    for key, grid in (("random", "fa"), ("random-bwd", "fa-bwd")):
        if key in sources:
            each = sources[key].results
            speeds[make_page.random_picture(each.direction)] = partial(random_shapes, each, sources[grid].results)
    for name, of_modules in make_page.load_modules().items():
        speeds[make_page.modules_picture(name)] = partial(modules_plot.draw, of_modules)
    return {**speeds, make_page.MEMORY_PICTURE: lambda: plot_memory.draw(sources["memory-fwdbwd"].results)}


def random_shapes(measured: Results, grid: Results) -> Figure:
    """The suite random beside the fixed grid: each row's speed against its best baseline."""
    drawn_rows = draw_standing.standings(measured)["all"].ratios
    fixed = draw_standing.standing(grid, grid.cases()).ratios
    lines = {"random shapes": list(drawn_rows.values()), "the fixed grid": list(fixed.values())}
    return plot_draws.draw({f"{DIRECTIONS[measured.direction]}, {measured.gpu}": lines})


def of_decode() -> dict[Path, Callable[[], Figure]]:
    """For the page of make_decode_page.py, if there is one."""
    source = make_decode_page.SOURCE
    if source is None:
        return {}
    return {make_decode_page.PICTURE: lambda: decode_plot.draw(decode_results.load(RESULTS / source))}


def of_parallel() -> dict[Path, Callable[[], Figure]]:
    """For the page of make_parallel_page.py, if there is one."""
    source = make_parallel_page.SOURCE
    if source is None:
        return {}
    return {make_parallel_page.PICTURE: lambda: parallel_plot.draw(parallel_results.load(RESULTS / source))}


def of_ladder() -> dict[Path, Callable[[], Figure]]:
    """For docs/ladder.md."""
    climbs = make_ladder.load(make_ladder.SOURCES)
    return {make_ladder.picture(name): partial(plot_ladder.draw, each) for name, each in climbs.items()}


def of_training() -> dict[Path, Callable[[], Figure]]:
    """For docs/training.md, docs/parallel.md and docs/parallel-scale.md."""
    return {
        DOCS / "training" / "train_gpt.png": training_losses,
        DOCS / "parallel" / "losses.png": partial(losses_of, CONTEXT_LOSSES / "context-losses-cpu.json"),
        DOCS / "parallel" / "losses-h200.png": partial(losses_of, CONTEXT_LOSSES / "context-losses-h200.json"),
        SCALE_PICTURE: draw_scale,
    }


def training_losses() -> Figure:
    """A training with tileattn's attention and one with PyTorch's."""
    return losses_of(LOSSES)


def losses_of(path: Path) -> Figure:
    """As examples/train_gpt.py draws them."""
    train_gpt = _example("train_gpt")
    figure: Figure = train_gpt.figure([train_gpt.Losses(**row) for row in json.loads(path.read_text())["rows"]])
    return figure


def _example(name: str) -> ModuleType:
    """A file of examples/."""
    examples = str(ROOT / "examples")
    if examples not in sys.path:
        sys.path.append(examples)
    return importlib.import_module(name)


def speed_by_length(
    measured: Results, head_dims: Sequence[int], variants: Sequence[str] = ("full", "causal")
) -> Figure:
    """TFLOPS against the sequence length: a line for each implementation, and the ceiling.

    A row of panels for each head dim, a column for each variant.
    """
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    panels = by_length(measured.rows)
    variants = [each for each in variants if any((each, head_dim) in panels for head_dim in head_dims)]
    size = (WIDTH, 2.9 if len(variants) == 1 else 1.3 + 2.5 * len(head_dims))
    figure = Figure(figsize=size, layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.06))
    grid = figure.subplots(len(head_dims), len(variants), squeeze=False, sharex=True, sharey="row")
    for line, head_dim in zip(grid, head_dims):
        for axes, variant in zip(line, variants):
            if (panel := panels.get((variant, head_dim))) is not None:
                _lines(axes, measured, panel.groups)
            named = f"head dim {head_dim}, {variant}" if len(head_dims) > 1 else variant
            axes.set_title(named, fontsize=10.5, color=INK, loc="left")
            axes.tick_params(labelbottom=True)
        line[0].set_ylabel("TFLOPS", fontsize=9, color=FAINT)
    for axes in grid[-1]:
        axes.set_xlabel("sequence length (16384 tokens in all)", fontsize=9, color=FAINT)
    _legend(figure, measured, head_dims)
    return figure


def _lines(axes: Axes, measured: Results, groups: Sequence[tuple[str, str]]) -> None:
    """groups: the label of each length and its case."""
    for backend in reversed(measured.backends()):  # ours is drawn last, above the others
        points = [(x, row.tflops) for x, (_, case) in enumerate(groups) if (row := measured.row(case, backend))]
        ours = backend == OWN
        axes.plot(
            [x for x, _ in points], [tflops for _, tflops in points], color=COLOURS[backend],
            label=LABELS.get(backend, backend), marker="o", markersize=5 if ours else 3.5,
            linewidth=2.4 if ours else 1.4, zorder=3,
        )  # fmt: skip
    ceiling = overall(measured.ceilings)
    if ceiling is not None:
        axes.axhline(ceiling.matmul_tflops, color=FAINT, linestyle="--", linewidth=1.1, label="cuBLAS bf16", zorder=2)
    axes.set_xticks(range(len(groups)), [label for label, _ in groups])
    style(axes)
    axes.set_ylim(bottom=0)


def _legend(figure: Figure, measured: Results, head_dims: Sequence[int]) -> None:
    """Ours is drawn last and named first. One panel has its legend beside it, several have it above."""
    beside = len(figure.axes) == 1
    named = dict(zip(*reversed(figure.axes[0].get_legend_handles_labels()), strict=True))
    labels = [label for backend in measured.backends() if (label := LABELS.get(backend, backend)) in named]
    labels += [label for label in named if label not in labels]
    dtypes = ", ".join(dict.fromkeys(row.dtype for row in measured.rows))
    shape = f", head dim {head_dims[0]}" if len(head_dims) == 1 else ""
    facts = [f"{DIRECTIONS[measured.direction].capitalize()}{shape}", f"{dtypes}, {measured.gpu}"]
    title = ("\n" if beside else ", ").join(facts)
    figure.legend(
        [named[label] for label in labels],
        labels,
        title=title,
        title_fontsize=9 if beside else 12,
        loc="outside right upper" if beside else "outside upper center",
        ncols=1 if beside else legend_columns(labels, figure.get_figwidth()),
        frameon=False,
        fontsize=9,
    )


# The tutorial's


def of_tutorial() -> dict[Path, Callable[[], Figure]]:
    """For docs/tutorial and docs/method.md."""
    figures = (
        memory_hierarchy, tiles_causal, tiles_window, tiles_documents, softmax, weights, lengths, dashboard,
        hopper_timeline,
    )  # fmt: skip
    return {DOCS / "figures" / f"{draw.__name__.replace('_', '-')}.png": draw for draw in figures}


def _tiles(mask: Mask) -> Figure:
    """A map of tiles, small enough for two beside each other."""
    figure = viz.draw_tiles(viz.tile_map(mask, 1024, 1024, 128, 64))
    figure.set_size_inches(4.2, 4.8)
    return figure


# Of an H200: (name, size, what it holds).
MEMORIES = (
    ("registers", "256 KB per multiprocessor, 33 MB in all", "each thread's own variables"),
    ("shared memory", "228 KB per multiprocessor, 29 MB in all", "seen by the threads of one block"),
    ("L2 cache", "50 MB", "in front of global memory, for all blocks"),
    ("global memory", "141 GB, 4.2 TB/s in a copy", "q, k, v and o: PyTorch's tensors"),
)


def memory_hierarchy() -> Figure:
    """The memories of an H200: above the fast and small, below the large and slow."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.subplots()
    axes.set(xlim=(-1.08, 1.08), ylim=(len(MEMORIES), -0.6), title="The memories of an H200")
    axes.axis("off")
    axes.text(0, -0.22, "tensor cores and other arithmetic", ha="center", va="center", fontsize=9, color=FAINT)
    for level, (name, size, holds) in enumerate(MEMORIES):
        width = 1.3 + 0.27 * level
        shade = ("#D55E00", "#E69F00", "#56B4E9", "#0072B2")[level]
        axes.add_patch(_box(-width / 2, level + 0.08, width, 0.8, shade))
        axes.text(0, level + 0.3, f"{name}: {size}", ha="center", va="center", fontsize=9.5, weight="bold", color=INK)
        axes.text(0, level + 0.63, holds, ha="center", va="center", fontsize=8.5, color=INK)
    return figure


def _box(x: float, y: float, width: float, height: float, colour: str) -> Patch:
    from matplotlib.patches import FancyBboxPatch

    return FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0.02", facecolor=f"{colour}40", edgecolor=colour)


def tiles_causal() -> Figure:
    """Which tiles a causal kernel visits."""
    return _tiles(Causal())


def tiles_window() -> Figure:
    """Which tiles a kernel visits under a sliding window."""
    return _tiles(SlidingWindow(300, 0))


def tiles_documents() -> Figure:
    """Which tiles a kernel visits under documents of different lengths."""
    lengths = torch.tensor([300, 150, 450, 124])
    ids = torch.arange(4, dtype=torch.int32).repeat_interleave(lengths)
    return _tiles(Causal() & Documents(ids))


def of_patterns() -> dict[Path, Callable[[], Figure]]:
    """For docs/patterns.md: what each sparse pattern does to tiles."""
    place = torch.arange(1024)
    text = place % 256 < 64
    chosen = torch.rand(1, 1, 16, 16, generator=torch.Generator().manual_seed(0)).topk(5).indices
    masks = {
        "dilated": Dilated(256, dilation=4),
        "strided": Strided(128, 64),
        "global-tokens": SlidingWindow(96, 96) | GlobalTokens(32),
        "neighborhood": Neighborhood((32, 32), 9),
        "images": ImageTextDocuments(place // 512, torch.where(text, -1, place // 256)),
        "blocks": BlockSparse(chosen, 64) & Causal(),
    }
    return {DOCS / "figures" / f"tiles-{name}.png": partial(_mask_tiles, mask) for name, mask in masks.items()}


def _mask_tiles(mask: Mask) -> Figure:
    figure = viz.draw_tiles(viz.mask_tiles(mask, 1024, 1024, 32, 32))
    figure.set_size_inches(4.2, 4.8)
    return figure


def softmax() -> Figure:
    """The online softmax of a row of random scores, tile by tile."""
    generator = torch.Generator().manual_seed(2)
    scores = 1.5 * torch.randn(64, generator=generator) + torch.linspace(-2, 3, 64)
    return viz.draw_softmax(scores, torch.randn(64, 16, generator=generator), 8)


def weights() -> Figure:
    """Attention weights of random q and k."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 24, 2, 16, generator=generator) for _ in range(2))
    return viz.draw_weights(viz.attention_weights(1.5 * q, k, causal=True), "Attention weights, causal, random q and k")


def lengths() -> Figure:
    """Time and memory of the forward pass by length."""
    return viz.draw_lengths(make_page.load()["fa"].results, "causal")


def hopper_timeline() -> Figure:
    """As examples/hopper_model.py draws it with `--tiles 5`."""
    model = _example("hopper_model")
    machine, _ = model.attention("overlapped", stages=2, tiles=5, consumers=2)
    figure: Figure = model.figure(machine)
    return figure


def dashboard() -> Figure:
    """A result file at a glance."""
    return viz.draw_dashboard(make_page.load()["fa"].results)


if __name__ == "__main__":
    main()
