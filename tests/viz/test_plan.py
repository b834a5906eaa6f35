"""The picture of a decode plan: its rule is that of the planning kernel, and all tiles are dealt once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tileattn.cli.app import app
from tileattn.viz import plan

LENGTHS = [
    [1, 64, 65, 2000],
    [0, 0, 511],
    [4096],
    [63, 0, 1025, 1, 128, 777, 64],
    [100_000, 3, 3, 3],
]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize(("kv_heads", "blocks"), [(1, 1), (2, 7), (3, 40), (8, 264)])
def test_every_tile_is_dealt_once_and_evenly(lengths: list[int], kv_heads: int, blocks: int) -> None:
    parts = plan.deal(lengths, kv_heads, 64, blocks)
    dealt = [(part.sequence, part.kv_head, tile) for part in parts for tile in range(part.first, part.end)]
    every = [(b, h, t) for b, n in enumerate(lengths) for h in range(kv_heads) for t in range(-(-n // 64))]
    assert dealt == every
    assert {(part.sequence, part.kv_head) for part in parts} == {
        (b, h) for b in range(len(lengths)) for h in range(kv_heads)
    }
    assert max(part.block for part in parts) < blocks
    costs = [0] * blocks
    for part in parts:
        is_last = part.end == -(-lengths[part.sequence] // 64)
        costs[part.block] += max(part.end - part.first, 1) + plan.OVERHEAD * is_last
    working = [cost for cost in costs if cost]
    # A worker that would begin in a job's overhead begins at the next job, so shares differ by that.
    assert max(working) - min(working) <= 1 + 2 * plan.OVERHEAD


def test_equal_jobs_are_dealt_without_a_second_part() -> None:
    """On 264 blocks: 128 jobs of 16 tiles, whole, on half of them; cut in two, if longer; two whole ones of 512."""
    for batch, tiles, parts_of_block, tiles_of_part in ((16, 16, 1, 16), (16, 64, 1, 32), (64, 64, 2, 64)):
        parts = plan.deal([tiles * 64] * batch, 8, 64, 264)
        blocks = [part.block for part in parts]
        assert {blocks.count(block) for block in blocks} == {parts_of_block}
        assert {part.end - part.first for part in parts} == {tiles_of_part}


@pytest.mark.slow
def test_the_rule_is_that_of_the_planning_kernel(tmp_path: Path) -> None:
    pytest.importorskip("tilelang")
    from tests.kernels.tilelang.decode.plans import parts_of
    from tileattn.call import cache_fields
    from tileattn.kernels.tilelang.decode import config, plan_kernel, records, shares
    from tileattn.testing.emulator.kernel import COMPILER, Kernel
    from tileattn.variant.program import program

    if COMPILER is None:
        pytest.skip("needs g++")
    constants = plan.OVERHEAD, plan.LEAST_KEYS, plan.MOST_WORK, plan.TILES_OF_FEW
    assert constants == (shares.OVERHEAD, config.LEAST_KEYS, records.MOST_WORK, config.TILES_OF_FEW)
    kernel = Kernel(plan_kernel.plan_kernel("sm_80", False, program("")), tmp_path)
    for lengths in LENGTHS:
        for kv_heads, blocks in ((1, 1), (2, 7), (3, 40)):
            batch, group = len(lengths), 4
            capacity = max(lengths)
            jobs = batch * kv_heads
            workers = min(records.even_workers(jobs, blocks), jobs * max(-(-capacity // 64), 1))
            multiprocessors = max(blocks // 2, 1)
            few = min(records.even_workers(jobs, multiprocessors), workers)
            most = config.TILES_OF_FEW * multiprocessors
            deal = records.Deal(64, 64, workers, records.FREE, batch, 2, 0, 4, 2, jobs, few, most)
            written = torch.full((records.plan_rows(deal, kv_heads, batch), records.WIDTH), -77, dtype=torch.int32)
            status = torch.zeros(cache_fields.FIELDS, dtype=torch.int32)
            kernel(
                torch.tensor(lengths, dtype=torch.int32), written, status, 1, batch, group, kv_heads, capacity, 64, 64,
                workers, records.FREE, batch, records.counter_rows(deal, kv_heads), deal.least, jobs,
                deal.few, deal.few_tiles, deal.coarse,
            )  # fmt: skip
            assert not status.any()
            tiles = {(b, 0): (0, -(-n // 64)) for b, n in enumerate(lengths)}
            there = [
                (part.worker, part.sequence, part.kv_head, part.lo, part.hi)
                for part in parts_of(written, deal, kv_heads, group, batch, tiles)
            ]
            mine = [
                (part.block, part.sequence, part.kv_head, part.first, part.end)
                for part in plan.deal(lengths, kv_heads, 64, blocks)
            ]
            assert mine == there


def test_the_command_draws(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "plan.png"
    line = ["viz", "plan", "--lengths", "2000,0,100", "--kv-heads", "2", "--blocks", "8", "-o", str(picture)]
    assert CliRunner().invoke(app, line).exit_code == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    refused = CliRunner().invoke(app, [*line[:3], "1,x", "--output", str(tmp_path / "other.png")])
    assert refused.exit_code == 2
    assert "--lengths" in refused.output


def test_the_picture_says_how_even_the_blocks_are() -> None:
    pytest.importorskip("matplotlib")
    figure = plan.draw_plan([6400, 6400], 1, 64, 4)
    text = figure.get_suptitle()
    assert "2 sequences x 1 kv head on 4 blocks of 4: 50 tiles each; 2 of 2 jobs are cut into parts" in text
    assert "on 1 block of 3: 1 tiles each; 0 of 1 jobs" in plan.draw_plan([1], 1, 64, 3).get_suptitle()
    (axes,) = figure.axes
    assert sum(bar.get_height() for bar in axes.patches) == 200
