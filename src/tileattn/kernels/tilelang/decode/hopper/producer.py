"""The producer of the Hopper decode schedule: loads K and V tile by tile; see kernel.py.

:func:`load_boxes` copies boxes by TMA: the tile of a contiguous cache or of packed keys, or a piece of a page.
gather.py copies row by row. The last box of packed keys may have rows of the next sequence: they count as unused.
"""

import tilelang.language as T

from ...tile.hopper import WARP
from ..lines.entries import count_of, entry_of, tile_in
from ..walk import begin_worker, enter_job, enter_part, next_job
from .gather import gather_tiles
from .pages import NO_ROW, PAGE, ROW, read_ahead, take_next
from .stages import PARITY, STAGE, next_stage, stage_of


@T.macro
def read_boxes_ahead(plan, arg, w, job, part, first_box):
    """Reads the page table for the boxes of a part from ``first_box`` on, one for each lane."""
    key = key_of_box(plan, arg, job, part, first_box + w.lane)
    read_ahead(arg, w, job, key, plan.box_rows, part.hi * plan.block_N)


def key_of_box(plan, arg, job, part, box):
    """The first key of a box of the tiles that a part visits."""
    if not plan.call.listed:
        return (part.lo * plan.block_N) + box * plan.box_rows
    tile = tile_in(entry_of(plan, arg, job, part, box // plan.boxes))
    return T.alloc_var("int32", init=tile * plan.block_N + box % plan.boxes * plan.box_rows)[0]


@T.macro
def load_box(plan, arg, w, job, tensor, tiles, ready, columns, panel, k_lo):
    """One tile of K, or of V. ``k_lo``: its first row in a cache that is not paged; packed keys have one row of all."""
    if plan.call.paged:
        for box in T.unroll(plan.boxes):
            if w.rows[box] != NO_ROW:
                for p in T.unroll(columns // panel):
                    # [box_rows, panel]
                    T.tma_copy(
                        tensor[
                            w.pages[box],
                            w.rows[box] : w.rows[box] + plan.box_rows,
                            job.kv_head,
                            p * panel : p * panel + panel,
                        ],
                        tiles[
                            stage_of(plan, w),
                            box * plan.box_rows : box * plan.box_rows + plan.box_rows,
                            p * panel : p * panel + panel,
                        ],
                        barrier=ready[w.at[STAGE]],
                        eviction_policy="evict_first",
                    )
    else:
        row = T.min(job.sequence, tensor.shape[0] - 1)
        # [block_N, head_dim]
        T.tma_copy(
            tensor[row, k_lo : k_lo + plan.block_N, job.kv_head, 0:columns],
            tiles[stage_of(plan, w), :, :],
            barrier=ready[w.at[STAGE]],
            eviction_policy="evict_first",
        )


def first_key(plan, arg, job, part, number):
    """The first key of a tile that a part visits; of pages the boxes know it."""
    if not plan.call.listed or plan.call.paged:
        return (part.lo + number) * plan.block_N
    return T.alloc_var("int32", init=tile_in(entry_of(plan, arg, job, part, number)) * plan.block_N)[0]


@T.macro
def load_boxes(plan, arg, w, job, part):
    """A part's tiles, as stages become free. The table is read 32 boxes ahead."""
    start = T.alloc_var("int32", init=0)  # of the sequence's keys
    if plan.call.packed_keys:
        start = arg.page_table[job.sequence, 0]
    if plan.call.paged:
        read_boxes_ahead(plan, arg, w, job, part, 0)
    for j in T.serial(count_of(plan, part)):
        k_lo = first_key(plan, arg, job, part, j)
        if plan.call.paged:
            if j * plan.boxes % WARP == 0:
                take_next(arg, w, job)
            # Before the copies, which one lane issues.
            for box in T.unroll(plan.boxes):
                w.pages[box] = T.shfl_sync(w.entry[PAGE], (j * plan.boxes + box) % WARP)
                w.rows[box] = T.shfl_sync(w.entry[ROW], (j * plan.boxes + box) % WARP)
        T.barrier_wait(w.k_free[w.at[STAGE]], w.at[PARITY])
        load_box(plan, arg, w, job, arg.k, w.k, w.k_ready, plan.head_dim, plan.panel_k, start + k_lo)
        T.barrier_arrive(w.k_ready[w.at[STAGE]])
        T.barrier_wait(w.v_free[w.at[STAGE]], w.at[PARITY])
        load_box(plan, arg, w, job, arg.v, w.v, w.v_ready, plan.head_dim_v, plan.panel_v, start + k_lo)
        T.barrier_arrive(w.v_ready[w.at[STAGE]])
        # Behind the copies, so that the first ones need not wait for it.
        if plan.call.paged:
            if j * plan.boxes % WARP == 0:
                read_boxes_ahead(plan, arg, w, job, part, j * plan.boxes + WARP)
        next_stage(plan, w)


@T.macro
def produce(plan, arg, w):
    w.at[STAGE] = 0
    w.at[PARITY] = 1  # a fresh barrier lets this parity pass
    worker = begin_worker(arg, w.block)
    for _ in T.serial(worker.steps):
        job = enter_job(plan, arg, worker)
        for index in T.serial(job.units):
            part = enter_part(plan, arg, job, index)
            if plan.gather:
                gather_tiles(plan, arg, w, job, part)
            else:
                load_boxes(plan, arg, w, job, part)
        next_job(arg, worker)
