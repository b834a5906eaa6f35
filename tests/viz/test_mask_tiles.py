"""The map of what a mask does to tiles, and the option --function of `tileattn viz tiles`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from typer.testing import CliRunner

from tests.tools.positions import Positions, lengths, positions
from tileattn import BlockSparse, Causal, Dilated, Neighborhood, viz
from tileattn.cli.app import app
from tileattn.viz.tiles import Tile, described

FILE = """
import tileattn

def band(b, h, q, k):
    return (q - k < 100) & (k <= q)

grid = tileattn.Neighborhood((16, 16), 5)
number = 3

def branches(b, h, q, k):
    return q if k < q else k
"""


@settings(deadline=None, derandomize=True, max_examples=60)
@given(case=positions(), block_M=lengths, block_N=lengths)
def test_hidden_and_whole_tiles(case: Positions, block_M: int, block_N: int) -> None:
    map_ = viz.mask_tiles(case.mask, case.seqlen_q, case.seqlen_k, block_M, block_N, b=1, h=1)
    for i, row in enumerate(map_.tiles.tolist()):
        for j, kind in enumerate(row):
            allowed = case.allowed[1, 1, i * block_M : (i + 1) * block_M, j * block_N : (j + 1) * block_N]
            assert kind != Tile.SKIPPED or not allowed.any()
            assert kind != Tile.FULL or allowed.all()


def test_the_numbers_themselves() -> None:
    map_ = viz.mask_tiles(lambda b, h, q, k: q - k < 16, 64, 64, 16, 16, causal=True)
    assert map_.tiles.tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    assert (viz.mask_tiles(None, 64, 64).tiles == Tile.FULL).all()


def test_long_sequences_have_larger_tiles() -> None:
    map_ = viz.mask_tiles(lambda b, h, q, k: k <= q, 131072, 131072)
    assert (map_.block_M, map_.block_N, map_.tiles.shape) == (256, 256, torch.Size([512, 512]))
    assert map_.count(Tile.PARTIAL) == 512
    with pytest.raises(ValueError, match="take a block_N of at least 256"):
        viz.mask_tiles(Causal(), 131072, 131072, 256, 128)


def test_the_legend_says_what_the_map_is() -> None:
    legend = viz.draw_tiles(viz.mask_tiles(Causal(), 64, 64, 16, 16)).legends[0]
    assert [text.get_text() for text in legend.get_texts()] == [
        "whole: no mask needed (6)", "mixed: mask needed (4)", "hidden (6)",
    ]  # fmt: skip


def test_names_of_patterns() -> None:
    assert described(BlockSparse(torch.ones(1, 1, 2, 2, dtype=torch.bool), (1, 16))) == "BlockSparse(..., (1, 16))"
    assert described(Dilated(9, dilation=3) | Neighborhood((4, 4), 3)) == (
        "Dilated(9, 0, dilation=3) | Neighborhood((4, 4), (3, 3))"
    )


def invoke(line: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, line.split())
    return result.exit_code, " ".join(result.output.split())


@pytest.mark.parametrize("name", ["band", "grid"])
def test_a_function_of_a_file(name: str, tmp_path: Path) -> None:
    (tmp_path / "masks.py").write_text(FILE)
    code, said = invoke(f"viz tiles --N 256 --function {tmp_path}/masks.py:{name} -o {tmp_path}/{name}.png")
    assert (code, said) == (0, f"picture: {tmp_path}/{name}.png")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--function FILE:absent", "has no 'absent'; accepted: the name of a function mask(b, h, q, k) or a mask"),
        ("--function FILE:number", "mask must be a tileattn mask or a function mask(b, h, q, k), got int"),
        ("--function FILE:branches", "cannot branch on its arguments"),
        ("--function nothing.py:band", "'nothing.py:band' names no Python file; accepted: FILE.py:NAME"),
        ("--function FILE", "names no Python file; accepted: FILE.py:NAME"),
        ("--function FILE:band --mask window4", "Invalid value for --mask: it is for other masks than that of"),
        ("--function FILE:band --arch sm_90a", "Invalid value for --arch: it is for other masks"),
        ("--function FILE:band --block-M 0", "Invalid value for --block-M: 0 is too few"),
    ],
)
def test_wrong_functions_are_refused(options: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "masks.py").write_text(FILE)
    code, said = invoke(f"viz tiles -o {tmp_path}/x.png {options.replace('FILE', f'{tmp_path}/masks.py')}")
    assert code == 2
    assert says in said


@pytest.mark.parametrize("h", [0, 1])
def test_blocks_of_a_head(h: int) -> None:
    """Rows of blocks count from 0, with more keys than queries too; one head of two."""
    blocks = torch.tensor([[[True, False, False], [False, True, True]], [[False, True, False], [True] * 3]])
    tiles = viz.mask_tiles(BlockSparse(blocks[None], 32), 64, 96, 32, 32, h=h)
    assert torch.equal(tiles.tiles, 2 * blocks[h].to(torch.int8))
