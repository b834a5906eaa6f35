"""Pictures: their data are correct, all text is inside, and no labels overlap."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure
from matplotlib.text import Text
from torch import Tensor
from typer.testing import CliRunner

from tests.tools import ROOT
from tests.tools.positions import Positions, documents, lengths, positions, prefixes
from tileattn import Causal, Documents, FunctionMask, Mask, PrefixLM, SlidingWindow, SoftCap, viz
from tileattn.bench import results
from tileattn.call.facts import AttentionCall
from tileattn.cli.app import app
from tileattn.kernels.tilelang.forward.config import HopperConfig
from tileattn.kernels.tilelang.forward.defaults import default
from tileattn.testing import oracle_attention
from tileattn.viz.style import LIGHT
from tileattn.viz.tiles import NAMES, Tile, described

RESULTS = ROOT / "benchmarks/results"
blocks = st.integers(1, 4)


# --- Tiles ---


def allowed_in_tiles(case: Positions, map_: viz.TileMap) -> list[tuple[Tile, Tensor, bool]]:
    """For each tile: its kind in the map, the dense mask in it, and whether it lies within the keys."""
    tiles = []
    rows, columns = map_.tiles.shape
    for i, j in itertools.product(range(rows), range(columns)):
        queries = slice(i * map_.block_M, (i + 1) * map_.block_M)
        keys = slice(j * map_.block_N, (j + 1) * map_.block_N)
        whole = keys.stop <= case.seqlen_k
        tiles.append((Tile(int(map_.tiles[i, j])), case.allowed[1, 1, queries, keys], whole))
    return tiles


def map_of(case: Positions, block_M: int, block_N: int) -> viz.TileMap:
    """The map of the last head of the last batch element, for masks that depend on them."""
    return viz.tile_map(case.mask, case.seqlen_q, case.seqlen_k, block_M, block_N, b=1, h=1)


@settings(deadline=None, derandomize=True, max_examples=120)
@given(case=positions(), block_M=blocks, block_N=blocks)
def test_no_visible_pair_is_skipped_and_no_hidden_one_in_a_full_tile(
    case: Positions, block_M: int, block_N: int
) -> None:
    for kind, allowed, whole in allowed_in_tiles(case, map_of(case, block_M, block_N)):
        if kind is Tile.SKIPPED:
            assert not allowed.any()
        if kind is Tile.FULL:
            assert allowed.all()
            assert whole, "beyond the last key a tile holds zeros, which only a mask hides"


def ordered_documents(seqlen_k: int) -> st.SearchStrategy[Mask]:
    return documents(seqlen_k, in_order=True)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(data=st.data(), length=lengths, block_M=blocks, block_N=blocks)
def test_simple_masks_mask_no_tile_in_vain(data: Any, length: int, block_M: int, block_N: int) -> None:
    """Square calls: a partial tile has both a visible and a hidden pair, a skipped one none that is visible."""
    mask = data.draw(st.one_of(st.builds(Causal), prefixes(), ordered_documents(length)))
    case = Positions(mask, 2, 2, length, length)
    for kind, allowed, whole in allowed_in_tiles(case, map_of(case, block_M, block_N)):
        expected = Tile.SKIPPED if not allowed.any() else Tile.FULL if allowed.all() and whole else Tile.PARTIAL
        assert kind is expected


def test_the_numbers_themselves() -> None:
    """A causal window over 8 x 8 tiles: two full diagonals less their edge, none above."""
    tile_map = viz.tile_map(SlidingWindow(31, 0), 128, 128, 16, 16)
    first_rows = [[1, 0, 0, 0, 0, 0, 0, 0], [2, 1, 0, 0, 0, 0, 0, 0], [1, 2, 1, 0, 0, 0, 0, 0]]
    assert tile_map.tiles[:3].tolist() == first_rows
    assert (tile_map.count(Tile.FULL), tile_map.count(Tile.PARTIAL)) == (7, 8 + 6)
    assert tile_map.share(Tile.SKIPPED) == (64 - 21) / 64


def test_a_row_of_tiles_without_a_visible_key_still_visits_one() -> None:
    """As in the kernels: 64 queries are before the first key."""
    tile_map = viz.tile_map(Causal(), 128, 64, 32, 32)
    assert tile_map.tiles[:2].tolist() == [[1, 0], [1, 0]]
    assert viz.tile_map(Causal(), 128, 64, 32, 32, arch="sm_90a").tiles.equal(tile_map.tiles)


def test_amds_kernel_visits_none_there() -> None:
    tile_map = viz.tile_map(Causal(), 128, 64, 32, 32, arch="gfx942")
    assert tile_map.tiles.tolist() == [[0, 0], [0, 0], [1, 0], [2, 1]]
    with pytest.raises(ValueError, match=r"arch must be one of sm_80, .*, got 'gfx1'"):
        viz.tile_map(Causal(), 128, 64, 32, 32, arch="gfx1")


def test_kernel_tiles_are_those_of_the_default_configuration() -> None:
    assert viz.kernel_tiles("sm_80", 128) == (128, 64)
    config = default(AttentionCall(torch.bfloat16, 128, 128, arch="sm_90a"), 4096)
    assert isinstance(config, HopperConfig)
    # Two blocks in a cluster visit the tiles of both.
    assert viz.kernel_tiles("sm_90a", 128) == (config.cluster * config.block_M, config.block_N)
    with pytest.raises(ValueError, match=r"arch must be one of sm_80, .*, got 'sm_1'"):
        viz.kernel_tiles("sm_1", 128)
    with pytest.raises(ValueError, match="head_dim must be a multiple of 8 from 16 to 256, got 20"):
        viz.kernel_tiles("sm_80", 20)


def test_bad_sizes_are_named() -> None:
    with pytest.raises(ValueError, match="block_N must be an integer of at least 1, got 0"):
        viz.tile_map(None, 8, 8, 4, 0)
    with pytest.raises(ValueError, match="take a block_M of at least 2048"):
        viz.tile_map(None, 2**20, 8, 16, 8)
    with pytest.raises(ValueError, match=r"Documents: ids must have shape"):
        viz.tile_map(Documents(torch.zeros(9, dtype=torch.int32)), 8, 8, 4, 4)


@pytest.mark.parametrize("size", [0, -1, 12.5, "10", True, None])
def test_sizes_are_integers(size: Any) -> None:
    for name in ("seqlen_q", "seqlen_k", "block_M", "block_N"):
        with pytest.raises(ValueError, match=f"^{name} must be an integer of at least 1, got {size!r}$"):
            viz.tile_map(None, **{"seqlen_q": 16, "seqlen_k": 16, name: size})
    with pytest.raises(ValueError, match=f"^seqlen must be an integer of at least 1, got {size!r}$"):
        viz.kernel_tiles("sm_80", 64, seqlen=size)


def test_numpys_integers_are_sizes() -> None:
    assert viz.tile_map(None, np.int64(16), 16, np.int32(8), 16).tiles.shape == (2, 1)  # type: ignore[arg-type]


def documents_of_two() -> Documents:
    """Documents of 4 and 4 tokens in the first batch element, and of 8 in the second."""
    return Documents(torch.tensor([[0] * 4 + [1] * 4, [0] * 8]))


@pytest.mark.parametrize("mask", [documents_of_two(), Causal() | documents_of_two()], ids=["documents", "either"])
def test_every_batch_element_has_its_map(mask: Mask) -> None:
    first, second = (viz.tile_map(mask, 8, 8, 4, 4, b=b) for b in (0, 1))
    assert first.tiles[0].tolist() == [Tile.FULL, Tile.SKIPPED]
    assert second.tiles[0].tolist() == [Tile.FULL, Tile.FULL]


def test_every_head_has_its_map() -> None:
    windows = torch.tensor([0, 7])
    tile_map = viz.tile_map(FunctionMask(lambda b, h, q, k: q - k <= windows[h]), 8, 8, h=1)
    assert tile_map.count(Tile.PARTIAL) == 1
    with pytest.raises(ValueError, match=r"^h must be one of the mask's 2 heads, from 0, got 2$"):
        viz.tile_map(FunctionMask(lambda b, h, q, k: q - k <= windows[h]), 8, 8, h=2)


@pytest.mark.parametrize("index", [-1, "x", 0.0, True])
def test_wrong_elements_are_named(index: Any) -> None:
    for name in ("b", "h"):
        with pytest.raises(ValueError, match=f"^{name} must be an integer of 0 or more, got {index!r}$"):
            viz.tile_map(Causal(), 8, 8, **{name: index})
    for wrong in (index, 2):
        with pytest.raises(ValueError, match=f"^b must be one of the mask's 2 batch elements, from 0, got {wrong!r}$"):
            viz.tile_map(documents_of_two(), 8, 8, b=wrong)


def test_masks_that_disagree_say_so_themselves() -> None:
    with pytest.raises(ValueError, match=r"PrefixLM: prefix must have shape \(3,\), got \(2,\)|Documents: ids must"):
        viz.tile_map(PrefixLM(torch.tensor([1, 2])) & Documents(torch.zeros(3, 8, dtype=torch.int32)), 8, 8)


def test_masks_are_described_as_they_are_written() -> None:
    mask = (Causal() | PrefixLM(4)) & SlidingWindow(3, None) & Documents(torch.zeros(4, dtype=torch.int32))
    assert described(mask) == "(Causal() | PrefixLM(4)) & SlidingWindow(3, None) & Documents(...)"
    assert described(None) == "full"


# --- Weights and the online softmax ---


@pytest.fixture
def qkv() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 19, 4, 8, generator=generator)
    k, v = (torch.randn(2, 27, 2, 8, generator=generator) for _ in range(2))
    return q, k, v


def test_weights_times_values_are_attention(qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v = qkv
    mask, cap, sink = SlidingWindow(6, 1), SoftCap(2.0), torch.tensor([0.5, -1.0, 2.0, 0.0])
    weights = viz.attention_weights(q, k, mask=mask, score_mod=cap, sink=sink)
    o, lse = oracle_attention(q, k, v, mask, (cap,), sink, None)
    values = v.double().repeat_interleave(2, dim=2).transpose(1, 2)
    torch.testing.assert_close((weights @ values).transpose(1, 2), o)
    # What the sink takes is missing from a row's sum.
    torch.testing.assert_close(1 - weights.sum(-1), torch.exp(sink.double()[None, :, None] - lse))


def test_weights_of_large_inputs_are_refused() -> None:
    q = torch.zeros(1, 1025, 1, 8)
    with pytest.raises(ValueError, match="q must have 1 to 1024 tokens for a picture, got 1025"):
        viz.attention_weights(q, q[:, :8])


@pytest.mark.parametrize("b", [3, -3, 0.5])
def test_weights_of_no_batch_element_are_refused(b: int) -> None:
    with pytest.raises(ValueError, match=f"b must be one of the 2 batch elements, got {b}"):
        viz.draw_weights(torch.ones(2, 1, 4, 4), b=b)


@pytest.mark.parametrize(
    ("figure", "names"),
    [
        pytest.param(lambda: viz.draw_weights(torch.rand(1, 1, 20, 20)), "xy", id="weights"),
        pytest.param(lambda: viz.draw_weights(torch.rand(1, 1, 4, 1)), "xy", id="weights-of-one-key"),
        pytest.param(lambda: viz.draw_tiles(viz.tile_map(None, 1, 1)), "xy", id="tiles-of-one-token"),
        pytest.param(lambda: viz.draw_softmax(torch.zeros(1), torch.ones(1, 1), 1), "x", id="softmax-of-one-key"),
    ],
)
def test_ticks_are_tokens(figure: Callable[[], Figure], names: str) -> None:
    drawn = figure()
    drawn.draw_without_rendering()
    for axis in (getattr(drawn.axes[0], f"{name}axis") for name in names):
        lo, hi = sorted(axis.get_view_interval())
        shown = [float(tick) for tick in axis.get_ticklocs() if lo <= tick <= hi]
        assert shown
        assert all(tick.is_integer() for tick in shown)


def heading_of(figure: Figure) -> str:
    return figure.get_suptitle()


def test_one_token_is_singular() -> None:
    assert "1 query, 1 key\ntiles of" in heading_of(viz.draw_tiles(viz.tile_map(None, 1, 1)))
    assert "1 query, 2 keys; grey" in heading_of(viz.draw_weights(torch.rand(1, 1, 1, 2)))
    assert "1 key in tiles of 1; the maximum grows 0 times" in heading_of(
        viz.draw_softmax(torch.zeros(1), torch.ones(1, 1), 1)
    )


@pytest.mark.parametrize("shape", [(2, 0, 4, 4), (2, 17, 4, 4), (2, 1, 0, 4), (4, 4)])
def test_weights_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"weights must have shape \(batch, up to 16 heads, seqlen_q, seqlen_k\)"):
        viz.draw_weights(torch.ones(shape))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.bfloat16])
def test_weights_of_any_dtype_are_drawn(dtype: torch.dtype) -> None:
    viz.draw_weights(torch.eye(4).to(dtype)[None, None]).draw_without_rendering()


def test_weights_and_scores_with_gradients_are_drawn() -> None:
    viz.draw_weights(torch.rand(1, 1, 4, 4, requires_grad=True)).draw_without_rendering()
    viz.draw_softmax(
        torch.rand(4, requires_grad=True), torch.rand(4, 2, requires_grad=True), 2
    ).draw_without_rendering()


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_scores_that_are_no_numbers_are_refused(wrong: float) -> None:
    with pytest.raises(ValueError, match="scores must be finite, or -inf where the mask hides a key, got NaN or "):
        viz.draw_softmax(torch.tensor([0.0, wrong]), torch.ones(2, 1), 1)


def test_row_scores_are_of_a_row_that_is_there(qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, _ = qkv
    for name, says in (("b", "2 batch elements"), ("h", "4 heads"), ("row", "19 queries")):
        for wrong in (19, -20, 0.5):
            with pytest.raises(ValueError, match=f"^{name} must be one of the {says}, got {wrong}$"):
                viz.row_scores(q, k, **{"row": 0, name: wrong})  # type: ignore[arg-type]


@pytest.mark.parametrize("picture", [viz.attention_weights, lambda q, k, mask: viz.row_scores(q, k, 0, mask=mask)])
def test_ids_of_another_length_are_refused(picture: Any, qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, _ = qkv
    with pytest.raises(ValueError, match=rf"ids must have shape .* or \({k.shape[1]},\), got \(1, 3\)"):
        picture(q, k, mask=Documents(torch.zeros(3, dtype=torch.int64)))


def test_a_softmax_of_more_tiles_than_a_picture_shows_is_refused() -> None:
    scores, v = torch.zeros(1025), torch.ones(1025, 1)
    with pytest.raises(
        ValueError, match=r"1025 in tiles of block_N=2 are more than 512 tiles, .* a block_N of at least 3"
    ):
        viz.draw_softmax(scores, v, 2)


@pytest.mark.parametrize(("tiles", "edges"), [(64, 63), (65, 0)])
def test_edges_that_cannot_be_told_apart_are_not_drawn(tiles: int, edges: int) -> None:
    figure = viz.draw_softmax(torch.zeros(tiles), torch.ones(tiles, 1), 1)
    assert [sum(line.get_color() == LIGHT for line in axes.lines) for axes in figure.axes] == [edges] * 4


@pytest.mark.parametrize("block_N", [1, 5, 27, 64])
def test_the_last_state_is_the_softmax_of_the_row(qkv: tuple[Tensor, Tensor, Tensor], block_N: int) -> None:
    q, k, v = qkv
    scores = viz.row_scores(q, k, 3, causal=True, h=2, b=1)
    steps = viz.softmax_steps(scores, v[1, :, 1], block_N)
    o, lse = oracle_attention(q, k, v, Causal(), (), None, None)
    assert [step.keys for step in steps] == [min((i + 1) * block_N, 27) for i in range(len(steps))]
    torch.testing.assert_close(steps[-1].o / steps[-1].l, o[1, 3, 2])
    assert steps[-1].m + torch.tensor(steps[-1].l).double().log().item() == pytest.approx(lse[1, 2, 3].item())


def test_states_follow_the_maximum() -> None:
    """The numbers themselves: nothing, then log 1, then log 4, then nothing new."""
    scores = torch.tensor([-torch.inf, 0.0, torch.log(torch.tensor(4.0)), -torch.inf])
    steps = viz.softmax_steps(scores, torch.ones(4, 1), 1)
    assert [step.l for step in steps] == pytest.approx([0, 1, 1.25, 1.25])
    assert [step.alpha for step in steps] == pytest.approx([1, 0, 0.25, 1])
    assert [step.o.item() for step in steps] == pytest.approx([0, 1, 1.25, 1.25])


# --- Pictures ---


def texts(figure: Figure) -> list[Text]:
    """What is drawn: not the labels of ticks beyond the ends of an axis."""
    beyond = set()
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        lo, hi = sorted(axis.get_view_interval())
        beyond |= {tick.label1 for tick in axis.get_major_ticks() if not lo <= tick.get_loc() <= hi}
    visible = [text for text in figure.findobj(Text) if isinstance(text, Text) and text.get_visible()]
    return [text for text in visible if text.get_text().strip() and text not in beyond]


def assert_readable(figure: Figure) -> None:
    """All text lies inside the figure, and no text covers another."""
    figure.draw_without_rendering()
    boxes = {text: text.get_window_extent() for text in texts(figure)}
    assert boxes
    for text, box in boxes.items():
        inside = box.x0 >= -1 and box.y0 >= -1 and box.x1 <= figure.bbox.x1 + 1 and box.y1 <= figure.bbox.y1 + 1
        assert inside, f"{text.get_text()!r} leaves the figure"
    for (one, a), (two, b) in itertools.combinations(boxes.items(), 2):
        across = min(a.x1, b.x1) - max(a.x0, b.x0)
        down = min(a.y1, b.y1) - max(a.y0, b.y0)
        assert across <= 1 or down <= 1, f"{one.get_text()!r} and {two.get_text()!r} cover each other"


def test_tile_maps_can_be_read() -> None:
    assert_readable(viz.draw_tiles(viz.tile_map(Causal() & SlidingWindow(1000, None), 4096, 4096)))
    assert_readable(viz.draw_tiles(viz.tile_map(None, 100, 3000, 64, 64), "a wide one"))
    assert_readable(viz.draw_tiles(viz.tile_map(Causal(), 3000, 1000), "a high one"))
    assert_readable(viz.draw_tiles(viz.tile_map(None, 1, 1), "a single token"))


def test_weights_and_softmax_can_be_read(qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v = qkv
    assert_readable(viz.draw_weights(viz.attention_weights(q, k, causal=True)))
    assert_readable(viz.draw_weights(viz.attention_weights(q[:, :, :1], k[:, :, :1])))
    assert_readable(viz.draw_softmax(viz.row_scores(q, k, -1), v[0, :, 0], 4))


@pytest.mark.slow_cases("backward/fa-bwd-h200", "variants/variants-h200", "forward/fa-h200", reason="1 s each")
@pytest.mark.parametrize(
    "name",
    [
        "forward/fa-h200",
        "backward/fa-bwd-h200",
        "variants/variants-h200",
        "forward/fp8-h200",
        "ladder/d512-h200",
        "memory/memory-fwdbwd-h200",
    ],
)
def test_dashboards_can_be_read(name: str) -> None:
    assert_readable(viz.draw_dashboard(results.load(RESULTS / f"{name}.json")))


@pytest.mark.slow(reason="2 s")
def test_lengths_can_be_read() -> None:
    measured = results.load(RESULTS / "forward/fa-h200.json")
    assert_readable(viz.draw_lengths(measured))
    assert_readable(viz.draw_lengths(measured, "causal"))
    with pytest.raises(ValueError, match="no window case was measured at three lengths"):
        viz.draw_lengths(measured, "window")


# --- The command line ---


def invoke(line: str) -> tuple[int, str]:
    outcome = CliRunner(env={"COLUMNS": "220", "TERMINAL_WIDTH": "220"}).invoke(app, shlex.split(line))
    return outcome.exit_code, outcome.output


@pytest.mark.parametrize(
    "line",
    [
        "tiles --seqlen 512 --mask window100+documents200 --causal",
        "tiles --seqlen 512 --arch sm_90a --head-dim 64 --causal",
        "weights --seqlen 8 --seqlen-k 9 --heads 2 --mask window3 --softcap 5 --alibi",
        "softmax --seqlen 32 --row 5 --causal --block-N 8",
        f"lengths {RESULTS / 'forward/fa-h200.json'} --variant full",
        f"dashboard {RESULTS / 'forward/heads-h200.json'}",
    ],
    ids=lambda line: line.split()[0],
)
def test_commands_draw(line: str, tmp_path: Path) -> None:
    picture = tmp_path / "new/picture.png"
    code, said = invoke(f"viz {line} -o {picture}")
    assert (code, said) == (0, f"picture: {picture}\n")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_command_knows_which_kernels_visit_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr("tileattn.cli.run_viz._save", lambda figure, output: drawn.append(figure))
    for arch in ("sm_80", "gfx942"):
        assert invoke(f"viz tiles --seqlen 3000 --seqlen-k 1000 --causal --arch {arch} -o {tmp_path}/x.png")[0] == 0
    shown = [[t.get_text() for t in figure.legends[0].get_texts()] for figure in drawn]
    maps = [
        viz.tile_map(Causal(), 3000, 1000, *viz.kernel_tiles(arch, 128, Causal(), seqlen=1000), arch=arch)
        for arch in ("sm_80", "gfx942")
    ]
    assert shown == [[f"{NAMES[kind]} ({tile_map.count(kind)})" for kind in NAMES] for tile_map in maps]
    assert maps[1].share(Tile.SKIPPED) > maps[0].share(Tile.SKIPPED)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("tiles --seqlen 0", "0 is too few"),
        ("tiles --mask windw3", "'windw3' is no mask; accepted: full, or masks joined with '+': causal, window<L>"),
        ("tiles --arch sm_80 --block-M 64", "it brings its own tiles"),
        ("tiles --arch sm_81", "arch must be one of"),
        ("tiles --head-dim 64", "it is that of the kernel for --arch, which is not given"),
        ("weights --seqlen 2000", "q must have 1 to 1024 tokens"),
        ("weights --heads 17", "up to 16 heads"),
        ("softmax --seqlen 100000 --block-N 1", "100000 in tiles of block_N=1 are more than 512 tiles"),
        ("softmax --row 128", "row must be one of the 128 queries, got 128"),
        (f"dashboard {ROOT / 'pyproject.toml'}", "is not JSON"),
        (f"lengths {RESULTS / 'variants/variants-h200.json'}", "was measured at three lengths"),
        ("tiles -o tiles.jpg", "has the suffix '.jpg'"),
    ],
)
def test_commands_say_what_is_wrong(line: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, said = invoke(f"viz {line}")
    assert code == 2
    assert says in " ".join(said.replace("│", " ").split())
    assert not list(tmp_path.iterdir())
