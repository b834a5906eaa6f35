"""What a block does while the kernel before still runs: it asks for its first keys and values, into the L2 cache.

With programmatic dependent launch a block starts as soon as there is room, and then waits for the end of the kernel
before. At its end that kernel leaves the memory idle: few blocks still merge parts. A waiting block knows where its
work begins if the plan is older than the kernel before, as it is in all layers but the first one of a step.

Nothing may be *used* before the wait, for the kernel before may write it: the plan, the page table, the caches. Here
they only lead to hints. Whatever is read, addresses are those of rows of the caches. Reading leaves nothing in the L1
cache (``__ldcv``), which could be old after the wait. A hint brings lines to the L2 cache, where all writes go, and so
never an old value to a later load.
"""

from __future__ import annotations

from typing import Any

import tilelang.language as T

from ..records import JOB, KV_HEAD, OWN, SEQLEN, SEQUENCE, TILE
from .pages import page_of

MOST_KEYS = 256  # two for each thread: more would take longer than to wait

PRELUDE = """\
static __device__ __forceinline__ void prefetch_row(const void *row, int bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" : : "l"(row), "r"(bytes) : "memory");
}
"""


def peek(tensor: Any, *place: Any) -> Any:
    """An element as it is by now."""
    return T.call_extern("int32", "__ldcv", T.address_of(tensor[place]))


def clamped(value: Any, count: Any) -> Any:
    """The nearest number below `count`."""
    return T.max(T.min(value, count - 1), 0)


@T.macro
def prefetch_row(tensor, row, token, kv_head, columns):
    """A row of a cache, within its bounds."""
    T.evaluate(
        T.call_extern(
            "handle", "prefetch_row",
            T.address_of(tensor[clamped(row, tensor.shape[0]), clamped(token, tensor.shape[1]), kv_head, 0]),
            columns * 2,
        )
    )  # fmt: skip


@T.macro
def prefetch_first_tiles(plan, arg, w):
    """The first keys of the worker's first job, as far as stages hold them.

    By the consumers: the producer, which all wait for, goes on at once if nothing is left to wait for.
    """
    sequence = T.alloc_var("int32", init=clamped(peek(arg.plan, w.block, SEQUENCE), arg.batch))
    kv_head = T.alloc_var("int32", init=clamped(peek(arg.plan, w.block, KV_HEAD), arg.kv_heads))
    tile = T.alloc_var("int32", init=T.max(peek(arg.plan, w.block, TILE), 0))
    end = T.alloc_var("int32", init=peek(arg.plan, w.block, OWN + SEQLEN))
    if peek(arg.plan, w.block, JOB) == peek(arg.plan, w.block + 1, JOB):
        end = T.min(end, peek(arg.plan, w.block + 1, TILE) * plan.block_N)
    # Behind the last worker's work, and where only the mask tells where a job begins.
    if (tile == 0) & (not plan.begins_at_zero):
        end = 0
    keys = min(plan.stages * plan.block_N, MOST_KEYS)
    for step in T.unroll(-(-keys // plan.consumers)):
        ahead = T.alloc_var("int32", init=step * plan.consumers + w.thread)
        key = T.alloc_var("int32", init=tile * plan.block_N + ahead)
        if (ahead < keys) & (key < end):
            row = T.alloc_var("int32", init=sequence)
            token = T.alloc_var("int32", init=key)
            if plan.call.paged:
                place = T.alloc_var("int32", init=page_of(arg, w, key))
                token = key - place * arg.page_size
                row = peek(arg.page_table, sequence, clamped(place, arg.page_table.shape[1]))
            prefetch_row(arg.k, row, token, kv_head, plan.call.head_dim)
            prefetch_row(arg.v, row, token, kv_head, plan.call.head_dim_v)
