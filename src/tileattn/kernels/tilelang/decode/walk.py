"""How a worker of a decode kernel walks over its jobs and their parts: it reads the plan (records.py).

    worker = begin_worker(arg, number)
    for _ in T.serial(worker.steps):
        job = enter_job(f, arg, worker)
        for u in T.serial(job.units):
            part = enter_part(arg, worker, job, u)
            ...
        next_job(arg, worker)

``arg`` are the kernel's parameters (signature.py), ``f`` its static facts: ``call``, ``traced``, ``block_M`` and
``block_N``. All threads that walk compute the same. Rule 0 is records.FREE.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import tilelang.language as T

from .jobs import keys_of_rows
from .records import FIRST, GROUP, ITEMS, JOB, KV_HEAD, PARTS, Q_LEN, Q_START, Q_TILE, SEQLEN, SEQUENCE, TILE

# Behind the fields of the worker's own record: where its work ends, and its number; INSIDE: whether it begins within
# its current job.
JOB_END, TILE_END, FIRST_END, PARTS_END, NUMBER, INSIDE = range(7, 13)


@T.macro
def begin_worker(arg, number):
    """A worker's place in registers, and the number of its jobs."""
    at = T.alloc_local([INSIDE + 1], "int32")
    for field in (JOB, SEQUENCE, Q_TILE, KV_HEAD, TILE, FIRST, PARTS):
        at[field] = arg.plan[number, field]
    for place, field in ((JOB_END, JOB), (TILE_END, TILE), (FIRST_END, FIRST), (PARTS_END, PARTS)):
        at[place] = arg.plan[number + 1, field]
    at[NUMBER] = number
    at[INSIDE] = T.cast(at[TILE] > 0, "int32")
    steps = T.alloc_var("int32", init=at[JOB_END] - at[JOB] + T.cast(at[TILE_END] > 0, "int32"))
    return SimpleNamespace(at=at, steps=steps)


@T.macro
def enter_job(f, arg, worker):
    """The worker's current job.

    number: of the job; sequence, kv_head. q_start: the sequence's first row of packed queries, else 0; q_len, seqlen:
    its numbers of queries and keys; q_pos: the position of its first query. row0: the job's first packed row; rows: how
    many it has, none or less for a job that is none (and has no units). kv_lo, kv_hi, first, end: the job's keys and
    their tiles (jobs.keys_of_rows); lo, hi: the tiles of this worker. units: how many parts this worker has of the job.
    """
    at = worker.at
    record = T.alloc_var("int32", init=arg.first_record + T.truncdiv(at[SEQUENCE], 2))
    column = T.alloc_var("int32", init=T.truncmod(at[SEQUENCE], 2) * 4)
    q_start, q_len, seqlen = (
        T.alloc_var("int32", init=arg.plan[record, column + field]) for field in (Q_START, Q_LEN, SEQLEN)
    )
    row0 = T.alloc_var("int32", init=at[Q_TILE] * f.block_M)
    rows = T.alloc_var("int32", init=T.min(q_len * arg.group - row0, f.block_M))
    # Unused rows have the last sequence's number, so that masks read elements that exist.
    sequence = T.alloc_var("int32", init=T.min(at[SEQUENCE], arg.batch - 1))
    used = at[SEQUENCE] < arg.batch
    keys = keys_of_rows(
        f.traced, arg.operands, f.block_N, sequence, row0, T.max(rows, 1), arg.group, q_len, seqlen
    )  # fmt: skip
    cut = (at[JOB] == at[JOB_END]) & (at[TILE_END] > 0)
    lo = T.alloc_var("int32", init=T.if_then_else(at[INSIDE] > 0, at[TILE], keys.first))
    hi = T.alloc_var("int32", init=T.if_then_else(cut, at[TILE_END], keys.end))
    unit = T.alloc_var("int32", init=1)
    origin = T.alloc_var("int32", init=keys.first)
    if arg.rule > 0:
        unit = arg.rule
        origin = T.truncdiv(keys.first, arg.rule) * arg.rule
    if arg.rule < 0:
        unit = T.max(T.truncdiv(keys.end - keys.first - 1 - arg.rule, -arg.rule), 1)
    units = T.alloc_var("int32", init=1)
    if arg.rule != 0:
        least = T.if_then_else(at[INSIDE] > 0, 0, 1)  # a job without keys has one part, in which it begins
        units = T.max(T.truncdiv(hi - origin + unit - 1, unit), least) - T.truncdiv(lo - origin, unit)
    if rows <= 0:
        units = 0
    return SimpleNamespace(
        number=at[JOB], sequence=sequence, used=used, q_start=q_start, q_len=q_len, seqlen=seqlen,
        q_pos=seqlen - q_len, row0=row0, rows=rows, kv_head=at[KV_HEAD], **vars(keys), lo=lo, hi=hi, cut=cut,
        unit=unit, origin=origin, units=units,
    )  # fmt: skip


@T.macro
def enter_part(arg, worker, job, index):
    """A part of a job: its tiles [lo, hi), its number among the job's `parts`, the job's counter and slots."""
    at = worker.at
    inside = at[INSIDE] > 0
    lo = T.alloc_var("int32", init=job.lo)
    hi = T.alloc_var("int32", init=job.hi)
    begin = T.alloc_var("int32", init=at[NUMBER])  # the worker that has the job's first part
    parts = T.alloc_var("int32", init=1)
    if inside:
        begin = at[FIRST]
        parts = at[PARTS]
    else:
        if job.cut:
            begin = at[FIRST_END]
            parts = at[PARTS_END]
    number = T.alloc_var("int32", init=at[NUMBER] - begin)
    counter = T.alloc_var("int32", init=begin)
    slots = T.alloc_var("int32", init=2 * begin)
    step = T.alloc_var("int32", init=2)
    if arg.rule != 0:
        number = T.truncdiv(job.lo - job.origin, job.unit) + index
        lo = T.max(job.origin + number * job.unit, job.first)
        hi = T.min(job.origin + (number + 1) * job.unit, job.end)
        parts = T.max(T.truncdiv(job.end - job.origin + job.unit - 1, job.unit), 1)
        counter = job.number
        if arg.jobs == 2 * arg.workers:  # see records.jobs
            counter = 2 * begin + T.if_then_else(inside | job.cut, 1, 0)
        slots = counter * arg.most_parts
        step = 1
    return SimpleNamespace(lo=lo, hi=hi, number=number, parts=parts, counter=counter, slots=slots, step=step)


def slot_of(part: Any, number: Any) -> Any:
    """The slot of one of a job's parts. Where work is dealt freely, a worker has two: 2w + 1 is for its last job."""
    return part.slots + number * part.step + T.if_then_else(number == 0, part.step - 1, 0)


def group_of(arg: Any, part: Any, number: Any) -> Any:
    """The number, among all groups, of a job's group number `number`: where work is dealt freely, its first part's."""
    first = T.max(number * GROUP - part.shift, 0)
    return T.if_then_else(arg.rule == 0, slot_of(part, first), part.counter * arg.most_groups + number)


@T.macro
def next_job(arg, worker):
    """Goes on to the worker's next job."""
    at = worker.at
    at[INSIDE] = 0
    at[JOB] += 1
    at[KV_HEAD] += 1
    if at[KV_HEAD] == arg.kv_heads:
        at[KV_HEAD] = 0
        at[Q_TILE] += 1
        if (
            at[Q_TILE]
            == arg.plan[arg.first_record + T.truncdiv(at[SEQUENCE], 2), T.truncmod(at[SEQUENCE], 2) * 4 + ITEMS]
        ):
            at[Q_TILE] = 0
            at[SEQUENCE] += 1
