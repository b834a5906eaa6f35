"""Partial results of a decode kernel: how they are stored, counted and merged.

A part's row in its slot is O before the division by the sum of its weights, then the base of its exponents in powers of
two, and that sum, all in float32 (records.STATE_COLUMNS). A part in which a row sees no key has the sum 0, and weighs
nothing. The part of a job that arrives last merges all of them, in their order; of many parts, the last of each group
first merges the group (records.FLAT).
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import tilelang.language as T
from tvm import tirx

from ..tile.softmax import LN2, LOG2E
from .records import BASE, FLAT, GROUP, SUM, WIDTH
from .walk import group_of, slot_of

# A thread's sums: four columns of O, the base of their exponents, and the sum of weights.
HIGHEST, WEIGHT, SUMS = 4, 5, 6


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
def merge_parts(f, arg, job, part, flag, thread, threads, sync):
    """Counts a part that has been stored; if it is the last, merges the parts and writes o and lse.

    ``flag``: int32 (1,) in shared memory; None: the barrier of all threads of a block tells them. ``thread``: counted
    from 0, of `threads`. ``sync()``: waits for all threads that take part.
    """
    # How many parts the job's first group lacks: with a rule of absolute keys groups are absolute too.
    shift = T.alloc_var("int32", init=0)
    if arg.rule > 0:
        shift = T.truncmod(T.truncdiv(job.origin, arg.rule), GROUP)
    part = SimpleNamespace(**vars(part), shift=shift)
    if part.parts <= FLAT:
        last = arrive(arg, part.counter, part.parts, flag, thread, sync)
        if last == 1:
            _merge(f, arg, job, part, thread, threads, "parts")
    else:
        group = T.alloc_var("int32", init=T.truncdiv(part.number + part.shift, GROUP))
        begin = T.alloc_var("int32", init=T.max(group * GROUP - part.shift, 0))
        end = T.min((group + 1) * GROUP - part.shift, part.parts)
        counter = T.alloc_var("int32", init=arg.jobs + group_of(arg, part, group))
        last_of_group = arrive(arg, counter, end - begin, flag, thread, sync)
        if last_of_group == 1:
            _merge_group(f, arg, job, part, thread, threads, group)
            last = arrive(arg, part.counter, groups_of(part), flag, thread, sync)
            if last == 1:
                _merge(f, arg, job, part, thread, threads, "groups")


def groups_of(part):
    """The number of a job's groups."""
    return T.truncdiv(part.parts + part.shift + (GROUP - 1), GROUP)


@T.macro
def arrive(arg, counter, expected, flag, thread, sync):
    """Counts what has been stored; returns whether it was the last of `expected`, which leaves the counter at 0.

    The barriers order the stores of all threads before the first thread's addition, and that before their loads; an
    addition that releases and acquires orders them between blocks. (__threadfence on each side of it takes longer, for
    it is sequentially consistent.)
    """
    sync()
    last = T.alloc_var("int32", init=0)
    if thread == 0:
        row = arg.workers + 1 + T.truncdiv(counter, WIDTH)
        place = arg.plan[row, T.truncmod(counter, WIDTH)]
        if T.atomic_add(place, 1, memory_order="acq_rel", return_prev=True) == expected - 1:
            arg.plan[row, T.truncmod(counter, WIDTH)] = 0
            last = 1
    if flag is None:
        last = T.syncthreads_or(last)
    else:
        if thread == 0:
            flag[0] = last
        sync()
        last = flag[0]
    return last


@T.macro
def _merge(f, arg, job, part, thread, threads, what):
    """Merges the groups of a job, from their parts or from their sums (`what`), and writes o and lse.

    Each thread has four columns of a row at a time.
    """
    quads = f.call.head_dim_v // 4
    w = _alloc()
    groups = T.alloc_var("int32", init=groups_of(part))
    for round in T.serial(T.truncdiv(job.rows * quads + (threads - 1), threads)):
        element = T.alloc_var("int32", init=round * threads + thread)
        if element < job.rows * quads:
            row = T.alloc_var("int32", init=T.truncdiv(element, quads))
            quad = T.alloc_var("int32", init=T.truncmod(element, quads))
            for j in T.unroll(SUMS):
                w.state[j] = 0.0
            w.state[HIGHEST] = -T.infinity("float32")
            if what == "parts":
                for group in T.serial(groups):
                    _sum_group(f, arg, part, w, row, quad, group)
                    _join(w, w.group[HIGHEST], w.group[WEIGHT], w.group)
            else:
                for turn in T.serial(T.truncdiv(groups + (GROUP - 1), GROUP)):
                    for i in T.unroll(GROUP):
                        number = T.min(turn * GROUP + i, groups - 1)
                        slot = arg.jobs * arg.most_parts + group_of(arg, part, number)
                        _load(f, arg, w, slot, row, quad, i, turn * GROUP + i < groups)
                    for i in T.unroll(GROUP):
                        for j in T.unroll(4):
                            w.group[j] = w.values[i, j]
                        _join(w, w.base[i], w.total[i], w.group)
            _write_row(f, arg, job, row, quad * 4, w.state[HIGHEST], w.state[WEIGHT], w.state)


@T.macro
def _merge_group(f, arg, job, part, thread, threads, group):
    """Merges the parts of a group, and stores its sums as those of a part."""
    columns = f.call.head_dim_v
    quads = columns // 4
    w = _alloc()
    slot = T.alloc_var("int32", init=arg.jobs * arg.most_parts + group_of(arg, part, group))
    for round in T.serial(T.truncdiv(job.rows * quads + (threads - 1), threads)):
        element = T.alloc_var("int32", init=round * threads + thread)
        if element < job.rows * quads:
            row = T.alloc_var("int32", init=T.truncdiv(element, quads))
            quad = T.alloc_var("int32", init=T.truncmod(element, quads))
            _sum_group(f, arg, part, w, row, quad, group)
            for j in T.vectorized(4):
                quads_of(arg.parts)[slot, row, quad, j] = w.group[j]
            if quad == 0:
                arg.parts[slot, row, columns + BASE] = w.group[HIGHEST]
                arg.parts[slot, row, columns + SUM] = w.group[WEIGHT]


@T.macro
def _alloc():
    """A thread's registers: states and values of GROUP parts, and the sums of a group and of all groups so far."""
    base = T.alloc_local([GROUP], "float32")
    total = T.alloc_local([GROUP], "float32")
    values = T.alloc_local([GROUP, 4], "float32")
    group = T.alloc_local([SUMS], "float32")
    state = T.alloc_local([SUMS], "float32")
    return SimpleNamespace(base=base, total=total, values=values, group=group, state=state)


@T.macro
def _load(f, arg, w, slot, row, quad, i, within):
    """The i-th state and four columns of O; with a sum of 0 where it is none."""
    columns = f.call.head_dim_v
    w.base[i] = arg.parts[slot, row, columns + BASE]
    w.total[i] = T.if_then_else(within, arg.parts[slot, row, columns + SUM], 0.0)
    for j in T.vectorized(4):
        w.values[i, j] = quads_of(arg.parts)[slot, row, quad, j]


@T.macro
def _sum_group(f, arg, part, w, row, quad, group):
    """The sums of a group's parts: B = max base, l = sum of exp2(base - B) l_i, O = sum of exp2(base - B) O_i.

    All loads are in flight before any is waited for.
    """
    for i in T.unroll(GROUP):
        number = group * GROUP + i - part.shift
        near = T.max(T.min(number, part.parts - 1), 0)
        _load(f, arg, w, slot_of(part, near), row, quad, i, (number >= 0) & (number < part.parts))
    for j in T.unroll(SUMS):
        w.group[j] = 0.0
    w.group[HIGHEST] = -T.infinity("float32")
    for i in T.unroll(GROUP):
        w.group[HIGHEST] = T.max(w.group[HIGHEST], T.if_then_else(w.total[i] == 0.0, w.group[HIGHEST], w.base[i]))
    for i in T.unroll(GROUP):
        if w.total[i] != 0.0:
            w.base[i] = T.exp2(w.base[i] - w.group[HIGHEST])
            w.group[WEIGHT] += w.base[i] * w.total[i]
            for j in T.unroll(4):
                w.group[j] += w.base[i] * w.values[i, j]


@T.macro
def _join(w, base, total, sums):
    """Adds a group to the groups so far. One without keys changes nothing."""
    if total != 0.0:
        highest = T.alloc_var("float32", init=T.max(w.state[HIGHEST], base))
        # No keys so far: the base is -inf, and the factor 0.
        alpha = T.alloc_var("float32", init=T.exp2(w.state[HIGHEST] - highest))
        weight = T.alloc_var("float32", init=T.exp2(base - highest))
        w.state[HIGHEST] = highest
        w.state[WEIGHT] = w.state[WEIGHT] * alpha + weight * total
        for j in T.unroll(4):
            w.state[j] = w.state[j] * alpha + weight * sums[j]


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
