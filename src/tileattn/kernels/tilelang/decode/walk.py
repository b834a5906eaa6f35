"""How a worker of a decode kernel walks over its jobs and their parts: it reads the plan (records.py).

    worker = begin_worker(arg, number)
    for _ in T.serial(worker.steps):
        job = enter_job(f, arg, worker)
        for u in T.serial(job.units):
            tiles = enter_part(f, arg, job, u)
            ...
            part = locate_part(arg, worker, job, u)
            ...
        next_job(arg, worker)

``arg`` are the kernel's parameters (signature.py), ``f`` its static facts: ``call``, ``traced``, ``block_M`` and
``block_N``. All threads that walk compute the same. Rule 0 is records.FREE.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import tilelang.language as T
from tvm import tirx

from .jobs import keys_of_queries
from .lines.entries import line_at, ranks_of
from .ranges import mask_differs_by_head
from .records import (
    FIRST,
    GROUP,
    ITEMS,
    JOB,
    KV_HEAD,
    OWN,
    PARTS,
    Q_LEN,
    Q_START,
    Q_TILE,
    RECORD,
    RECORDS,
    SEQLEN,
    SEQUENCE,
    TILE,
)  # fmt: skip

# Behind the worker's own record, and that of its sequence, the next worker's: where its work ends. Then its number, and
# INSIDE: whether it begins within its current job.
END = OWN + RECORD
JOB_END, TILE_END = END + JOB, END + TILE
NUMBER, INSIDE = range(END + OWN, END + OWN + 2)


@T.macro
def begin_worker(arg, number):
    """A worker's place in registers, and the number of its jobs."""
    at = T.alloc_local([INSIDE + 1], "int32")
    for quad in range(END // 4):
        for j in T.vectorized(4):
            at[quad * 4 + j] = quads_of(arg.plan)[number, quad, j]
    for quad in range(OWN // 4):
        for j in T.vectorized(4):
            at[END + quad * 4 + j] = quads_of(arg.plan)[number + 1, quad, j]
    at[NUMBER] = number
    at[INSIDE] = T.cast(at[TILE] > 0, "int32")
    steps = T.alloc_var("int32", init=at[JOB_END] - at[JOB] + T.cast(at[TILE_END] > 0, "int32"))
    # Never so; but the compiler then loads all fields together, and not some of them when it knows of the steps.
    if (at[TILE] < 0) | (at[OWN + SEQLEN] < 0):
        steps = 0
    per_group = T.alloc_var("float32", init=1.0 / T.cast(arg.group, "float32"))
    return SimpleNamespace(at=at, steps=steps, per_group=per_group)


@T.macro
def enter_job(f, arg, worker):
    """The worker's current job.

    number: of the job; sequence, kv_head. q_start: the sequence's first row of packed queries, else 0; q_len, seqlen:
    its numbers of queries and keys; q_pos: the position of its first query. row0: the job's first packed row; rows: how
    many it has, none or less for a job that is none (and has no units). kv_lo, kv_hi, first, end: the job's keys and
    their tiles (jobs.keys_of_queries); lo, hi: the tiles of this worker. units: how many parts it has of the job.
    """
    at = worker.at
    q_start, q_len, seqlen = (T.alloc_var("int32", init=at[OWN + field]) for field in (Q_START, Q_LEN, SEQLEN))
    row0 = T.alloc_var("int32", init=at[Q_TILE] * f.block_M)
    rows = T.alloc_var("int32", init=T.min(q_len * arg.group - row0, f.block_M))
    # The query of the tile's first row, and which row of that query it is. Decoding has one tile: nothing to divide.
    query0 = T.alloc_var("int32", init=0)
    if at[Q_TILE] > 0:
        query0 = T.truncdiv(row0, arg.group)
    place = SimpleNamespace(query0=query0, rest=row0 - query0 * arg.group, per_group=worker.per_group)
    # Unused rows have the last sequence's number, so that masks read elements that exist.
    sequence = T.alloc_var("int32", init=T.min(at[SEQUENCE], arg.batch - 1))
    used = at[SEQUENCE] < arg.batch
    keys = keys_of_queries(
        f.traced, arg.operands, f.block_N, sequence, seqlen - q_len + query0,
        seqlen - q_len + query_of(place, T.max(rows, 1) - 1), seqlen,
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
        unit=unit, origin=origin, units=units, **vars(place), **_line(f, arg, at),
    )  # fmt: skip


def _line(f: Any, arg: Any, at: Any) -> dict[str, Any]:
    """line: where the job's line is, where there are lines."""
    if not f.call.listed:
        return {}
    number = at[JOB] if mask_differs_by_head(f.traced) else T.truncdiv(at[JOB] - at[KV_HEAD], arg.kv_heads)
    return {"line": T.alloc_var("int32", init=line_at(arg, number))[0]}


def query_of(job: Any, row: Any) -> Any:
    """The sequence's query that is in a row of a job's tile.

    A division takes some 40 instructions, one after the other. Here the numbers are small, and floating point is exact:
    (row + 0.5) / group is at least 0.5 / group away from the next integer.
    """
    within = (T.cast(job.rest + row, "float32") + 0.5) * job.per_group
    return job.query0 + T.cast(within, "int32")


def head_of(arg: Any, job: Any, row: Any) -> Any:
    """The head that is in a row of a job's tile."""
    return job.kv_head * arg.group + job.rest + row - (query_of(job, row) - job.query0) * arg.group


def quads_of(tensor: Any) -> Any:
    """A tensor with its last dimension in fours: TileLang's guards are then the same for all four."""
    *outer, columns = tensor.shape
    strides = list(tensor.strides) or [math.prod(tensor.shape[axis + 1 :]) for axis in range(len(outer))] + [1]
    return tirx.decl_buffer(
        [*outer, columns // 4, 4], tensor.dtype, tensor.name, tensor.data, [*strides[:-1], 4, 1]
    )  # fmt: skip


@T.macro
def enter_part(f, arg, job, index):
    """A part of a job: its tiles [lo, hi), and (entries.ranks_of) which of them are visited where lines say so."""
    lo = T.alloc_var("int32", init=job.lo)
    hi = T.alloc_var("int32", init=job.hi)
    if arg.rule != 0:
        begin = T.alloc_var("int32", init=job.origin + (T.truncdiv(job.lo - job.origin, job.unit) + index) * job.unit)
        lo = T.max(begin, job.first)
        hi = T.min(begin + job.unit, job.end)
    return SimpleNamespace(lo=lo, hi=hi, **ranks_of(f, arg, job, lo, hi))


@T.macro
def locate_part(arg, worker, job, index):
    """A part's number among the job's `parts`, the job's counter and slots.

    To be called behind the loop over its tiles, which needs the registers.
    """
    at = worker.at
    begin = T.alloc_var("int32", init=at[NUMBER])  # the worker that has the job's first part
    parts = T.alloc_var("int32", init=1)
    if (at[INSIDE] > 0) | job.cut:
        row = T.alloc_var("int32", init=T.if_then_else(at[INSIDE] > 0, at[NUMBER], at[NUMBER] + 1))
        begin = arg.plan[row, FIRST]
        parts = arg.plan[row, PARTS]
    number = T.alloc_var("int32", init=at[NUMBER] - begin)
    counter = T.alloc_var("int32", init=begin)
    slots = T.alloc_var("int32", init=2 * begin)
    step = T.alloc_var("int32", init=2)
    if arg.rule != 0:
        number = T.truncdiv(job.lo - job.origin, job.unit) + index
        parts = T.max(T.truncdiv(job.end - job.origin + job.unit - 1, job.unit), 1)
        counter = job.number
        if arg.jobs == 2 * arg.workers:  # see records.jobs
            counter = 2 * begin + T.if_then_else((at[INSIDE] > 0) | job.cut, 1, 0)
        slots = counter * arg.most_parts
        step = 1
    return SimpleNamespace(number=number, parts=parts, counter=counter, slots=slots, step=step)


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
        if at[Q_TILE] == at[OWN + ITEMS]:
            at[Q_TILE] = 0
            at[SEQUENCE] += 1
            # Behind the last sequence there is one more record, and no job.
            record = T.alloc_var("int32", init=T.min(at[SEQUENCE], arg.batch))
            for j in T.vectorized(4):
                at[OWN + j] = quads_of(arg.plan)[
                    arg.first_record + T.truncdiv(record, RECORDS), T.truncmod(record, RECORDS), j
                ]  # fmt: skip
