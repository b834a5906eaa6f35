"""The plan of the Hopper kernel for dk and dv of wide heads: its static facts, tiles and barriers; see wide.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import tilelang.language as T

from .....call.facts import AttentionCall
from .....variant.program import Program
from ...tile.expressions import Emitter
from ...tile.hopper import WARP, WARPGROUP, slices
from .. import tile
from ..plan import BackwardPlan
from ..visible import Viewers
from .config import HopperWideConfig

# Indices of a warpgroup's state: its tile of queries, the end of this head's tiles, the head's number in its group, and
# the parities to wait for at its own stage and at the other one.
TILE, END, GROUP_HEAD, OWN_PARITY, OTHER_PARITY = range(5)

# The warpgroups: the first keeps the gradient of V, which is summed from rows of dO; the second that of K, from Q.
OF_V, OF_K = 0, 1

# Rows of a tile, all of one warpgroup; columns of a panel.
TILE_ROWS, PANEL = 64, 64


class WidePlan(BackwardPlan):
    """The static facts of the kernel, from which its macros choose what they emit.

    Attributes:
        head_dim: both head dims, padded to panels.
    """

    block_M = block_N = TILE_ROWS

    def __init__(self, call: AttentionCall, config: HopperWideConfig, traced: Program) -> None:
        super().__init__(call, config, traced)
        self.head_dim, self.listed, self.split = config.head_dim(call), config.listed, config.split

    def alloc_barriers(self) -> dict[str, Any]:
        """All barriers, by name, in one array; see tile/hopper.py.

        ``do_free`` of odd tiles needs two arrivals, as neither reader waits for the other. For all others the last
        reader arrives alone.
        """
        return slices(
            T.alloc_barrier,
            {
                "kv_ready": [WARP],
                "q_ready": [WARP] * 2,
                "q_free": [1] * 2,
                "do_ready": [WARP] * 2,
                "do_free": [1, 2],
                "p_ready": [WARPGROUP] * 2,
                "ds_ready": [WARPGROUP] * 2,
            },
        )


def allocate(plan: WidePlan, arg: Any, at: Any, thread: Any) -> SimpleNamespace:
    """A block's tiles, barriers and numbers. A tile of scores has the rows of both warpgroups, one below the other."""
    emit = Emitter(arg.operands)
    rows_end = plan.call.packed and plan.slopes is None
    visible = Viewers(plan.traced, emit, arg.seqlen_q, arg.seqlen_k, rows_end)
    score_tile = [2 * TILE_ROWS, TILE_ROWS]
    return SimpleNamespace(
        task=T.alloc_local([3], "int32"),
        first=at.first,
        # In shared memory, to save registers.
        share=T.alloc_shared([3], "int32", scope="shared") if plan.split else None,
        emit=emit,
        visible=visible,
        # [2 * 64, head_dim]: V, K
        keys=T.alloc_shared([2 * TILE_ROWS, plan.head_dim], plan.dtype),
        # [4 * 64, head_dim]: two stages of dO, two of Q
        rows=T.alloc_shared([4 * TILE_ROWS, plan.head_dim], plan.dtype),
        # [2, 64, 2 * 64]: P and dS, side by side
        weights=T.alloc_shared([2, TILE_ROWS, 2 * TILE_ROWS], plan.dtype),
        # [2 * 64]
        lse2=T.alloc_shared([2 * TILE_ROWS], "float32"),
        delta=T.alloc_shared([2 * TILE_ROWS], "float32"),
        # [2 * 64, 64]
        acc_s=T.alloc_fragment(score_tile, "float32"),
        acc_dp=T.alloc_fragment(score_tile, "float32"),
        kept=[T.alloc_fragment(score_tile, "float32") for _ in plan.kept],
        narrow=T.alloc_fragment(score_tile, plan.dtype),
        # [2 * 64, head_dim]: dV, dK
        acc=T.alloc_fragment([2 * TILE_ROWS, plan.head_dim], "float32"),
        scores=tile.score_tile(plan, arg, emit, visible, score_tile, keys_first=False),
        eight=T.alloc_local([8], plan.dtype),
        at=T.alloc_local([5], "int32"),
        full=T.alloc_local([2], "int32"),
        group=T.alloc_local([1], "int32"),
        thread=thread,
        uniform=at.uniform,
        **plan.alloc_barriers(),
    )
