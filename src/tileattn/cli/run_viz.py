"""The code of `tileattn viz`, called with parsed options."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import typer

from tileattn.bench import problem, results
from tileattn.bench.baselines.own import mask_of, score_mods_of
from tileattn.bench.cases import square
from tileattn.bench.problem import Problem
from tileattn.cli.choices import VariantOptions, at_least_one, refuse, variant_name
from tileattn.cli.run_bench import check_picture, new_picture, writing
from tileattn.viz.checks import check_tile_count
from tileattn.viz.dashboard import draw_dashboard
from tileattn.viz.lengths import draw_lengths
from tileattn.viz.mask_tiles import mask_tiles
from tileattn.viz.plan import draw_plan
from tileattn.viz.softmax import draw_softmax, row_scores
from tileattn.viz.tiles import draw_tiles, kernel_tiles, tile_map
from tileattn.viz.weights import attention_weights, draw_weights

if TYPE_CHECKING:
    from collections.abc import Iterator

    from matplotlib.figure import Figure

RESULTS_FOLDER = Path("viz-results")
MOST_PARTS = 4096  # that a plan's picture has
# Where --block-M and --block-N are not given: those of most kernels.
BLOCK = 128
# Where --head-dim is not given beside --arch.
HEAD_DIM = 128


def tiles(
    seqlen: int,
    seqlen_k: int | None,
    causal: bool,
    mask: str | None,
    block: tuple[int | None, int | None],
    arch: str | None,
    head_dim: int | None,
    output: Path | None,
    force: bool,
) -> None:
    """The code of `tileattn viz tiles`."""
    output = _picture(output, RESULTS_FOLDER / "tiles", force)
    _check_sizes(seqlen, seqlen_k, block)
    name = variant_name(VariantOptions(causal=causal, mask=mask))
    given = mask_of(_problem(name, seqlen, seqlen_k or seqlen, heads=1, head_dim=1, seed=0))
    if arch is not None and block != (None, None):
        raise refuse("--arch", "it brings its own tiles; give either it or --block-M and --block-N")
    if arch is None and head_dim is not None:
        raise refuse("--head-dim", "it is that of the kernel for --arch, which is not given")
    head_dim = HEAD_DIM if head_dim is None else head_dim
    with _refused("--arch, --head-dim"):
        default = (
            (BLOCK, BLOCK)
            if arch is None
            else kernel_tiles(arch, head_dim, given, seqlen=min(seqlen, seqlen_k or seqlen))
        )
    with _refused("--seqlen"):
        sizes = (seqlen, seqlen_k or seqlen, block[0] or default[0], block[1] or default[1])
        map_of_tiles = tile_map(given, *sizes, arch=arch)
    title = f"{name}, kernel for {arch}, head dim {head_dim}" if arch is not None else name
    _save(draw_tiles(map_of_tiles, title), output)


def _check_sizes(seqlen: int, seqlen_k: int | None, block: tuple[int | None, int | None]) -> None:
    for option, size in (
        ("--seqlen", seqlen),
        ("--seqlen-k", seqlen_k),
        ("--block-M", block[0]),
        ("--block-N", block[1]),
    ):
        at_least_one(option, size)


def tiles_of_function(
    function: str,
    seqlen: int,
    seqlen_k: int | None,
    causal: bool,
    block: tuple[int | None, int | None],
    others: dict[str, object],
    output: Path | None,
    force: bool,
) -> None:
    """The code of `tileattn viz tiles --function`. `others` are options that --function excludes, by their names."""
    output = _picture(output, RESULTS_FOLDER / "tiles", force)
    _check_sizes(seqlen, seqlen_k, block)
    for option, value in others.items():
        if value is not None:
            raise refuse(option, "it is for other masks than that of --function")
    mask = _from_file(function)
    with _refused("--function, --seqlen"):
        map_of_tiles = mask_tiles(mask, seqlen, seqlen_k or seqlen, *block, causal=causal)
    _save(draw_tiles(map_of_tiles), output)


def _from_file(place: str) -> Any:
    """What FILE.py:NAME names."""
    file, _, name = place.rpartition(":")
    path = Path(file)
    if path.suffix != ".py" or not path.is_file():
        raise refuse("--function", f"{place!r} names no Python file; accepted: FILE.py:NAME")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, name):
        raise refuse(
            "--function", f"{file} has no {name!r}; accepted: the name of a function mask(b, h, q, k) or a mask"
        )
    return getattr(module, name)


def weights(
    seqlen: int,
    seqlen_k: int | None,
    heads: int,
    head_dim: int,
    terms: VariantOptions,
    seed: int,
    output: Path | None,
    force: bool,
) -> None:
    """The code of `tileattn viz weights`."""
    output = _picture(output, RESULTS_FOLDER / "weights", force)
    for option, size in (("--seqlen", seqlen), ("--seqlen-k", seqlen_k), ("--heads", heads), ("--head-dim", head_dim)):
        at_least_one(option, size)
    name = variant_name(terms)
    given = _problem(name, seqlen, seqlen_k or seqlen, heads, head_dim, seed)
    with _refused("--seqlen, --heads"):
        weights_of_rows = attention_weights(given.q, given.k, **_variant(given))
        figure = draw_weights(weights_of_rows, f"Attention weights, {name}, random q and k")
    _save(figure, output)


def softmax(
    seqlen: int,
    block_n: int,
    row: int,
    head_dim: int,
    terms: VariantOptions,
    seed: int,
    output: Path | None,
    force: bool,
) -> None:
    """The code of `tileattn viz softmax`."""
    output = _picture(output, RESULTS_FOLDER / "softmax", force)
    for option, size in (("--seqlen", seqlen), ("--block-N", block_n), ("--head-dim", head_dim)):
        at_least_one(option, size)
    with _refused("--block-N"):  # before tensors of any length are made
        check_tile_count(seqlen, "block_N", block_n)
    name = variant_name(terms)
    given = _problem(name, seqlen, seqlen, 1, head_dim, seed)
    with _refused("--row"):
        scores = row_scores(given.q, given.k, row, **_variant(given))
    _save(draw_softmax(scores, given.v[0, :, 0], block_n, f"Online softmax along row {row % seqlen}, {name}"), output)


def plan(lengths: str, kv_heads: int, block_N: int, blocks: int, output: Path | None, force: bool) -> None:
    """The code of `tileattn viz plan`."""
    output = _picture(output, RESULTS_FOLDER / "plan", force)
    for option, size in (("--kv-heads", kv_heads), ("--block-N", block_N), ("--blocks", blocks)):
        at_least_one(option, size)
    parts = [part.strip() for part in lengths.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise refuse("--lengths", f"{lengths!r} is not understood; accepted: integers from 0 on with commas between")
    numbers = [int(part) for part in parts]
    if len(numbers) * kv_heads + blocks > MOST_PARTS:
        raise refuse("--lengths", f"there are more than {MOST_PARTS} sequences x heads and blocks to draw")
    _save(draw_plan(numbers, kv_heads, block_N, blocks), output)


def lengths(result: Path, variant: str | None, output: Path | None, force: bool) -> None:
    """The code of `tileattn viz lengths`."""
    if variant not in (None, "full", "causal"):
        raise refuse("--variant", f"{variant!r} is not drawn by length; accepted: full, causal")
    _of_results(result, lambda measured: draw_lengths(measured, variant), "lengths", output, force)


def dashboard(result: Path, output: Path | None, force: bool) -> None:
    """The code of `tileattn viz dashboard`."""
    _of_results(result, draw_dashboard, "dashboard", output, force)


def _of_results(
    result: Path, draw: Callable[[results.Results], Figure], name: str, output: Path | None, force: bool
) -> None:
    output = _picture(output, result.with_name(f"{result.stem}-{name}"), force)
    with _refused("RESULT"):
        figure = draw(results.load(result))
    _save(figure, output)


def _picture(output: Path | None, invented: Path, force: bool) -> Path:
    """The file of --output, or a new one: `invented` and the time of day."""
    output = output or new_picture(invented)
    check_picture("--output", output, force)
    return output


def _problem(name: str, seqlen: int, seqlen_k: int, heads: int, head_dim: int, seed: int) -> Problem:
    """The tensors of the case, random, in float32 on the CPU."""
    case = replace(square(1, seqlen, heads, head_dim, name, "fp32"), seqlen_k=seqlen_k)
    try:
        return problem.build(case, torch.device("cpu"), seed)
    except torch.OutOfMemoryError as error:
        raise refuse("--seqlen, --heads, --head-dim", str(error)) from error


def _variant(given: Problem) -> dict[str, Any]:
    return {"mask": mask_of(given), "score_mod": score_mods_of(given)}


@contextmanager
def _refused(option: str) -> Iterator[None]:
    """Turns an argument that viz refuses into a refused option."""
    try:
        yield
    except (TypeError, ValueError) as error:  # TypeError: a mask that cannot be traced
        raise refuse(option, str(error)) from error


def _save(figure: Figure, output: Path) -> None:
    with writing("--output", output):
        figure.savefig(output, facecolor="white")
    typer.echo(f"picture: {output}")
