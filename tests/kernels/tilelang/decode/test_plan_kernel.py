"""The planning kernel of decode calls, run on the CPU by emulate(): every key of every job is dealt exactly once."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("tilelang")

from tests.kernels.tilelang.decode.plans import Part, parts_of, sequences
from tileattn.call import cache_fields as fields
from tileattn.kernels.tilelang.build.compile import device_source
from tileattn.kernels.tilelang.decode import records
from tileattn.kernels.tilelang.decode.plan_kernel import plan_kernel
from tileattn.kernels.tilelang.decode.records import FREE, Deal
from tileattn.kernels.tilelang.decode.shares import OVERHEAD
from tileattn.testing.emulator.kernel import COMPILER, Kernel
from tileattn.variant.program import program

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")


@functools.cache  # each is lowered where it is first asked for, in 5 s and more
def kernel(packed: bool) -> Kernel:
    return Kernel(plan_kernel("sm_80", packed, program("SlidingWindow(i,i)")))


def planned(
    lengths: list[int], q_lens: list[int] | int, deal: Deal, group: int, kv_heads: int, window: tuple[int, int],
    total_q: int | None = None, capacity: int = 2**20, longest: int | None = None, bounds: list[int] | None = None,
) -> tuple[Tensor, list[int]]:  # fmt: skip
    """The plan and the status."""
    batch, packed = len(lengths), not isinstance(q_lens, int)
    plan = torch.full((records.plan_rows(deal, kv_heads, batch), records.WIDTH), -77, dtype=torch.int32)
    status = torch.zeros(fields.FIELDS, dtype=torch.int32)
    tensors = [torch.tensor(lengths, dtype=torch.int32)]
    if isinstance(q_lens, int):
        q_len, total = q_lens, batch * q_lens
    else:
        ends = bounds or [0, *itertools.accumulate(q_lens)]
        tensors.append(torch.tensor(ends, dtype=torch.int32))
        q_len, total = longest or max(q_lens), total_q or ends[-1]
    kernel(packed)(
        *tensors, plan, status, q_len, total, group, kv_heads, capacity, deal.block_M, deal.block_N, deal.workers,
        deal.rule, deal.items, records.counter_rows(deal, kv_heads), deal.least, deal.jobs,
        deal.few, deal.few_tiles, deal.coarse, *window,
    )  # fmt: skip
    return plan, status.tolist()


def tiles_of(
    lengths: list[int], q_lens: list[int], deal: Deal, group: int, window: tuple[int, int]
) -> dict[tuple[int, int], tuple[int, int]]:
    """The tiles of keys that each tile of queries may see, from the definition of a window."""
    found = {}
    for b, (length, q_len) in enumerate(zip(lengths, q_lens, strict=True)):
        for q_tile in range(-(-q_len * group // deal.block_M)):
            rows = range(q_tile * deal.block_M, min((q_tile + 1) * deal.block_M, q_len * group))
            at = [length - q_len + row // group for row in rows]
            lo = max(min(at) - window[0], 0)
            hi = max(min(max(at) + window[1] + 1, length), 0)
            first = min(lo, length) // deal.block_N
            found[b, q_tile] = (first, -(-hi // deal.block_N) if hi > lo else first)
    return found


@st.composite
def problems(draw: st.DrawFn, packed: bool):  # type: ignore[no-untyped-def]
    batch = draw(st.integers(1, 9))
    lengths = [draw(st.sampled_from([0, 1, 15, 16, 17, 63, 100, 511, 2000])) for _ in range(batch)]
    q_lens = [draw(st.integers(0, 20)) for _ in range(batch)] if packed else draw(st.integers(1, 20))
    group, kv_heads = draw(st.sampled_from([1, 3, 8])), draw(st.integers(1, 3))
    block_M, block_N = draw(st.sampled_from([16, 64])), draw(st.sampled_from([16, 64]))
    workers = draw(st.sampled_from([1, 2, 7, 60, 300]))
    rule = draw(st.sampled_from([FREE, -1, -2, -7, 1, 3, 8]))
    window = draw(st.sampled_from([(2**30, 0), (100, 0), (30, 5), (0, 0)]))
    rest = draw(st.sampled_from([0, 1, 40])) if packed else 0
    least, coarse = draw(st.sampled_from([1, 3])), draw(st.sampled_from([0, 0, 0, 1, 3]))
    few = draw(st.sampled_from([(workers, 0), (max(workers // 2, 1), 50)]))
    return lengths, q_lens, group, kv_heads, block_M, block_N, workers, rule, window, rest, (least, *few, coarse)


@pytest.mark.slow(reason="lowers and compiles a kernel, 10 s each; test_plan_of_lines.py runs one")
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_every_tile_is_dealt_once(packed: bool, data: st.DataObject) -> None:
    problem = data.draw(problems(packed))
    lengths, q_lens, group, kv_heads, block_M, block_N, workers, rule, window, rest, limits = problem
    batch = len(lengths)
    each = list(q_lens) if packed else [q_lens] * batch
    total_q = sum(each) + rest
    if total_q == 0:
        return
    items = (
        records.packed_items(batch, total_q * group, block_M)
        if packed
        else records.dense_items(batch, q_lens * group, block_M)
    )
    most_parts = records.most_parts(rule, max(lengths), block_N) if rule else 2
    groups = records.most_groups(rule, workers, most_parts)
    jobs = records.dense_items(batch, max(each) * group, block_M) * kv_heads
    deal = Deal(block_M, block_N, workers, rule, items, most_parts, groups, block_M, limits[0], jobs, *limits[1:])
    plan, status = planned(lengths, q_lens, deal, group, kv_heads, window, total_q)
    assert status == [0] * fields.FIELDS
    counters = plan[workers + 1 : workers + 1 + records.counter_rows(deal, kv_heads)]
    assert not counters.any()
    all_lengths, all_queries = [*lengths, 0], [*each, rest]
    starts = [0, *itertools.accumulate(each)] if packed else [0] * (batch + 1)
    found = sequences(plan, deal, kv_heads, batch)
    assert [record[:3] for record in found] == [list(each) for each in zip(starts, all_queries, all_lengths)]
    for row in plan[:workers].tolist():
        if row[records.SEQUENCE] <= batch:
            own = row[records.OWN : records.OWN + records.RECORD]
            assert own == found[row[records.SEQUENCE]] or row[records.JOB] == deal.items * kv_heads
    tiles = tiles_of(all_lengths, all_queries, deal, group, window)
    _check(parts_of(plan, deal, kv_heads, group, batch, tiles), tiles, deal, kv_heads)


def _check(parts: list[Part], tiles: dict[tuple[int, int], tuple[int, int]], deal: Deal, kv_heads: int) -> None:
    jobs: dict[tuple[int, int, int], list[Part]] = {}
    for part in parts:
        jobs.setdefault((part.sequence, part.q_tile, part.kv_head), []).append(part)
    assert set(jobs) == {(*item, kv_head) for item in tiles for kv_head in range(kv_heads)}
    slots = {part.slot for part in parts if part.slot is not None}
    assert all(0 <= slot < records.jobs(deal, kv_heads) * deal.most_parts for slot in slots)
    # Jobs share slots and counter only where one worker has all their parts, and so one job after the other.
    owners: dict[int, tuple[int, int, int] | int] = {}
    for job, its in jobs.items():
        first, end = tiles[job[:2]]
        assert [part.number for part in its] == list(range(len(its)))
        assert {part.parts for part in its} == {len(its)}
        assert its[0].lo == first
        assert its[-1].hi == end
        assert all(part.hi == following.lo for part, following in itertools.pairwise(its))
        assert all(part.lo < part.hi for part in its) or len(its) == 1
        if len(its) > 1:
            workers = {part.worker for part in its}
            alone = deal.rule != FREE and deal.items * kv_heads >= 2 * deal.workers and len(workers) == 1
            owner = its[0].worker if alone else job
            assert {owners.setdefault(part.counter, owner) for part in its if part.counter is not None} == {owner}
            assert len({part.counter for part in its}) == 1
            if deal.rule != FREE:
                assert [part.slot for part in its] == [its[0].counter * deal.most_parts + n for n in range(len(its))]
        if deal.rule == FREE and len(its) > 1:
            begin = its[0].worker
            assert [part.worker for part in its] == list(range(begin, begin + len(its)))
            assert [part.slot for part in its] == [2 * part.worker + (part.number == 0) for part in its]
        elif deal.rule > 0:
            assert all(part.hi % deal.rule == 0 for part in its[:-1])
        elif deal.rule < 0:
            assert len(its) <= -deal.rule
            assert len({part.hi - part.lo for part in its[:-1]}) <= 1
    if deal.rule == FREE:
        loads = [0] * deal.workers
        for part in parts:
            loads[part.worker] += max(part.hi - part.lo, 1) + OVERHEAD * (part.number == part.parts - 1)
        tiles = sum(loads) - OVERHEAD * len(jobs)
        share = max(-(-tiles // (deal.workers if tiles > deal.few_tiles else deal.few)), deal.least)
        assert max(loads) <= (share + OVERHEAD * (1 + share)) * 2**deal.coarse
        assert all(sum(part.worker == w and part.parts > 1 for part in parts) <= 2 for w in range(deal.workers))


@pytest.mark.slow(reason="lowers and compiles a kernel, 10 s")
@pytest.mark.parametrize(
    ("batch", "tiles", "kv_heads", "parts_of_worker", "tiles_of_part"),
    [
        (16, 16, 8, 1, 8),
        (4, 64, 32, 1, 32),
        (1, 128, 8, 1, 4),
        (1, 2048, 1, 1, 8),
        (64, 9, 32, 8, 9),
        (5, 111, 1, 1, 3),
    ],
)
def test_equal_jobs_are_dealt_evenly(
    batch: int, tiles: int, kv_heads: int, parts_of_worker: int, tiles_of_part: int
) -> None:
    """To 264 blocks: no worker has parts of two jobs, and all parts are equally long but a job's last ones."""
    jobs = batch * kv_heads
    deal = Deal(64, 64, records.even_workers(jobs, 264), FREE, batch, 2, 2, 4, 2, jobs)
    plan, _ = planned([tiles * 64 - 3] * batch, 1, deal, 4, kv_heads, (2**30, 0))
    own = {(b, 0): (0, tiles) for b in range(batch)} | {(batch, 0): (0, 0)}
    parts = [part for part in parts_of(plan, deal, kv_heads, 4, batch, own) if part.sequence < batch]
    workers = [part.worker for part in parts]
    assert {workers.count(worker) for worker in workers} == {parts_of_worker}
    assert max(part.hi - part.lo for part in parts) == tiles_of_part
    assert min(part.hi - part.lo for part in parts) >= tiles_of_part - 1
    assert set(workers) == set(range(len(parts) // parts_of_worker))


@pytest.mark.slow
def test_many_sequences() -> None:
    """More than a block's threads."""
    lengths = [(37 * i) % 901 for i in range(700)]
    deal = Deal(16, 64, 132, FREE, records.dense_items(700, 4, 16), 2, 2, 4)
    plan, _ = planned(lengths, 1, deal, 4, 2, (2**30, 0))
    tiles = tiles_of([*lengths, 0], [1] * 700 + [0], deal, 4, (2**30, 0))
    _check(parts_of(plan, deal, 2, 4, 700, tiles), tiles, deal, 2)


@pytest.mark.slow
def test_wrong_lengths_are_clamped_and_reported() -> None:
    deal = Deal(16, 16, 4, FREE, records.dense_items(3, 4, 16), 2, 0, 4)
    for lengths, wrong in (([5, -1, 7], 2), ([101, 0, 7], 1), ([100, 0, 2**31 - 1], 3), ([100, 0, -(2**31)], 3)):
        plan, status = planned(lengths, 1, deal, 4, 1, (2**30, 0), capacity=100)
        assert status[fields.SEQLENS_K] == wrong
        expected = [min(max(length, 0), 100) for length in lengths]
        assert [record[records.SEQLEN] for record in sequences(plan, deal, 1, 3)][:3] == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bounds", "longest", "field", "sequence"),
    [
        ([1, 4, 9], 9, fields.CU_SEQLENS_Q, 1),
        ([0, 4, 3], 9, fields.CU_SEQLENS_Q, 2),
        ([0, 4, 11], 9, fields.CU_SEQLENS_Q, 2),
        ([0, 2**31 - 1, -(2**31)], 9, fields.CU_SEQLENS_Q, 2),
        ([0, 4, 10], 5, fields.MAX_SEQLEN_Q, 2),
    ],
)
def test_wrong_packing_makes_all_rows_unused(bounds: list[int], longest: int, field: int, sequence: int) -> None:
    deal = Deal(16, 16, 4, FREE, records.packed_items(2, 40, 16), 2, 0, 16)
    plan, status = planned([9, 9], [1, 1], deal, 4, 1, (2**30, 0), total_q=10, longest=longest, bounds=bounds)
    assert status[field] == sequence
    assert [record[:3] for record in sequences(plan, deal, 1, 2)] == [[0, 0, 9], [0, 0, 9], [0, 10, 0]]
    tiles = tiles_of([9, 9, 0], [0, 0, 10], deal, 4, (2**30, 0))
    _check(parts_of(plan, deal, 1, 4, 2, tiles), tiles, deal, 1)


@pytest.mark.slow
def test_next_kernel_starts_early() -> None:
    """From sm_90 on; older GPUs have no such instruction."""
    early = "cudaTriggerProgrammaticLaunchCompletion"
    assert early in device_source(plan_kernel("sm_90a", False, program("")), "sm_90a")
    assert early not in device_source(plan_kernel("sm_80", False, program("")), "sm_80")
