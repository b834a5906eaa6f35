"""benchmarks/any_mask.py, as far as a machine without a GPU runs it."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tileattn.bench.sparse_masks import NAMES, pattern

any_mask: Any = importlib.import_module("benchmarks.any_mask")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seqlen", [1024, 1110])
def test_both_forms_of_a_pattern_are_the_same_mask(name: str, seqlen: int) -> None:
    of = pattern(name, seqlen, 3, "cpu")
    q, k = torch.arange(seqlen)[:, None], torch.arange(seqlen)[None]
    for head in range(3):
        b, h = torch.tensor(0), torch.tensor(head)
        ours, theirs = of.mask.allows(b, h, q, k), of.mask_mod(b, h, q, k)
        assert torch.equal(*(torch.as_tensor(x).expand(seqlen, seqlen) for x in (ours, theirs)))
        assert theirs.any()
        assert not theirs.all()
    assert of.by_head == (name in ("windows-by-head", "loaded-windows", "blocks"))


@pytest.mark.parametrize("name", ["dilated", "windows-by-head"])
def test_tiles_are_those_of_all_heads(name: str) -> None:
    case = any_mask.Case(name, 1024, 3, 64)
    of = pattern(name, 1024, 3, "cpu")
    cut = any_mask.cuts(case, of)["forward"]
    tiles, visited, mixed = any_mask.count_tiles(case, of, cut, "cpu")
    q, k = torch.arange(1024)[:, None], torch.arange(1024)[None]
    fewest, whole = 0, 0
    for head in range(3):
        seen = of.mask_mod(torch.tensor(0), torch.tensor(head), q, k).expand(1024, 1024)
        blocks = seen.unflatten(0, (-1, cut.block_M)).unflatten(2, (-1, cut.block_N))
        fewest += int(blocks.any(3).any(1).sum())
        whole += int(blocks.all(3).all(1).sum())
    assert (tiles, visited, mixed) == (3 * 1024**2 // (cut.block_M * cut.block_N), fewest, fewest - whole)


def test_backward_counts_tiles_of_its_own() -> None:
    case = any_mask.Case("dilated", 4096, 2, 128)
    cuts = any_mask.cuts(case, pattern("dilated", 4096, 2, "cpu"))
    assert cuts["backward"].by_keys
    assert not cuts["forward"].by_keys
    assert (cuts["backward"].block_M, cuts["backward"].block_N) == (64, 128)


def test_a_row_comes_back_from_its_file(tmp_path: Path) -> None:
    row = any_mask.Row("dilated", 1024, 2, 64, "forward", {"tileattn": 1.0, "flex": 2.5}, 64, 20, 20, 0.3)
    any_mask.results.write({"rows": [any_mask.asdict(row)], "making": [{"name": "x"}]}, tmp_path / "rows.json")
    assert any_mask._found(tmp_path / "rows.json") == ([row], [{"name": "x"}])
    assert any_mask.table([row]).row_count == 1


@pytest.mark.parametrize("arguments", [["--names", "diluted"], ["--only", "half"]])
def test_wrong_options_are_refused(arguments: list[str], tmp_path: Path) -> None:
    app = any_mask.typer.Typer()
    app.command()(any_mask.main)
    run = CliRunner().invoke(app, ["--json", str(tmp_path / "x.json"), *arguments])
    assert run.exit_code == 2
    assert arguments[1] in run.output
