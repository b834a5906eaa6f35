"""The producer for small and odd pages: K and V are copied row by row (cp.async), in the layout that wgmma reads.

Each warp has 32 keys of a tile, each lane follows the page table for one of them, one tile ahead. A warp copies 512
bytes at a time. All lanes arrive at the stage's barrier, by cp.async.mbarrier.arrive.noinc, when their copies are done.
Rows without keys of the mask's range are filled with zeros.
"""

import tilelang.language as T

from ...tile.hopper import WARP
from ..lines.entries import count_of, tile_of
from .pages import NO_ROW, PAGE, ROW, read_ahead, take_next
from .stages import PARITY, STAGE, next_stage, stage_of

CHUNK = 8  # elements of 16 bytes


@T.macro
def read_key_ahead(plan, arg, w, job, part, tile):
    """Reads the page table for this lane's key of a tile."""
    read_ahead(arg, w, job, tile * plan.block_N + w.producer, 1, part.hi * plan.block_N)


@T.macro
def gather_rows(plan, w, job, tensor, tiles, columns, width):
    """One tile of K, or of V: the warp's 32 rows."""
    chunks = columns // CHUNK
    # Unrolled, the places of rows that do not divide a warp's bytes are kept in registers that there are not.
    factor = None if WARP % chunks == 0 or chunks % WARP == 0 else 2
    for step in T.unroll(chunks, unroll_factor=factor):
        r = (step * WARP + w.lane) // chunks
        c = (step * WARP + w.lane) % chunks * CHUNK
        of_page = T.alloc_var("int32", init=T.shfl_sync(w.entry[PAGE], r))
        of_row = T.alloc_var("int32", init=T.shfl_sync(w.entry[ROW], r))
        T.ptx_cp_async(
            T.access_ptr(tiles[stage_of(plan, w), w.producer // WARP * WARP + r, c], "w", CHUNK),
            T.access_ptr(tensor[of_page, T.max(of_row, 0), job.kv_head, T.min(c, width - CHUNK)], "r", CHUNK),
            CHUNK,
            (of_row != NO_ROW) & (c < width),
        )


@T.macro
def gather_tiles(plan, arg, w, job, part):
    """A part's tiles, as stages become free."""
    read_key_ahead(plan, arg, w, job, part, tile_of(plan, arg, job, part, 0))
    for j in T.serial(count_of(plan, part)):
        take_next(arg, w, job)
        T.barrier_wait(w.k_free[w.at[STAGE]], w.at[PARITY])
        gather_rows(plan, w, job, arg.k, w.k, plan.head_dim, plan.call.head_dim)
        T.cp_async_barrier_noinc(w.k_ready[w.at[STAGE]])
        # Behind copies, so that the first ones need not wait for it.
        read_key_ahead(plan, arg, w, job, part, tile_of(plan, arg, job, part, j + 1))
        T.barrier_wait(w.v_free[w.at[STAGE]], w.at[PARITY])
        gather_rows(plan, w, job, arg.v, w.v, plan.head_dim_v, plan.call.head_dim_v)
        T.cp_async_barrier_noinc(w.v_ready[w.at[STAGE]])
        next_stage(plan, w)
