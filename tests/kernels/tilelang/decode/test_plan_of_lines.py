"""The planning kernel where tiles are listed, run on the CPU by emulate(): each visited tile is dealt exactly once."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("tilelang")

from tests.kernels.tilelang.decode.plans import Part, parts_of
from tileattn import FunctionMask
from tileattn.call import cache_fields as fields
from tileattn.kernels.tilelang.decode import records
from tileattn.kernels.tilelang.decode.lines import visits
from tileattn.kernels.tilelang.decode.plan_kernel import plan_kernel
from tileattn.kernels.tilelang.decode.records import FREE, Deal
from tileattn.kernels.tilelang.decode.shares import OVERHEAD
from tileattn.testing.emulator.kernel import COMPILER, Kernel
from tileattn.variant.key import encode
from tileattn.variant.program import program

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")

MASKS = {  # by the number of lines of an item, which has two jobs
    1: FunctionMask(lambda b, h, q, k: k // 16 % 3 == b),
    2: FunctionMask(lambda b, h, q, k: k // 16 % 3 == h),
}
BLOCK = 16


@functools.cache
def kernel(planes: int) -> Kernel:
    return Kernel(plan_kernel("sm_80", False, program(encode(MASKS[planes], ())[0]), True))


def planned(lengths: list[int], q_len: int, deal: Deal, group: int, kv_heads: int, seen: Tensor) -> Tensor:
    """The plan; seen: bool (items, lines of an item, tiles)."""
    items, planes, tiles = seen.shape
    batch, first, each = len(lengths), records.plan_rows(deal, kv_heads, len(lengths)), records.line_rows(tiles)
    plan = torch.full((first + items * planes * each, records.WIDTH), -77, dtype=torch.int32)
    visits._fill(seen, seen & (torch.arange(tiles) % 2 == 0), plan[first:].view(items, planes, -1))
    status = torch.zeros(fields.FIELDS, dtype=torch.int32)
    kernel(planes)(
        torch.tensor(lengths, dtype=torch.int32), plan, status, q_len, batch * q_len, group, kv_heads, 2**20, BLOCK,
        BLOCK, deal.workers, deal.rule, deal.items, records.counter_rows(deal, kv_heads), deal.least, deal.jobs,
        deal.few, deal.few_tiles, deal.coarse, first, each, tiles,
    )  # fmt: skip
    assert not status.any()
    return plan


@st.composite
def problems(draw: st.DrawFn, planes: int):  # type: ignore[no-untyped-def]
    lengths = draw(st.lists(st.sampled_from([0, 1, 16, 17, 100, 511, 2000]), min_size=1, max_size=7))
    q_len, group = draw(st.sampled_from([1, 3, 40])), draw(st.sampled_from([1, 4]))
    kv_heads = 2 if planes == 2 else draw(st.sampled_from([2, 5]))
    workers = draw(st.sampled_from([1, 2, 7, 60, 300]))
    rule = draw(st.sampled_from([FREE, FREE, -1, -3, 1, 8]))
    coarse = draw(st.sampled_from([0, 0, 0, 2]))
    share, seed = draw(st.sampled_from([0.0, 0.05, 0.5, 1.0])), draw(st.integers(0, 99))
    return lengths, q_len, group, kv_heads, workers, rule, coarse, share, seed


@pytest.mark.parametrize("planes", [pytest.param(1, marks=pytest.mark.slow), 2])
@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_every_visited_tile_is_dealt_once(planes: int, data: st.DataObject) -> None:
    lengths, q_len, group, kv_heads, workers, rule, coarse, share, seed = data.draw(problems(planes))
    batch, q_tiles = len(lengths), -(-q_len * group // BLOCK)
    items, tiles = batch * q_tiles, max(-(-max(lengths) // BLOCK), 1)
    most_parts = records.most_parts(rule, max(lengths), BLOCK) if rule else 2
    deal = Deal(
        BLOCK, BLOCK, workers, rule, items, most_parts, records.most_groups(rule, workers, most_parts), BLOCK, 1,
        items * kv_heads, workers, 0, coarse,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    ends = torch.tensor([-(-length // BLOCK) for length in lengths]).repeat_interleave(q_tiles)[:, None, None]
    seen = (torch.rand(items, planes, tiles, generator=generator) < share) & (torch.arange(tiles) < ends)
    plan = planned(lengths, q_len, deal, group, kv_heads, seen)
    own = {(b, t): (0, -(-length // BLOCK)) for b, length in enumerate(lengths) for t in range(q_tiles)}
    _check(parts_of(plan, deal, kv_heads, group, batch, own), own, deal, seen, q_tiles, kv_heads)


def _check(
    parts: list[Part],
    own: dict[tuple[int, int], tuple[int, int]],
    deal: Deal,
    seen: Tensor,
    q_tiles: int,
    kv_heads: int,
) -> None:
    jobs: dict[tuple[int, int, int], list[Part]] = {}
    loads, total = [0] * deal.workers, 0
    for part in parts:
        jobs.setdefault((part.sequence, part.q_tile, part.kv_head), []).append(part)
        line = seen[part.sequence * q_tiles + part.q_tile, part.kv_head if seen.shape[1] == kv_heads else 0]
        cost = max(int(line[part.lo : part.hi].sum()), 1) + OVERHEAD * (part.number == part.parts - 1)
        loads[part.worker] += cost
        total += cost
    assert set(jobs) == {(*item, kv_head) for item in own for kv_head in range(kv_heads)}
    for job, its in jobs.items():
        assert [part.number for part in its] == list(range(len(its)))
        assert {part.parts for part in its} == {len(its)}
        assert (its[0].lo, its[-1].hi) == own[job[:2]]
        assert all(part.hi == following.lo for part, following in itertools.pairwise(its))
        if deal.rule == FREE and len(its) > 1:
            line = seen[job[0] * q_tiles + job[1], job[2] if seen.shape[1] == kv_heads else 0]
            # A part begins with a tile that is visited, and the first has one too.
            assert all(line[part.lo] for part in its[1:])
            assert all(line[part.lo : part.hi].any() for part in its)
    if deal.rule == FREE and deal.coarse == 0:
        # Shares are equal in tiles that are visited, whatever is hidden between them.
        assert max(loads) <= -(-total // deal.workers) + 2 * OVERHEAD + 1


@pytest.mark.parametrize("rule", [FREE, 8, -3])
def test_jobs_that_are_cut(rule: int) -> None:
    """By seven workers, each in two parts or more."""
    most_parts = records.most_parts(rule, 2000, BLOCK) if rule else 2
    deal = Deal(BLOCK, BLOCK, 7, rule, 2, most_parts, 0, BLOCK, 1, 4, 7, 0, 0)
    own = {(0, 0): (0, 32), (1, 0): (0, 125)}
    ends = torch.tensor([32, 125])[:, None, None]
    for seed in range(5):
        seen = torch.rand(2, 2, 125, generator=torch.Generator().manual_seed(seed)) < 0.3
        seen &= torch.arange(125) < ends
        plan = planned([511, 2000], 1, deal, 4, 2, seen)
        parts = parts_of(plan, deal, 2, 4, 2, own)
        _check(parts, own, deal, seen, 1, 2)
        assert len({part.worker for part in parts if part.sequence == 1}) > 2


def test_hidden_stretches_cost_nothing() -> None:
    """One head of two sees a tenth of the keys: it gets as many workers fewer."""
    seen = torch.zeros(1, 2, 2000, dtype=torch.bool)
    seen[0, 0, 1000:1100] = seen[0, 1] = True
    deal = Deal(BLOCK, BLOCK, 21, FREE, 1, 2, 0, 4, 1, 2, 21, 0)
    plan = planned([32000], 1, deal, 4, 2, seen)
    workers = [len(_workers(plan, deal, kv_head)) for kv_head in range(2)]
    assert workers == [1, 20]


def _workers(plan: Tensor, deal: Deal, kv_head: int) -> set[int]:
    parts = parts_of(plan, deal, 2, 4, 1, {(0, 0): (0, 2000)})
    return {part.worker for part in parts if part.kv_head == kv_head}
