"""Partial results of a decode kernel: how they are stored, counted and merged.

A part's row in its slot is O before the division by the sum of its weights, then the base of its exponents in powers of
two, and that sum, all in float32 (records.STATE_COLUMNS). A part in which a row sees no key has the sum 0, and weighs
nothing. The part of a job that arrives last merges all of them, in their order; of many parts, the last of each group
first merges the group (records.FLAT).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import tilelang.language as T
from tvm import tirx

from ..tile.softmax import LN2, LOG2E
from .records import BASE, FLAT, GROUP, STATE_COLUMNS, SUM, WIDTH
from .walk import group_of, quads_of, query_of, slot_of

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
    """Merges the groups of a job, from their parts or from their sums (`what`), and writes o and lse."""
    w = _alloc()
    groups = T.alloc_var("int32", init=groups_of(part))
    for round in T.serial(rounds(f, job, threads)):
        at = _place(f, job, round, thread, threads)
        for j in T.unroll(SUMS):
            w.state[j] = 0.0
        w.state[HIGHEST] = -T.infinity("float32")
        if what == "parts":
            for group in T.serial(groups):
                _sum_group(f, arg, part, w, at, group)
                _join(w, w.group[HIGHEST], w.group[WEIGHT], w.group)
        else:
            for turn in T.serial(T.truncdiv(groups + (GROUP - 1), GROUP)):
                _load(f, arg, w, at, _run_of_groups(arg, part, turn))
                for i in T.unroll(GROUP):
                    base = T.alloc_var("float32", init=T.shfl_sync(w.own[BASE], i, lanes(f)))
                    total = T.alloc_var("float32", init=T.shfl_sync(w.own[SUM], i, lanes(f)))
                    for j in T.unroll(4):
                        w.group[j] = w.values[i, j]
                    _join(w, base, total, w.group)
        if at.exists:
            _write_row(f, arg, job, at.row, at.quad * 4, w.state[HIGHEST], w.state[WEIGHT], w.state)


@T.macro
def _merge_group(f, arg, job, part, thread, threads, group):
    """Merges the parts of a group, and stores its sums as those of a part."""
    columns = f.call.head_dim_v
    w = _alloc()
    run = _run_of_groups(arg, part, 0)
    slot = T.alloc_var("int32", init=run.slot + group * run.step + T.if_then_else(group == 0, run.extra, 0))
    for round in T.serial(rounds(f, job, threads)):
        at = _place(f, job, round, thread, threads)
        _sum_group(f, arg, part, w, at, group)
        if at.exists:
            for j in T.vectorized(4):
                quads_of(arg.parts)[slot, at.row, at.quad, j] = w.group[j]
            if at.quad == 0:
                arg.parts[slot, at.row, columns + BASE] = w.group[HIGHEST]
                arg.parts[slot, at.row, columns + SUM] = w.group[WEIGHT]


def lanes(f: Any) -> int:
    """How many threads merge a row together, four columns each: a warp, or half of one where that suffices."""
    return 16 if f.call.head_dim_v <= 64 else 32


def panels(f: Any) -> int:
    """How often they do, for all of a row's columns."""
    return -(-f.call.head_dim_v // (4 * lanes(f)))


def quads_of_row(f: Any) -> int:
    """Of a partial result: four columns of O each, then its state."""
    return (f.call.head_dim_v + STATE_COLUMNS) // 4


def rounds(f: Any, job: Any, threads: int) -> Any:
    """How often `threads` do, for all of a job's rows."""
    at_once = threads // lanes(f)
    return T.truncdiv(job.rows * panels(f) + (at_once - 1), at_once)


@T.macro
def _place(f, job, round, thread, threads):
    """A thread's row and its four columns. Threads beyond the last row or column repeat it, and write nothing."""
    count = f.call.head_dim_v // 4
    lane = T.alloc_var("int32", init=T.truncmod(thread, lanes(f)))
    element = T.alloc_var("int32", init=round * (threads // lanes(f)) + T.truncdiv(thread, lanes(f)))
    row = T.alloc_var("int32", init=T.truncdiv(element, panels(f)))
    quad = T.alloc_var("int32", init=T.truncmod(element, panels(f)) * lanes(f) + lane)
    exists = T.alloc_var("bool", init=(row < job.rows) & (quad < count))
    row = T.min(row, job.rows - 1)
    quad = T.min(quad, count - 1)
    return SimpleNamespace(lane=lane, row=row, quad=quad, exists=exists)


@T.macro
def _alloc():
    """A thread's registers: one part's state, the values of GROUP, and the sums of a group and of all groups so far."""
    own = T.alloc_local([2], "float32")
    values = T.alloc_local([GROUP, 4], "float32")
    group = T.alloc_local([SUMS], "float32")
    state = T.alloc_local([SUMS], "float32")
    return SimpleNamespace(own=own, values=values, group=group, state=state)


def _run_of_parts(part: Any, group: Any) -> SimpleNamespace:
    """Where the parts of a group lie: number i, of those from low to high, in ``slot + i * step``.

    The slot of the job's first part is `extra` behind that (walk.slot_of).
    """
    first = group * GROUP - part.shift
    return SimpleNamespace(
        slot=part.slots + first * part.step,
        step=part.step,
        extra=part.step - 1,
        low=T.max(-first, 0),
        high=T.min(part.parts - first, GROUP),
        starts=first <= 0,
    )


def _run_of_groups(arg: Any, part: Any, turn: Any) -> SimpleNamespace:
    """The same of GROUP groups (walk.group_of): with free dealing a group's slot has the number of its first part."""
    free = arg.rule == 0
    step = T.if_then_else(free, GROUP * part.step, 1)
    slot = T.if_then_else(free, part.slots, part.counter * arg.most_groups)
    return SimpleNamespace(
        slot=arg.jobs * arg.most_parts + slot + turn * GROUP * step,
        step=step,
        extra=T.if_then_else(free, part.step - 1, 0),
        low=0,
        high=T.min(groups_of(part) - turn * GROUP, GROUP),
        starts=turn == 0,
    )


@T.macro
def _load(f, arg, w, at, run):
    """Loads four columns of O of up to GROUP partial results, all in flight together; each lane the state of one.

    What there is none of has the sum 0.
    """
    low = T.alloc_var("int32", init=run.low)
    last = T.alloc_var("int32", init=run.high - 1)
    # In quads: a slot, from one result to the next, and what the first one lies behind.
    size = T.alloc_var("int32", init=arg.parts.shape[1] * quads_of_row(f))
    step = T.alloc_var("int32", init=size * run.step)
    extra = T.alloc_var("int32", init=T.if_then_else(run.starts, size * run.extra, 0))
    first = T.alloc_var("int64", init=T.cast(run.slot, "int64") * T.cast(size, "int64") + at.row * quads_of_row(f))
    # Of the nearest where there is none: what a condition guards is loaded later, one after the other.
    for i in T.unroll(GROUP):
        place = first + T.cast(step, "int64") * T.max(T.min(i, last), low) + at.quad
        for j in T.vectorized(4):
            w.values[i, j] = _flat(arg.parts, 4)[place + extra if i == 0 else place, j]
    number = T.alloc_var("int32", init=T.truncmod(at.lane, GROUP))
    near = first + T.cast(step, "int64") * T.max(T.min(number, last), low) + T.if_then_else(number == 0, extra, 0)
    for j in T.vectorized(2):
        w.own[j] = _flat(arg.parts, 2)[(near + quads_of_row(f) - 1) * 2, j]
    w.own[SUM] = T.Select((number >= low) & (number <= last), w.own[SUM], 0.0)


@T.macro
def _sum_group(f, arg, part, w, at, group):
    """The sums of a group's parts: B = max base, l = sum of exp2(base - B) l_i, O = sum of exp2(base - B) O_i.

    A part without keys is left out, for its O may be anything. Selected away, not branched around: behind a branch the
    compiler would load it there, one load after the other.
    """
    _load(f, arg, w, at, _run_of_parts(part, group))
    base = T.alloc_var("float32", init=T.Select(w.own[SUM] == 0.0, -T.infinity("float32"), w.own[BASE]))
    highest = T.alloc_var("float32", init=base)
    for step in T.unroll(GROUP.bit_length() - 1):
        highest = T.max(highest, T.shfl_xor(highest, GROUP >> (step + 1), lanes(f)))
    weight = T.alloc_var("float32", init=weight_of(w.own[SUM], base, highest))
    total = T.alloc_var("float32", init=T.Select(w.own[SUM] == 0.0, 0.0, weight * w.own[SUM]))
    weight = T.Select(w.own[SUM] == 0.0, -1.0, weight)
    for step in T.unroll(GROUP.bit_length() - 1):
        total += T.shfl_xor(total, GROUP >> (step + 1), lanes(f))
    for j in T.unroll(4):
        w.group[j] = 0.0
    w.group[HIGHEST] = highest
    w.group[WEIGHT] = total
    for i in T.unroll(GROUP):
        of_part = T.alloc_var("float32", init=T.shfl_sync(weight, i, lanes(f)))
        for j in T.unroll(4):
            w.group[j] = T.Select(of_part >= 0.0, w.group[j] + of_part * w.values[i, j], w.group[j])


def weight_of(total: Any, base: Any, highest: Any) -> Any:
    """The weight of sums whose exponents have this base. Where a score is inf, so is the sum, whatever others are."""
    return T.Select(total == T.infinity("float32"), T.float32(1), T.exp2(base - highest))


@T.macro
def _join(w, base, total, sums):
    """Adds a group to the groups so far. One without keys changes nothing."""
    some = T.alloc_var("bool", init=total != 0.0)
    highest = T.alloc_var("float32", init=T.max(w.state[HIGHEST], base))
    # No keys so far: the base is -inf, and the factor 0.
    alpha = T.alloc_var("float32", init=weight_of(w.state[WEIGHT], w.state[HIGHEST], highest))
    weight = T.alloc_var("float32", init=weight_of(total, base, highest))
    w.state[HIGHEST] = T.Select(some, highest, w.state[HIGHEST])
    w.state[WEIGHT] = T.Select(some, w.state[WEIGHT] * alpha + weight * total, w.state[WEIGHT])
    for j in T.unroll(4):
        w.state[j] = T.Select(some, w.state[j] * alpha + weight * sums[j], w.state[j])


@T.macro
def _write_row(f, arg, job, row, column, highest, l, sums):
    """Divides by the sum, after the sink has joined it, as softmax.add_sink and softmax.finish do."""
    query = T.alloc_var("int32", init=query_of(job, row))
    head = T.alloc_var("int32", init=job.kv_head * arg.group + job.rest + row - (query - job.query0) * arg.group)
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


def _flat(tensor: Any, columns: int) -> Any:
    """A contiguous tensor in rows of a few elements."""
    return tirx.decl_buffer(
        [T.int64(1 << 40), columns], tensor.dtype, tensor.name, tensor.data, [columns, 1]
    )  # fmt: skip


def sink_of(arg, job, head):
    """A head's sink; unused rows have none."""
    return T.if_then_else(job.used, arg.sink[head], -T.infinity("float32"))


def place_of_query(f, job, query):
    """The indices in q, o and lse of a sequence's query."""
    return (0, job.q_start + query) if f.call.packed else (job.sequence, query)
