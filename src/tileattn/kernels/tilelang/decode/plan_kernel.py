"""The planning kernel of a decode call: deals its work to the blocks of the attention kernel (records.py).

One block. The cost of a job is the number of its tiles of keys, at least one, and OVERHEAD for beginning and ending
it. Where the costs could sum up to more than an integer holds, they count runs of ``2**coarse`` tiles. All are summed
in the order of the jobs, and each worker gets an equal share (shares.py), as FlashMLA (DeepSeek) deals decoding work.
So all workers end at about the same time, and each has at most two parts of jobs that it shares with others. A worker
may begin at any tile; with a rule of parts, at the next part.

Items, at most THREADS at a time, are one per thread. Each warp sums their costs by shuffles; each worker then finds the
warp and the item that it begins in. If there are more, a first pass computes the total.

Where a mask may hide tiles between others (lines/visits.py), the cost of a job is the number of tiles that its line
lists. If heads have lines of their own, an item's jobs cost differently, and each is dealt by itself: what is called an
item below is then a job.

The attention kernel may start at once, and waits for this one's end.

`seqlens_k` and `cu_seqlens_q` are checked here, and only the sequence records have them afterwards: lengths are clamped
to the cache; wrong cumulative lengths make all rows of q unused ones. A status says what is wrong (cache_status.py).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import tilelang.language as T
from tilelang.language.eager.builder import Builder

from ....call import cache_fields as fields
from ....variant.program import Program
from ..build.compile import OWN_BARRIERS, OWN_BOUNDS
from ..packed.dependent_launch import let_next_start, wait_for_previous
from ..tile.parameters import operand
from .jobs import keys_of_rows
from .lines.entries import LISTED, tile_of_rank, visited_by
from .ranges import mask_differs_by_head, names_in_range, numbers_in_range
from .records import (
    JOB,
    OWN,
    RECORD,
    RECORDS,
    TILE,
    WIDTH,
)
from .shares import OVERHEAD, place_of, quotient, shares, worker_of

THREADS, WARP = 512, 32
WARPS = THREADS // WARP
DEALING = 384  # threads that find where workers begin, while the others write all else
OTHERS = THREADS - DEALING
# What the workers read of an item, in shared memory: where its costs begin within its warp's, the sequence, the tile of
# query rows, and the first and the number of its tiles of keys; with lines, how many of these are visited.
START, ITS_B, ITS_Q_TILE, ITS_FIRST, ITS_TILES, ITS_VISITED = range(6)

SIZES = (
    "q_len", "total_q", "group", "kv_heads", "capacity", "block_M", "block_N", "workers", "rule", "items",
    "counter_rows", "least", "jobs", "few", "few_tiles", "coarse",
)  # fmt: skip


def plan_kernel(arch: str, packed: bool, traced: Program, listed: bool = False) -> Any:
    """The TileLang function ``plan(seqlens_k, [cu_seqlens_q], plan, status, *tensors, *SIZES, *ints, *floats)``

    ``q_len`` is the longest of packed sequences. Of the variant's operands it takes those that the range of a job's
    keys is computed from.

    With `listed`, LISTED follow the SIZES, and the plan has its lines already (lines/entries.py).
    """
    builder = Builder()
    with builder.prim_func("plan"):
        batch = T.dynamic("batch")
        seqlens_k = builder.prim_func_arg("seqlens_k", T.Tensor([batch], "int32"))
        bounds = builder.prim_func_arg("cu_seqlens_q", T.Tensor([batch + 1], "int32")) if packed else None
        plan = builder.prim_func_arg("plan", T.Tensor([T.dynamic("rows"), WIDTH], "int32"))
        status = builder.prim_func_arg("status", T.Tensor([fields.FIELDS], "int32"))
        names = names_in_range(traced)
        operands = {t.name: builder.prim_func_arg(t.name, operand(t)) for t in traced.tensors if t.name in names}
        sizes = {name: builder.prim_func_arg(name, T.int32()) for name in (*SIZES, *(LISTED if listed else ()))}
        for name, kind in numbers_in_range(traced):
            operands[name] = builder.prim_func_arg(name, T.int32() if kind == "int" else T.float32())
        by_job = listed and mask_differs_by_head(traced)
        _kernel(
            SimpleNamespace(
                arch=arch, traced=traced, batch=batch, seqlens_k=seqlens_k, bounds=bounds, plan=plan, status=status,
                operands=operands, listed=listed, by_job=by_job,
                dealt=sizes["items"] * sizes["kv_heads"] if by_job else sizes["items"], **sizes,
            )
        )  # fmt: skip
    # All barriers are in place, and no element outside of a tensor is accessed.
    return builder.get().with_attr(OWN_BARRIERS, True).with_attr(OWN_BOUNDS, True)


@T.macro
def _kernel(arg):
    with T.Kernel(1, threads=THREADS):
        let_next_start(arg.arch)
        wait_for_previous(arg.arch)
        thread = T.get_thread_binding()
        sums = T.alloc_shared([WARPS], "int32")
        items = T.alloc_shared([ITS_VISITED + arg.listed, THREADS], "int32")
        q_tiles = T.alloc_var("int32", init=T.truncdiv(arg.q_len * arg.group + (arg.block_M - 1), arg.block_M))
        wrong = T.alloc_var("int32", init=0)
        if arg.bounds is not None:
            for step in T.serial(T.truncdiv(arg.batch + (THREADS - 1), THREADS)):
                b = step * THREADS + thread
                if b < arg.batch:
                    wrong = T.max(wrong, _check_queries(arg, b))
            wrong = T.syncthreads_or(wrong)
        warps = T.alloc_var("int32", init=T.min(T.truncdiv(arg.dealt + (WARP - 1), WARP), WARPS))  # that have items
        w = SimpleNamespace(thread=thread, sums=sums, items=items, q_tiles=q_tiles, wrong=wrong, warps=warps)
        chunks = T.alloc_var("int32", init=T.truncdiv(arg.dealt + (THREADS - 1), THREADS))
        total = T.alloc_var("int32", init=0)
        if chunks > 1:
            for chunk in T.serial(chunks):
                total += _cost(arg, w, chunk * THREADS + thread)
            _sum_warp(w, total)
            T.sync_threads()
            total = _sum_of_warps(w)
            T.sync_threads()
        before = T.alloc_var("int32", init=0)
        for chunk in T.serial(chunks):
            cost = _cost(arg, w, chunk * THREADS + thread)
            items[START, thread] = _sum_warp(w, cost)
            T.sync_threads()
            of_chunk = _sum_of_warps(w)
            if chunks == 1:
                total = of_chunk
            if thread < DEALING:
                _deal(arg, w, total, before, of_chunk, chunk, chunk == chunks - 1)
            else:
                if chunk == 0:
                    _write_sequences(arg, w)
            before += of_chunk
            if chunks > 1:
                T.sync_threads()


@T.macro
def _check_queries(arg, b):
    """Reports wrong cumulative lengths and sequences that are too long, and returns 1."""
    wrong = T.alloc_var("int32", init=0)
    start, end = arg.bounds[b], arg.bounds[b + 1]
    if ((b == 0) & (start != 0)) | (end < start) | ((b == arg.batch - 1) & (end > arg.total_q)):
        arg.status[fields.CU_SEQLENS_Q] = b + 1
        wrong = 1
    else:
        if end - start > arg.q_len:
            arg.status[fields.MAX_SEQLEN_Q] = b + 1
            wrong = 1
    return wrong


@T.macro
def _write_sequences(arg, w):
    """Writes the sequence records; the last one is that of the unused rows of packed queries. Clears the counters."""
    for step in T.serial(T.truncdiv(arg.batch + OTHERS, OTHERS)):
        b = step * OTHERS + (w.thread - DEALING)
        if b <= arg.batch:
            row = arg.workers + 1 + arg.counter_rows + T.truncdiv(b, RECORDS)
            _write_record(arg, w, row, T.truncmod(b, RECORDS) * RECORD, b)
            if b < arg.batch:
                if (arg.seqlens_k[b] < 0) | (arg.seqlens_k[b] > arg.capacity):
                    arg.status[fields.SEQLENS_K] = b + 1
    for step in T.serial(T.truncdiv(arg.counter_rows * (WIDTH // 4) + (OTHERS - 1), OTHERS)):
        number = step * OTHERS + (w.thread - DEALING)
        if number < arg.counter_rows * (WIDTH // 4):
            row = arg.workers + 1 + T.truncdiv(number, WIDTH // 4)
            _write(arg, row, T.truncmod(number, WIDTH // 4) * 4, [0, 0, 0, 0])


@T.macro
def _write_record(arg, w, row, column, b):
    _write(arg, row, column, [_q_start(arg, w, b), _q_len(arg, w, b), _seqlen(arg, b), _items(arg, w, b)])


@T.macro
def _write(arg, row, column, four):
    """Writes four numbers at once."""
    values = T.alloc_local([4], "int32")
    for i, value in enumerate(four):
        values[i] = value
    for i in T.vectorized(4):
        arg.plan[row, column + i] = values[i]


@T.macro
def _bound(arg, w, b):
    """Packed queries: the row at which sequence b begins; b may be batch + 1. If lengths are wrong, no row has one."""
    bound = T.alloc_var("int32", init=0)
    if b > arg.batch:
        bound = arg.total_q
    else:
        if w.wrong == 0:
            bound = arg.bounds[b]
    return bound


def _q_start(arg: Any, w: Any, b: Any) -> Any:
    return 0 if arg.bounds is None else _bound(arg, w, b)


def _q_len(arg: Any, w: Any, b: Any) -> Any:
    if arg.bounds is None:
        return T.if_then_else(b < arg.batch, arg.q_len, 0)
    return _bound(arg, w, b + 1) - _bound(arg, w, b)


def _seqlen(arg: Any, b: Any) -> Any:
    """The keys of sequence b, within the cache; unused rows have none."""
    return T.if_then_else(
        b < arg.batch, T.max(T.min(arg.seqlens_k[T.min(b, arg.batch - 1)], arg.capacity), 0), 0
    )  # fmt: skip


def _first_item(arg: Any, w: Any, b: Any) -> Any:
    """Packed queries: the number of the first item of sequence b; see records.packed_items."""
    return T.truncdiv(_bound(arg, w, b) * arg.group, arg.block_M) + b


def _items(arg: Any, w: Any, b: Any) -> Any:
    if arg.bounds is None:
        return T.if_then_else(b < arg.batch, w.q_tiles, 0)
    return _first_item(arg, w, b + 1) - _first_item(arg, w, b)


@T.macro
def _item(arg, w, item):
    """The sequence b and the tile of an item, and its tiles of keys; rows: how many it has, 0 for one that is none.

    visited: how many of its tiles are visited.
    """
    b = T.alloc_var("int32", init=0)
    q_tile = T.alloc_var("int32", init=0)
    if arg.bounds is None:
        b = quotient(_number(arg, item), w.q_tiles)
        q_tile = _number(arg, item) - b * w.q_tiles
    else:
        # The last sequence whose first item is not behind this one.
        high = T.alloc_var("int32", init=arg.batch)
        while b < high:
            middle = T.alloc_var("int32", init=T.truncdiv(b + high + 1, 2))
            if _first_item(arg, w, middle) <= _number(arg, item):
                b = middle
            else:
                high = middle - 1
        q_tile = _number(arg, item) - _first_item(arg, w, b)
    q_len = T.alloc_var("int32", init=_q_len(arg, w, b))
    seqlen = T.alloc_var("int32", init=_seqlen(arg, b))
    rows = T.alloc_var("int32", init=T.min(q_len * arg.group - q_tile * arg.block_M, arg.block_M))
    keys = keys_of_rows(
        arg.traced, arg.operands, arg.block_N, T.min(b, arg.batch - 1), q_tile * arg.block_M, T.max(rows, 1),
        arg.group, q_len, seqlen,
    )  # fmt: skip
    tiles = T.alloc_var("int32", init=T.max(keys.end - keys.first, 1))
    return SimpleNamespace(
        b=b, q_tile=q_tile, rows=rows, first=keys.first, tiles=tiles, visited=visited_by(arg, item, keys, tiles)
    )  # fmt: skip


def _number(arg: Any, item: Any) -> Any:
    """The number of an item where each of its jobs counts as one."""
    return T.truncdiv(item, arg.kv_heads) if arg.by_job else item


@T.macro
def _cost(arg, w, item):
    """The cost of an item's jobs, 0 for a number that is none. What workers read of it goes to shared memory."""
    cost = T.alloc_var("int32", init=0)
    if item < arg.dealt:
        it = _item(arg, w, item)
        if it.rows > 0:
            cost = (1 if arg.by_job else arg.kv_heads) * (_runs(arg, it.visited) + OVERHEAD)
        facts = [(ITS_B, it.b), (ITS_Q_TILE, it.q_tile), (ITS_FIRST, it.first), (ITS_TILES, it.tiles)]
        for field, value in [*facts, *[(ITS_VISITED, it.visited)] * arg.listed]:
            w.items[field, w.thread] = value
    return cost


def _runs(arg: Any, tiles: Any) -> Any:
    """How many runs of 2**coarse tiles there are."""
    return (tiles + ((1 << arg.coarse) - 1)) >> arg.coarse


@T.macro
def _sum_warp(w, value):
    """The sum of the values of the threads of the warp before this one. That of the warp goes to shared memory."""
    lane = w.thread % WARP
    inclusive = T.alloc_var("int32", init=value)
    for step in T.unroll(5):
        other = T.alloc_var("int32", init=T.shfl_up(inclusive, 1 << step))
        if lane >= (1 << step):
            inclusive += other
    if lane == WARP - 1:
        w.sums[w.thread // WARP] = inclusive
    return inclusive - value


@T.macro
def _sum_of_warps(w):
    total = T.alloc_var("int32", init=0)
    for warp in T.serial(w.warps):
        total += w.sums[warp]
    return total


@T.macro
def _deal(arg, w, total, before, of_chunk, chunk, is_last):
    """Writes where those workers begin whose shares begin in this chunk of items."""
    deal = shares(arg, total)
    for turn in T.serial(T.truncdiv(arg.workers + DEALING, DEALING)):
        worker = turn * DEALING + w.thread
        if worker < deal.active:
            place = T.alloc_var("int32", init=place_of(deal, worker))
            if (before <= place) & (place < before + of_chunk):
                _begin(arg, w, deal, worker, place, before, chunk)
        else:
            if (worker <= arg.workers) & is_last:
                _write(arg, worker, JOB, [arg.items * arg.kv_heads, arg.batch, 0, 0])
                _write(arg, worker, TILE, [0, 0, 0, 0])


@T.macro
def _begin(arg, w, deal, worker, place, before, chunk):
    """Writes where a worker begins, whose share of the costs begins at `place`, in this chunk of items."""
    # The last warp, and the last of its items, that do not begin behind the place: what costs nothing comes before it.
    low = T.alloc_var("int32", init=0)
    begin = T.alloc_var("int32", init=before)
    next_warp = T.alloc_var("int32", init=before)
    for warp in T.serial(w.warps):
        if next_warp <= place:
            low = warp * WARP
            begin = next_warp
        next_warp += w.sums[warp]
    for step in T.unroll(5):
        if w.items[START, low + (WARP >> (step + 1))] <= place - begin:
            low += WARP >> (step + 1)
    begin += w.items[START, low]
    b, q_tile, its_first, tiles = (
        T.alloc_var("int32", init=w.items[field, low]) for field in (ITS_B, ITS_Q_TILE, ITS_FIRST, ITS_TILES)
    )
    runs = T.alloc_var("int32", init=_runs(arg, w.items[ITS_VISITED, low] if arg.listed else tiles))
    kv_head = T.alloc_var("int32", init=_kv_head(arg, chunk * THREADS + low, place - begin, runs))
    start = T.alloc_var("int32", init=begin + (0 if arg.by_job else kv_head * (runs + OVERHEAD)))  # of the job's costs
    tile = T.alloc_var("int32", init=(place - start) << arg.coarse)  # counted from the job's first
    job = T.alloc_var("int32", init=_job(arg, chunk * THREADS + low, kv_head))
    if arg.listed:
        tile = tile_of_rank(arg, chunk * THREADS + low, its_first, tiles, w.items[ITS_VISITED, low], tile)
    if arg.rule > 0:
        if tile > 0:
            tile = T.truncdiv(its_first + tile + (arg.rule - 1), arg.rule) * arg.rule - its_first
    if arg.rule < 0:
        unit = T.alloc_var("int32", init=T.truncdiv(tiles - 1 - arg.rule, -arg.rule))
        tile = T.truncdiv(tile + unit - 1, unit) * unit
    if tile >= tiles:
        # This job's overhead is left, or less than a part: the next part is the next job's first.
        tile = 0
        job += 1
        kv_head += 1
        if kv_head == arg.kv_heads:
            kv_head = 0
            q_tile += 1
            if q_tile == _items(arg, w, b):
                q_tile = 0
                b += 1
    first = T.alloc_var("int32", init=worker)
    parts = T.alloc_var("int32", init=1)
    if tile > 0:
        tile += its_first
        first = worker_of(deal, start)
        parts = worker_of(deal, start + runs - 1) - first + 1
    _write(arg, worker, JOB, [job, b, q_tile, kv_head])
    _write(arg, worker, TILE, [tile, first, parts, 0])
    _write_record(arg, w, worker, OWN, b)


def _kv_head(arg: Any, item: Any, cost: Any, runs: Any) -> Any:
    """The kv head of the job of an item that has a cost behind those before it."""
    return T.truncmod(item, arg.kv_heads) if arg.by_job else quotient(cost, runs + OVERHEAD)


def _job(arg: Any, item: Any, kv_head: Any) -> Any:
    """The number of a job of an item."""
    return item if arg.by_job else item * arg.kv_heads + kv_head
