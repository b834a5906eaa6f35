"""The site's figures, drawn by `tileattn.viz` when the site is built: figures/NAME.png for each function here."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tileattn import Causal, Documents, SlidingWindow, viz
from tileattn.bench import results

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RESULTS = Path(__file__).parents[2] / "benchmarks/results"


def tiles_causal() -> Figure:
    return viz.draw_tiles(viz.tile_map(Causal(), 1024, 1024, 128, 64))


def tiles_window() -> Figure:
    return viz.draw_tiles(viz.tile_map(SlidingWindow(300, 0), 1024, 1024, 128, 64))


def tiles_documents() -> Figure:
    lengths = torch.tensor([300, 150, 450, 124])
    ids = torch.arange(4, dtype=torch.int32).repeat_interleave(lengths)
    return viz.draw_tiles(viz.tile_map(Causal() & Documents(ids), 1024, 1024, 128, 64))


def softmax() -> Figure:
    generator = torch.Generator().manual_seed(2)
    scores = 1.5 * torch.randn(64, generator=generator) + torch.linspace(-2, 3, 64)
    return viz.draw_softmax(scores, torch.randn(64, 16, generator=generator), 8)


def weights() -> Figure:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 24, 2, 16, generator=generator) for _ in range(2))
    return viz.draw_weights(viz.attention_weights(1.5 * q, k, causal=True), "Attention weights, causal, random q and k")


def lengths() -> Figure:
    return viz.draw_lengths(results.load(RESULTS / "forward/fa-h200.json"), "causal")


def dashboard() -> Figure:
    return viz.draw_dashboard(results.load(RESULTS / "forward/fa-h200.json"))


FIGURES: dict[str, Callable[[], Figure]] = {
    each.__name__.replace("_", "-"): each
    for each in (tiles_causal, tiles_window, tiles_documents, softmax, weights, lengths, dashboard)
}


def on_files(files: Any, config: Any, **_: Any) -> Any:
    """mkdocs' hook."""
    from mkdocs.structure.files import File

    for name, draw in FIGURES.items():
        drawn = io.BytesIO()
        draw().savefig(drawn, format="png", facecolor="white")
        files.append(File.generated(config, f"figures/{name}.png", content=drawn.getvalue()))
    return files
