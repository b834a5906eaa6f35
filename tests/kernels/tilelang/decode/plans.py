"""Reads a decode plan on the host, as its workers do; for tests."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tileattn.kernels.tilelang.decode import records
from tileattn.kernels.tilelang.decode.records import Deal


@dataclass(frozen=True)
class Part:
    """Tiles [lo, hi) of a job, and where the plan says that its result goes."""

    worker: int
    sequence: int
    q_tile: int
    kv_head: int
    lo: int
    hi: int
    number: int
    parts: int
    slot: int | None
    counter: int | None


def sequences(plan: Tensor, deal: Deal, kv_heads: int, batch: int) -> list[list[int]]:
    """The sequence records, with that of unused rows."""
    first = deal.workers + 1 + records.counter_rows(deal, kv_heads)
    return plan[first:].reshape(-1, 4)[: batch + 1].tolist()


def parts_of(
    plan: Tensor, deal: Deal, kv_heads: int, group: int, batch: int, tiles: dict[tuple[int, int], tuple[int, int]]
) -> list[Part]:
    """All parts; `tiles` has the first and the end of the tiles that a tile of queries (sequence, q_tile) may see."""
    rows, of = plan.tolist(), sequences(plan, deal, kv_heads, batch)
    found = []
    for worker in range(deal.workers):
        here, there = rows[worker], rows[worker + 1]
        job, b, q_tile, kv_head, tile = here[:5]
        for step in range(there[records.JOB] - job + (there[records.TILE] > 0)):
            number = job + step
            while step and of[b][records.ITEMS] == 0:
                b += 1
            if q_tile * deal.block_M < of[b][records.Q_LEN] * group:
                first, end = tiles[b, q_tile]
                lo = max(first, tile if step == 0 else 0)
                cut = number == there[records.JOB] and there[records.TILE] > 0
                hi = min(end, there[records.TILE]) if cut else end
                inside = step == 0 and tile > 0
                ends = (lo, hi), (first, end)
                found += _of_job(worker, b, q_tile, kv_head, number, *ends, inside, cut, rows, deal, kv_heads)
            kv_head += 1
            if kv_head == kv_heads:
                kv_head, q_tile = 0, q_tile + 1
                if q_tile == of[b][records.ITEMS]:
                    q_tile, b = 0, b + 1
    return found


def _of_job(worker, b, q_tile, kv_head, job, here, whole, inside, cut, rows, deal, kv_heads):  # type: ignore[no-untyped-def]
    (lo, hi), (first, end) = here, whole
    if deal.rule == records.FREE:
        record = rows[worker] if inside else rows[worker + 1] if cut else None
        number = worker - record[records.FIRST] if inside else 0
        parts = record[records.PARTS] if record else 1
        begin = record[records.FIRST] if record else worker
        slot = 2 * worker + (number == 0) if parts > 1 else None
        return [Part(worker, b, q_tile, kv_head, lo, hi, number, parts, slot, begin if parts > 1 else None)]
    if deal.rule > 0:
        unit, origin = deal.rule, first // deal.rule * deal.rule
    else:
        unit, origin = max(-(-(end - first) // -deal.rule), 1), first
    parts = max(-(-(end - origin) // unit), 1)
    area = job
    if records.jobs(deal, kv_heads) == 2 * deal.workers:
        area = 2 * (rows[worker][records.FIRST] if inside else worker) + (inside or cut)
    found = []
    for number in range((lo - origin) // unit, max(-(-(hi - origin) // unit), 1 if not inside else 0)):
        begin, stop = max(origin + number * unit, first), min(origin + (number + 1) * unit, end)
        slot = area * deal.most_parts + number if parts > 1 else None
        found.append(Part(worker, b, q_tile, kv_head, begin, stop, number, parts, slot, area if parts > 1 else None))
    return found
