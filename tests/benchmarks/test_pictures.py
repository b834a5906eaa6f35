"""The committed pictures show what `make pictures` draws of the result files, and pages show no others."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.tools import ROOT
from tests.tools.made_up import made_up
from tileattn.bench.baselines.base import OWN
from tileattn.measure import ceilings

sys.path.insert(0, str(ROOT / "benchmarks"))
import dark  # type: ignore[import-not-found]
import drawn  # type: ignore[import-not-found]
import make_pictures  # type: ignore[import-not-found]

PICTURES = make_pictures.pictures()


@pytest.mark.slow_cases("docs/parallel/scale.png", reason="runs the model of all predictions, 7 s")
@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_committed_picture_shows_what_the_command_draws(path: Path) -> None:
    figure = PICTURES[path]()
    # At most this many inches wide, texts of 9 points can be read in a page's column of 730 pixels.
    assert figure.get_figwidth() <= 8
    assert drawn.data_in(dark.beside(path)) == drawn.data_in(path)
    committed, now = (list(leaves(data)) for data in (drawn.data_in(path), drawn.data_of(figure)))
    assert [where for where, _ in committed] == [where for where, _ in now], "run make pictures"
    for (where, then), (_, value) in zip(committed, now, strict=True):
        # Tensors of the tutorial are computed here: another machine rounds differently.
        same = math.isclose(then, value, rel_tol=1e-4, abs_tol=1e-6) if isinstance(value, float) else then == value
        assert same, f"{where}: {then} is drawn, and now it would be {value}: run make pictures"


def leaves(data: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """The words and numbers in nested lists and objects, each with its place."""
    if isinstance(data, dict):
        for key, value in data.items():
            yield from leaves(value, f"{where}.{key}")
    elif isinstance(data, list):
        for index, value in enumerate(data):
            yield from leaves(value, f"{where}[{index}]")
    else:
        yield where, data


def test_pages_show_these_pictures_and_there_are_no_others() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    shown = {
        (page.parent / target).resolve()
        for page in pages
        for target in re.findall(r"""(?:!\[[^\]]*\]\(|<img src="|srcset=")(?!https?:)([^)"]+)[)"]""", page.read_text())
    }
    dark_ones = set(map(dark.beside, PICTURES))
    assert shown - dark_ones == set(PICTURES)
    listed = subprocess.run(["git", "ls-files", "*.png", "*.svg"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode == 0:  # a source archive has no git
        assert {ROOT / name for name in listed.stdout.split()} == set(PICTURES) | dark_ones


def test_speed_has_a_line_for_each_implementation_and_the_ceiling() -> None:
    reached = [ceilings.Ceiling("before", 760.0, 4.3), ceilings.Ceiling("after", 740.0, 4.1)]
    measured = replace(made_up("fa", "cuda", OWN, "fa2", "cudnn"), ceilings=reached)
    figure = make_pictures.speed_by_length(measured, (128,))
    assert figure.legends[0].get_title().get_text().startswith("Forward, head dim 128")
    backward = make_pictures.speed_by_length(made_up("fa", "cuda", OWN, direction="bwd"), (64,))
    assert backward.legends[0].get_title().get_text().startswith("Backward, head dim 64")
    for axes in figure.axes:
        labels = ["cuDNN (SDPA)", "FlashAttention-2 (SDPA)", OWN, "cuBLAS bf16"]
        assert [line.get_label() for line in axes.lines] == labels
        assert [len(line.get_xdata()) for line in axes.lines] == [6, 6, 6, 2]


def test_a_picture_carries_its_data(tmp_path: Path) -> None:
    measured = made_up("fa", "cuda", OWN, "fa2")
    figure = make_pictures.speed_by_length(measured, (64,))
    drawn.save(figure, tmp_path / "new" / "p.png", dpi=20)
    kept = drawn.data_in(tmp_path / "new" / "p.png")
    assert kept == drawn.data_of(figure)
    ours = next(line for line in kept["axes"][0]["lines"] if line["label"] == OWN)
    assert ours["y"][0] == pytest.approx(measured.row("D64 full (32,512,32)", OWN).tflops, rel=1e-5)
    assert kept["axes"][0]["ticks"] == [["512", "1k", "2k", "4k", "8k", "16k"], []]


def test_numbers_are_rounded_and_nan_is_none() -> None:
    assert drawn.numbers([1 / 3, math.nan, 2]) == [0.333333, None, 2.0]


def test_a_dark_picture_has_light_text_and_clear_colours() -> None:
    from matplotlib.colors import to_rgb

    figure = dark.darken(make_pictures.speed_by_length(made_up("fa", "cuda", OWN, "fa2"), (64, 128)))
    axes = figure.axes[-1]
    texts = [axes.title, axes.xaxis.label, *axes.get_xticklabels(), *figure.legends[0].get_texts()]
    for artist in (*texts, *axes.lines):
        assert dark.contrast(to_rgb(artist.get_color()), dark.BACKGROUND) > 4, artist
    for patch in (figure.patch, axes.patch):
        assert patch.get_facecolor()[:3] == pytest.approx(dark.BACKGROUND)


def test_a_heat_map_keeps_its_scale_in_the_dark() -> None:
    """Its order of colours says what is more. Kinds of tiles have the colours of the legend."""
    from matplotlib.colors import to_hex

    light, other = make_pictures.weights(), dark.darken(make_pictures.weights())
    assert (light.axes[0].images[0].get_cmap()(0.5)) == (other.axes[0].images[0].get_cmap()(0.5))
    tiles = dark.darken(make_pictures.tiles_causal())
    named = {to_hex(patch.get_facecolor()) for patch in tiles.legends[0].get_patches()}
    assert named == {to_hex(each) for each in tiles.axes[0].collections[0].get_cmap().colors}
    assert to_hex(dark.colour("#EDEDED")) in named


def test_random_shapes_are_drawn_beside_the_fixed_grid() -> None:
    fa, random = (made_up(suite, "cuda", OWN, "fa4") for suite in ("fa", "random"))
    (panel,) = drawn.data_of(make_pictures.random_shapes(random, fa))["axes"]
    assert panel["titles"] == ["forward, Imaginary GPU"]
    named = {line["label"]: line["y"] for line in panel["lines"] if "rows" in line["label"]}
    assert named == {"random shapes: 40 rows": [1.1] * 40, "the fixed grid: 40 rows": [1.1] * 40}
