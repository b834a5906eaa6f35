"""The decode phase, generic schedule: FlashAttention-2 (Dao 2023, arXiv 2307.08691) on packed rows and split keys.

As many blocks as run at once walk over the parts that the plan deals to them (walk.py). A part is ``block_M`` packed
query rows of one kv head, and a run of tiles of ``block_N`` keys:

    S = Q K^T                      tile of scores, in registers
    S = mask(score_mod(S))         the mask only where the tile is not wholly visible
    P, alpha = online softmax      see softmax.py
    O = alpha O + P V

The rows of K and V are gathered one by one through the page table, so that a page may have any size; the next tiles
are loaded by cp.async under the arithmetic. Keys that the job does not see, such as those behind the sequence's end,
are zeros in shared memory, whatever the cache holds there, and their entries in the table are not followed.

A job of one part is written to o and lse directly. The parts of others are stored, and merged by the block whose part
arrives last (combine.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import tilelang.language as T
from tilelang.language.eager.builder import Builder

from ....call import cache_fields
from ....call.decoding import DecodeCall
from ....variant.program import Program, program
from ..architecture import padded
from ..packed.dependent_launch import wait_for_previous
from ..tile import softmax
from ..tile.assume import assume_aligned, assume_filled
from ..tile.expressions import Emitter
from ..tile.mask import Visibility
from ..tile.softmax import ROWS
from .combine import merge_parts, place_of_query, sink_of, store_part
from .config import GenericConfig
from .lines.entries import count_of, entry_of, tile_in
from .packed_rows import RowScore, apply_row_mask, apply_row_score, keep_row_uniforms, locate_rows
from .ranges import differs_by_head
from .signature import declare
from .walk import begin_worker, enter_job, enter_part, head_of, locate_part, next_job, query_of

FAR = 2**30  # tokens: beyond any cache


@dataclass(frozen=True)
class GenericPlan:
    """The static facts of one kernel."""

    call: DecodeCall
    config: GenericConfig
    traced: Program
    score: RowScore | None

    @property
    def block_M(self) -> int:
        return self.config.block_M

    @property
    def block_N(self) -> int:
        return self.config.block_N

    @property
    def head_dim(self) -> int:
        """As tiles hold it."""
        return padded(self.call.head_dim)

    @property
    def head_dim_v(self) -> int:
        return padded(self.call.head_dim_v)

    @property
    def dtype(self) -> str:
        return str(self.call.dtype).removeprefix("torch.")


def generic_kernel(call: DecodeCall, config: GenericConfig) -> Any:
    """The TileLang function ``decode``; its parameters are those of :func:`signature.declare`."""
    traced = program(call.variant)
    plan = GenericPlan(call, config, traced, RowScore(call, traced) if traced.score is not None else None)
    builder = Builder()
    with builder.prim_func("decode"):
        _kernel(plan, declare(builder, call, traced))
    return builder.get()


@T.macro
def _kernel(plan, arg):
    with T.Kernel(arg.workers, threads=plan.config.threads) as block:
        w = _alloc(plan)
        assume_filled(arg.operands)
        if plan.call.aligned:
            assume_aligned(arg.q.strides, arg.k.strides, arg.v.strides)
        assume_aligned(arg.o.strides)
        wait_for_previous(plan.call.arch)
        worker = begin_worker(arg, block)
        for _ in T.serial(worker.steps):
            job = enter_job(plan, arg, worker)
            head = _enter_rows(plan, arg, w, job)
            for index in T.serial(job.units):
                tiles = enter_part(plan, arg, job, index)
                _check_pages(plan, arg, job, tiles, w.thread)
                _add_keys(plan, arg, w, head, job, tiles)
                part = locate_part(arg, worker, job, index)
                if part.parts > 1:
                    store_part(plan, arg, job, part, w.acc_o, w.base, w.l)
                if part.parts == 1:
                    _write(plan, arg, w, head, job)
                T.sync_threads()  # before the tiles in shared memory are loaded again
                if part.parts > 1:
                    merge_parts(plan, arg, job, part, None, w.thread, plan.config.threads, T.sync_threads)
            next_job(arg, worker)


@T.macro
def _alloc(plan):
    """A block's tiles, and numbers for each of its rows of queries."""
    block_M, block_N = plan.block_M, plan.block_N
    q = T.alloc_shared([block_M, plan.head_dim], plan.dtype)
    k = T.alloc_shared([block_N, plan.head_dim], plan.dtype)
    v = T.alloc_shared([block_N, plan.head_dim_v], plan.dtype)
    acc_s = T.alloc_fragment([block_M, block_N], "float32")
    weights = T.alloc_fragment([block_M, block_N], plan.dtype)
    acc_o = T.alloc_fragment([block_M, plan.head_dim_v], "float32")
    m = T.alloc_fragment([block_M], "float32")
    l = T.alloc_fragment([block_M], "float32")
    alpha = T.alloc_fragment([block_M], "float32")
    base = T.alloc_fragment([block_M], "float32")
    row_sum = T.alloc_fragment([block_M], "float32")
    row_head = T.alloc_fragment([block_M], "int32")
    row_pos = T.alloc_fragment([block_M], "int32")
    thread = T.get_thread_binding()
    return SimpleNamespace(
        q=q, k=k, v=v, acc_s=acc_s, weights=weights, acc_o=acc_o, m=m, l=l, alpha=alpha, base=base,
        row_sum=row_sum, row_head=row_head, row_pos=row_pos, thread=thread,
    )  # fmt: skip


@T.macro
def _enter_rows(plan, arg, w, job):
    """Loads a job's queries, and computes what its rows need for their scores.

    c: what the softmax multiplies scores by, within its exponent, to have powers of two.
    """
    # Q: [block_M, head_dim]
    for i, d in T.Parallel(plan.block_M, plan.head_dim):
        b, q = place_of_query(plan, job, query_of(job, i))
        h = head_of(arg, job, i)
        w.q[i, d] = T.if_then_else((i < job.rows) & (d < plan.call.head_dim), arg.q[b, q, h, d], 0)
    locate_rows(arg, job, w.row_head, w.row_pos)
    emit = Emitter(arg.operands)
    c = arg.scale * softmax.LOG2E
    uniforms, of_rows = None, {}
    if plan.score is not None:
        uniforms = plan.score.allocate()
        of_rows = plan.score.allocate_rows(plan.block_M)
        keep_row_uniforms(plan.score, uniforms, of_rows, emit, arg.scale, job.sequence, w.row_head)
        c = plan.score.softmax_unit(uniforms)
    visible = Visibility(plan.traced, emit, job.seqlen)
    full_lo = T.alloc_var("int32", init=0)
    full_hi = T.alloc_var("int32", init=0)
    if not any(map(differs_by_head, plan.traced.full_range)):
        lo, hi = visible.full_range(job.sequence, 0, job.q_lo, job.q_hi)
        full_lo = lo
        full_hi = hi
    return SimpleNamespace(
        emit=emit, visible=visible, uniforms=uniforms, of_rows=of_rows, c=c, full_lo=full_lo, full_hi=full_hi
    )


@T.macro
def _check_pages(plan, arg, job, part, thread):
    """Reports entries of the page table that are no page."""
    if plan.call.paged:
        lo = T.truncdiv(T.max(part.lo * plan.block_N, job.kv_lo), arg.page_size)
        hi = T.truncdiv(T.min(part.hi * plan.block_N, job.kv_hi) + (arg.page_size - 1), arg.page_size)
        for step in T.serial(T.truncdiv(T.max(hi - lo, 0) + (plan.config.threads - 1), plan.config.threads)):
            page = lo + step * plan.config.threads + thread
            if page < hi:
                if (arg.page_table[job.sequence, page] < 0) | (arg.page_table[job.sequence, page] >= arg.k.shape[0]):
                    arg.status[cache_fields.PAGE_TABLE] = job.sequence + 1


def _place(plan, arg, job, key):
    """The row and the token of a key in the caches: a token far beyond them for a key that the job does not see.

    TileLang guards loads by the tensor's shape, and fills up with zeros. A condition of our own around the load would
    keep TileLang from making an asynchronous copy of it. A page table's entry that is no page counts as the nearest
    that is one.
    """
    outside = T.cast((key < job.kv_lo) | (key >= job.kv_hi), "int32") * FAR
    if plan.call.packed_keys:
        return 0, arg.page_table[job.sequence, 0] + key + outside
    if not plan.call.paged:
        return job.sequence, key + outside
    near = T.max(T.min(key, job.kv_hi - 1), 0)
    page = arg.page_table[job.sequence, T.truncdiv(near, arg.page_size)]
    return T.max(T.min(page, arg.k.shape[0] - 1), 0), T.truncmod(near, arg.page_size) + outside


@T.macro
def _load(plan, arg, job, k_lo, cache, tile):
    """Rows of a cache: [block_N, head_dim]; zeros where the job sees no key."""
    block_N, head_dim = tile.shape
    rows = rows_at_once(plan.config.threads, block_N, head_dim)
    for group in T.unroll(block_N // rows, unroll_factor=1):
        for i, d in T.Parallel(rows, head_dim):
            row, token = _place(plan, arg, job, k_lo + group * rows + i)
            tile[group * rows + i, d] = cache[row, token, job.kv_head, d]


def rows_at_once(threads: int, block_N: int, head_dim: int) -> int:
    """Rows whose addresses threads compute together: each has some eight, in registers, of 16 bytes each."""
    rows = block_N
    while rows * head_dim > 64 * threads and rows > 8:
        rows //= 2
    return rows


@T.macro
def _add_keys(plan, arg, w, head, job, part):
    """Attention of the job's rows to the keys of a part: acc_o, l, base."""
    block_M, block_N = plan.block_M, plan.block_N
    softmax.reset(w.m, w.l, w.acc_o)
    # At least one tile, all masked where there is none, so that base is set.
    for step in T.Pipelined(T.max(count_of(plan, part), 1), num_stages=plan.config.num_stages):
        k_lo = _first_key(plan, arg, job, part, step)
        _load(plan, arg, job, k_lo, arg.k, w.k)
        # S = Q K^T: [block_M, block_N]
        T.gemm(w.q, w.k, w.acc_s, transpose_B=True, clear_accum=True, policy=ROWS)
        if plan.score is not None:
            apply_row_score(
                w.acc_s, plan.score, head.uniforms, head.of_rows, head.emit, arg.scale, job.sequence, w.row_head,
                w.row_pos, k_lo,
            )  # fmt: skip
        if _is_masked(plan, arg, head, job, part, step, k_lo):
            apply_row_mask(w.acc_s, head.visible, job.sequence, w.row_head, w.row_pos, k_lo)
        softmax.update(w.acc_s, w.m, w.l, w.alpha, w.base, w.row_sum, head.c, block_M, block_N)
        # P: [block_M, block_N]
        T.copy(w.acc_s, w.weights)
        softmax.rescale(w.acc_o, w.alpha, block_M, plan.head_dim_v)
        _load(plan, arg, job, k_lo, arg.v, w.v)
        # O += P V: [block_M, head_dim_v]
        T.gemm(w.weights, w.v, w.acc_o, policy=ROWS)


def _first_key(plan, arg, job, part, step):
    """Of a tile that a part visits."""
    if plan.call.listed:
        return tile_in(entry_of(plan, arg, job, part, step)) * plan.block_N
    return (part.lo + step) * plan.block_N


def _is_masked(plan, arg, head, job, part, step, k_lo):
    """Whether a tile takes the mask."""
    masked = (k_lo < head.full_lo) | (k_lo + plan.block_N > head.full_hi)
    return masked & (entry_of(plan, arg, job, part, step) % 2 == 0) if plan.call.listed else masked


@T.macro
def _write(plan, arg, w, head, job):
    """Finishes the rows of a job that has one part, and writes o and lse."""
    block_M, head_dim_v = plan.block_M, plan.head_dim_v
    if plan.call.sink:
        # base becomes a row's sink, in powers of two, and then the base of its exponents, as in combine.py.
        for i in T.Parallel(block_M):
            w.row_sum[i] = sink_of(arg, job, w.row_head[i]) * softmax.LOG2E
        for i in T.Parallel(block_M):
            w.m[i] = T.if_then_else(w.l[i] == 0.0, -T.infinity("float32"), w.base[i])
        softmax.add_sink(w.m, w.l, w.alpha, w.base, w.row_sum, 1.0, block_M)
    else:
        T.fill(w.alpha, 1)
    softmax.finish(w.l, w.base, w.alpha, w.acc_o, block_M, head_dim_v)
    # O: [block_M, head_dim_v]
    for i, d in T.Parallel(block_M, head_dim_v):
        if (i < job.rows) & (d < plan.call.head_dim_v):
            b, q = place_of_query(plan, job, query_of(job, i))
            arg.o[b, q, w.row_head[i], d] = w.acc_o[i, d]
    if plan.call.return_lse:
        # lse: [block_M]
        for i in T.Parallel(block_M):
            if i < job.rows:
                b, q = place_of_query(plan, job, query_of(job, i))
                arg.lse[b, w.row_head[i], q] = w.l[i]
