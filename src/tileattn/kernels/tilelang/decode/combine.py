"""Partial results of a decode kernel: how they are stored, counted and merged.

A part's row in its slot is O before the division by the sum of its weights, then the base of its exponents in powers of
two, and that sum, all in float32 (records.STATE_COLUMNS). A part in which a row sees no key has the sum 0, and weighs
nothing. The part of a job that arrives last merges all of them, in their order.
"""

from __future__ import annotations

import math

import tilelang.language as T
from tvm import tirx

from ..tile.softmax import LN2, LOG2E
from .records import BASE, SUM, WIDTH
from .walk import slot_of

AT_ONCE = 8  # parts of which a thread has loads in flight


@T.macro
def store_part(f, arg, job, part, acc_o, base, l):
    """Stores the rows of a part that exist."""
    slot = T.alloc_var("int32", init=slot_of(part, part.number))
    columns = f.call.head_dim_v
    # O: [block_M, head_dim_v]
    for i, d in T.Parallel(*acc_o.shape):
        if (i < job.rows) & (d < columns):
            arg.parts[slot, i, d] = acc_o[i, d]
    for i in T.Parallel(acc_o.shape[0]):
        if i < job.rows:
            arg.parts[slot, i, columns + BASE] = base[i]
            arg.parts[slot, i, columns + SUM] = l[i]


@T.macro
def arrive(arg, part, flag, thread, sync):
    """Counts a part that has been stored; returns whether it was the job's last, which leaves the counter at 0.

    ``flag``: int32 (1,) in shared memory. ``thread``: counted from 0. ``sync()``: waits for all threads that take part.
    A job of one part has none to wait for, and no last.

    The barriers order the stores of all threads before the first thread's addition, and that before their loads; an
    addition that releases and acquires orders them between blocks. (__threadfence on each side of it takes longer, for
    it is sequentially consistent.)
    """
    sync()
    if thread == 0:
        last = T.alloc_var("int32", init=0)
        if part.parts > 1:
            row = arg.workers + 1 + T.truncdiv(part.counter, WIDTH)
            counter = arg.plan[row, T.truncmod(part.counter, WIDTH)]
            if T.atomic_add(counter, 1, memory_order="acq_rel", return_prev=True) == part.parts - 1:
                arg.plan[row, T.truncmod(part.counter, WIDTH)] = 0
                last = 1
        flag[0] = last
    sync()
    return flag[0]


@T.macro
def combine(f, arg, job, part, thread, threads):
    """Merges the parts of a job and writes o and lse. Each thread has four columns of a row at a time."""
    columns = f.call.head_dim_v
    quads = columns // 4
    base = T.alloc_local([AT_ONCE], "float32")
    total = T.alloc_local([AT_ONCE], "float32")
    values = T.alloc_local([AT_ONCE, 4], "float32")
    later = T.alloc_local([AT_ONCE], "float32")
    later_total = T.alloc_local([AT_ONCE], "float32")
    sums = T.alloc_local([4], "float32")
    turns = T.truncdiv(part.parts + (AT_ONCE - 1), AT_ONCE)
    for round in T.serial(T.truncdiv(job.rows * quads + (threads - 1), threads)):
        element = T.alloc_var("int32", init=round * threads + thread)
        if element < job.rows * quads:
            row = T.alloc_var("int32", init=T.truncdiv(element, quads))
            quad = T.alloc_var("int32", init=T.truncmod(element, quads))
            # All loads of the first AT_ONCE parts are in flight before any is waited for.
            _load_states(f, arg, part, row, 0, base, total)
            _load_values(arg, part, row, quad, 0, values)
            # B = max over parts with keys of base
            highest = T.alloc_var("float32", init=-T.infinity("float32"))
            for i in T.unroll(AT_ONCE):
                highest = T.max(highest, T.if_then_else(total[i] == 0.0, highest, base[i]))
            for turn in T.serial(turns - 1):
                _load_states(f, arg, part, row, (turn + 1) * AT_ONCE, later, later_total)
                for i in T.unroll(AT_ONCE):
                    highest = T.max(highest, T.if_then_else(later_total[i] == 0.0, highest, later[i]))
            # l = sum of exp2(base - B) l_i; O = sum of exp2(base - B) O_i
            l = T.alloc_var("float32", init=0.0)
            for j in T.unroll(4):
                sums[j] = 0.0
            for turn in T.serial(turns):
                if turn > 0:
                    _load_states(f, arg, part, row, turn * AT_ONCE, base, total)
                    _load_values(arg, part, row, quad, turn * AT_ONCE, values)
                for i in T.unroll(AT_ONCE):
                    if total[i] != 0.0:
                        base[i] = T.exp2(base[i] - highest)
                        l += base[i] * total[i]
                        for j in T.unroll(4):
                            sums[j] += base[i] * values[i, j]
            _write_row(f, arg, job, row, quad * 4, highest, l, sums)


@T.macro
def _load_states(f, arg, part, row, first, base, total):
    """The bases and sums of AT_ONCE parts; behind the last part sums of 0."""
    columns = f.call.head_dim_v
    for i in T.unroll(AT_ONCE):
        slot = slot_of(part, T.min(first + i, part.parts - 1))
        base[i] = arg.parts[slot, row, columns + BASE]
        total[i] = T.if_then_else(first + i < part.parts, arg.parts[slot, row, columns + SUM], 0.0)


@T.macro
def _load_values(arg, part, row, quad, first, values):
    """Four columns of O of AT_ONCE parts."""
    for i in T.unroll(AT_ONCE):
        slot = slot_of(part, T.min(first + i, part.parts - 1))
        for j in T.vectorized(4):
            values[i, j] = quads_of(arg.parts)[slot, row, quad, j]


@T.macro
def _write_row(f, arg, job, row, column, highest, l, sums):
    """Divides by the sum, after the sink has joined it, as softmax.add_sink and softmax.finish do."""
    query = T.alloc_var("int32", init=T.truncdiv(job.row0 + row, arg.group))
    head = T.alloc_var("int32", init=job.kv_head * arg.group + (job.row0 + row - query * arg.group))
    base = T.alloc_var("float32", init=T.if_then_else(l == 0.0, 0.0, highest))
    alpha = T.alloc_var("float32", init=1.0)
    if f.call.sink:
        m = T.alloc_var("float32", init=T.if_then_else(l == 0.0, -T.infinity("float32"), highest))
        sink = T.alloc_var("float32", init=sink_of(arg, job, head) * LOG2E)
        base = T.max(m, sink)
        base = T.if_then_else(T.abs(base) == T.infinity("float32"), 0.0, base)
        alpha = T.exp2(m - base)
        l = l * alpha + T.exp2(sink - base)
    alpha = T.if_then_else(l == 0.0, 0.0, alpha / l)
    alpha = T.if_then_else(l == T.infinity("float32"), T.log2(-l), alpha)  # NaN
    b, q = place_of_query(f, job, query)
    for j in T.vectorized(4):
        quads_of(arg.o)[b, q, head, T.truncdiv(column, 4), j] = T.cast(sums[j] * alpha, arg.o.dtype)
    if f.call.return_lse:
        if column == 0:
            arg.lse[b, head, q] = (T.log2(l) + base) * LN2


def quads_of(tensor):
    """A tensor with its last dimension in fours: TileLang's guards are then the same for all four."""
    *outer, columns = tensor.shape
    strides = list(tensor.strides) or [math.prod(tensor.shape[axis + 1 :]) for axis in range(len(outer))] + [1]
    return tirx.decl_buffer(
        [*outer, columns // 4, 4], tensor.dtype, tensor.name, tensor.data, [*strides[:-1], 4, 1]
    )  # fmt: skip


def sink_of(arg, job, head):
    """A head's sink; unused rows have none."""
    return T.if_then_else(job.used, arg.sink[head], -T.infinity("float32"))


def place_of_query(f, job, query):
    """The indices in q, o and lse of a sequence's query."""
    return (0, job.q_start + query) if f.call.packed else (job.sequence, query)
