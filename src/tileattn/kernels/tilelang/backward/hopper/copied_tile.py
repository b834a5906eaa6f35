"""Tiles of a bias, or of another tensor that a modification reads tile by tile, in the Hopper kernels.

Such a *copied tile* is loaded by TMA, read, and its gradient is written out by TMA.
"""

from __future__ import annotations

from typing import Any

import tilelang.language as T
from tilelang.language.eager.builder import Builder

from ...tile.assume import assume_aligned
from ...tile.hopper import WARP, WARPGROUP, tile_layout
from ...tile.lists import length_of_line, tile_of_line
from ...tile.matrices import accumulator_layout, load_matrices, store_matrices, transposed
from .. import tile
from ..operand_gradients import ADDED
from .loads import first_head, head_count, line_of_head, tiles_of_head
from .plan import BATCH, DQ_PARITY, KEY, KeysPlan, TilePlan
from .stages import loading_ring


class TransposedTile:
    """The copied tile of the current stage, indexed by key and query; in memory it has queries in rows."""

    def __init__(self, plan: KeysPlan, w: Any) -> None:
        self._plan, self._w = plan, w

    def __getitem__(self, index: tuple[Any, Any]) -> Any:
        return self._w.tile[tile_stage(self._plan, self._w), index[1], index[0]]


def alloc_tile(plan: TilePlan, arg: Any, w: Any) -> dict[Any, Any]:
    """Allocates the copied tile's stages, and registers how its elements are emitted. Returns the buffers' layouts."""
    assume_aligned(arg.operands[plan.copied.name].strides, itemsize=plan.copied_dtype.itemsize)
    kind = str(plan.copied_dtype).removeprefix("torch.")
    # [stages, block_M, block_N]
    w.tile = T.alloc_shared([plan.config.tile_stages, plan.block_M, plan.block_N], kind)
    layouts = {
        w.tile: tile_layout(w.tile, plan.block_N * plan.copied_dtype.itemsize),
        w.acc_s: accumulator_layout(*plan.score_tile),  # to address single elements (:func:`have_read`)
    }
    if plan.tile_in_registers:
        w.tile_registers = T.alloc_fragment(plan.score_tile, kind)
        w.emit.tiles[plan.copied.text] = w.tile_registers
    return layouts


def annotate(layouts: dict[Any, Any]) -> None:
    """Tells TileLang the buffers' layouts."""
    Builder.current().eval(T.annotate_layout(layouts))


def alloc_transposed_tile(plan: KeysPlan, arg: Any, w: Any) -> None:
    """As :func:`alloc_tile`, for scores with keys in rows; also allocates the gradient's tile."""
    layouts = alloc_tile(plan, arg, w)
    if plan.tile_in_registers:
        w.eight_of_tile = T.alloc_local([8], str(plan.copied_dtype).removeprefix("torch."))
        layouts[w.tile_registers] = accumulator_layout(plan.block_N, plan.block_M)
    else:
        w.emit.tiles[plan.copied.text] = TransposedTile(plan, w)
    if plan.leaving is not None:
        kind = str(plan.leaving_dtype).removeprefix("torch.")
        assume_aligned(arg.written_out[plan.leaving].strides, itemsize=plan.leaving_dtype.itemsize)
        # [block_M, block_N]
        w.gradient_tile = T.alloc_shared([plan.block_M, plan.block_N], kind)
        w.eight_of_gradient = T.alloc_local([8], kind)
        layouts[w.gradient_tile] = tile_layout(w.gradient_tile, plan.block_N * plan.leaving_dtype.itemsize)
    annotate(layouts)


@T.macro
def load_tile(plan, arg, w, ring, place):
    """Loads one tile of the copied tensor when its stage is free. Elements beyond the tensor's edges are 0."""
    T.barrier_wait(w.tile_free[ring.stage], ring.parity)
    T.tma_copy(
        arg.operands[plan.copied.name][place],
        w.tile[ring.stage, :, :],
        barrier=w.tile_ready[ring.stage],
        eviction_policy="evict_first" if plan.copied_once else None,
    )
    T.barrier_arrive(w.tile_ready[ring.stage])


@T.macro
def load_tiles(plan, arg, w):
    """Loads the tiles of the copied tensor that a block of keys needs."""
    ring = loading_ring(plan.config.tile_stages)
    key = w.task[KEY]
    for g in T.serial(head_count(plan, arg, w)):
        h = first_head(plan, arg, w) + g
        outer = [w.emit(index, b=w.task[BATCH], h=h) for index in plan.copied.outer]
        if plan.listed:
            line = T.alloc_var("int32", init=line_of_head(plan, arg, w, h))
            count = T.alloc_var("int32", init=length_of_line(arg, line))
            for step in T.serial(count):
                q_lo = tile_of_line(arg, line, step) * plan.block_M + arg.seqlen_k - arg.seqlen_q
                row = T.alloc_var("int32", init=w.emit(plan.copied.row, b=w.task[BATCH], h=h, q=q_lo))
                load_tile(plan, arg, w, ring, (*outer, slice(row, row + plan.block_M), slice(key, key + plan.block_N)))
                ring.advance()
        else:
            first_tile = tiles_of_head(plan, w, h)[0]
            q_lo = first_tile * plan.block_M + arg.seqlen_k - arg.seqlen_q
            row = T.alloc_var("int32", init=w.emit(plan.copied.row, b=w.task[BATCH], h=h, q=q_lo))
            count = T.max(tiles_of_head(plan, w, h)[1] - first_tile, 0)
            for _ in T.serial(count):
                load_tile(plan, arg, w, ring, (*outer, slice(row, row + plan.block_M), slice(key, key + plan.block_N)))
                row += plan.block_M
                ring.advance()


@T.macro
def take_tile(plan, w):
    """Waits for the copied tile. With 16-bit elements, also loads it to registers, while the scores are computed.

    Its rows are queries; ldmatrix transposes them. 32-bit elements are read from shared memory where they are used, by
    each warp without bank conflicts.
    """
    if plan.copied is not None:
        T.barrier_wait(w.tile_ready[tile_stage(plan, w)], tile_parity(plan, w))
        if plan.tile_in_registers:
            place_of = transposed(w.tile, tile_stage(plan, w))
            load_matrices(w.tile_registers, w.eight_of_tile, plan.block_M, place_of, True, w.thread)


def tile_stage(plan, w):
    return w.ring.stage if plan.config.tile_stages > 1 else 0


def tile_parity(plan, w):
    """With one stage the parity flips at each tile, as that of dQ's buffer does, but starts with the other value."""
    return w.ring.parity if plan.config.tile_stages > 1 else w.at[DQ_PARITY] ^ 1


@T.macro
def release_tile(plan, w, used=True):
    T.sync_warp()  # one lane arrives for all
    if T.shuffle_elect(WARP) & used:
        T.barrier_arrive(w.tile_free[tile_stage(plan, w)])


def have_read(w, columns):
    """A condition that always holds, but depends on all reads of a tile: the last probability is not negative.

    An arrival at a barrier does not wait for reads in flight, so TMA could overwrite the tile before it is read: during
    two products ldmatrix takes long enough for that. The sign bit is compared, because a NaN must not block the tile.
    """
    lane, warp = w.thread % WARP, w.thread // WARP
    return T.reinterpret(w.acc_s[warp * 16 + 8 + lane // 4, columns - 7 + lane % 4 * 2], "int32") >= 0


@T.macro
def take_gradient(plan, arg, w, h, number, group, parity):
    """Writes out a warpgroup's half of the gradient of a copied tile. TMA skips elements beyond the tensor's edges."""
    path = plan.paths[plan.leaving]
    half = plan.block_N // 2
    q_lo = number * plan.block_M + arg.seqlen_k - arg.seqlen_q
    outer = [w.emit(index, b=w.task[BATCH], h=h) for index in plan.copied.outer]
    row = w.emit(plan.copied.row, b=w.task[BATCH], h=h, q=q_lo)
    key = w.task[KEY] + group * half
    place = (*outer, slice(row, row + plan.block_M), slice(key, key + half))
    T.barrier_wait(w.gradient_ready[group], parity)
    if path.way == ADDED:
        T.atomic_add(
            arg.written_out[plan.leaving][place],
            w.gradient_tile[0 : plan.block_M, group * half : group * half + half],
            use_tma=True,
        )
    else:
        T.tma_copy(
            w.gradient_tile[0 : plan.block_M, group * half : group * half + half],
            arg.written_out[plan.leaving][place],
            leader_scope_threads=WARP,
        )
        T.tma_store_wait(0)
    T.barrier_arrive(w.gradient_free[group])


@T.macro
def take_gradients(plan, arg, w):
    """Writes out the gradients of all copied tiles. If the kernel adds up dq, :func:`add_dq` does this instead."""
    parity = T.alloc_var("int32", init=0)
    for g in T.serial(head_count(plan, arg, w)):
        h = first_head(plan, arg, w) + g
        if plan.listed:
            line = T.alloc_var("int32", init=line_of_head(plan, arg, w, h))
            count = T.alloc_var("int32", init=length_of_line(arg, line))
            for step in T.serial(count):
                listed = T.alloc_var("int32", init=tile_of_line(arg, line, step))
                take_gradient(plan, arg, w, h, listed, 0, parity)
                take_gradient(plan, arg, w, h, listed, 1, parity)
                parity = parity ^ 1
        else:
            for number in T.serial(tiles_of_head(plan, w, h)[0], tiles_of_head(plan, w, h)[1]):
                take_gradient(plan, arg, w, h, number, 0, parity)
                take_gradient(plan, arg, w, h, number, 1, parity)
                parity = parity ^ 1


@T.macro
def write_out_gradient(plan, w, scores):
    """Passes the gradient of a copied tile, with queries in rows, to the adding warp, once the last one is written out.

    This comes after dV's product, which would otherwise wait for these stores, as it does for those of dS.
    """
    factor = plan.slopes.program.loads[plan.leaving]
    if factor.recomputed is not None:
        tile.times_recomputed(w.acc_dp, tile.kept_product(factor, w.kept, w.acc_s), factor.recomputed, scores)
    gradient = w.acc_dp if factor.recomputed is not None else tile.kept_product(factor, w.kept, w.acc_s)
    group = w.thread // WARPGROUP
    T.barrier_wait(w.gradient_free[group], w.at[DQ_PARITY])
    if plan.leaving_dtype.itemsize == 2:
        place_of = transposed(w.gradient_tile)
        store_matrices(gradient, w.eight_of_gradient, plan.block_M, place_of, True, w.thread)
    else:
        for i, j in T.Parallel(plan.block_N, plan.block_M):
            w.gradient_tile[j, i] = gradient[i, j]
    T.fence_proxy_async()
    T.barrier_arrive(w.gradient_ready[group])
    if plan.tile_is_recomputed and not plan.tile_in_registers:
        release_tile(plan, w)
