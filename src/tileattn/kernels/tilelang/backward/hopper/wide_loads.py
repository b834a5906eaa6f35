"""Loads of the Hopper kernel for dk and dv of wide heads, panel by panel; see wide.py."""

from __future__ import annotations

import tilelang.language as T

from .plan import BATCH, KEY, KV_HEAD
from .wide_plan import OF_K, OF_V, PANEL, TILE_ROWS


@T.macro
def load_panels(plan, source, b, row, h, tiles, first, ready, stage):
    """Copies 64 rows of all columns. A panel is 64 columns, which one TMA copy takes."""
    for p in T.unroll(plan.head_dim // PANEL):
        T.tma_copy(
            source[b, row : row + TILE_ROWS, h, p * PANEL : p * PANEL + PANEL],
            tiles[first : first + TILE_ROWS, p * PANEL : p * PANEL + PANEL],
            barrier=ready[stage],
        )


@T.macro
def copy_keys(plan, arg, w, k_b, v_b):
    """Copies V and K."""
    load_panels(plan, arg.v, v_b, w.task[KEY], w.task[KV_HEAD], w.keys, OF_V * TILE_ROWS, w.kv_ready, 0)
    load_panels(plan, arg.k, k_b, w.task[KEY], w.task[KV_HEAD], w.keys, OF_K * TILE_ROWS, w.kv_ready, 0)


@T.macro
def copy_rows(plan, w, source, kind, ready, at):
    """Copies a tile of Q or dO."""
    load_panels(plan, source, at.b, at.row, at.h, w.rows, (2 * kind + at.stage) * TILE_ROWS, ready, at.stage)


@T.macro
def copy_sums(arg, w, at):
    """Copies lse2 and delta of a tile of Q."""
    of_tile = at.stage * TILE_ROWS
    T.tma_copy(
        arg.lse2[w.task[BATCH], at.h, at.row : at.row + TILE_ROWS],
        w.lse2[of_tile : of_tile + TILE_ROWS],
        barrier=w.q_ready[at.stage],
    )
    T.tma_copy(
        arg.delta[w.task[BATCH], at.h, at.row : at.row + TILE_ROWS],
        w.delta[of_tile : of_tile + TILE_ROWS],
        barrier=w.q_ready[at.stage],
    )
