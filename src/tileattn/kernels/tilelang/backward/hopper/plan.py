"""Plans of the Hopper kernels (their static facts), and the tiles, barriers and numbers of the kernel for keys."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import tilelang.language as T

from .....call.facts import AttentionCall
from .....variant.program import Program
from ...architecture import padded_finely
from ...tile.hopper import WARP, WARPGROUP, slices
from ...tile.key_words import alloc_words
from .. import tile
from ..operand_gradients import BY_KEY, Path
from ..plan import BackwardPlan
from ..query_range import is_exact, reads_memory
from ..visible import Viewers
from .config import CONSUMERS, HopperBackwardConfig, leaving
from .dq_order import COLUMNS
from .stages import Ring

# Named barriers of the kernel for keys; 0 is __syncthreads.
DS_WRITTEN, DS_READ = 1, 2

# Indices of the task of a block that owns keys: batch element, kv head, and the first key of its tile.
BATCH, KV_HEAD, KEY = range(3)
# Of its share of the heads of a group, where these are split: the number of its parts of dk and dv among those of all
# shares, the first query head, and how many heads there are.
PARTS, FIRST_HEAD, HEADS = range(3)

# Indices of a warpgroup's state: stage and parity of Q and dO, buffer of dS, parity of dQ's buffer.
STAGE, PARITY, DS, DQ_PARITY = range(4)


class TilePlan(BackwardPlan):
    """The static facts of a kernel that may copy tiles of a tensor that the modification reads.

    Attributes:
        copied, copied_dtype: the tile load (of a bias, say) whose tiles are copied, and its dtype; or None.
        copied_once: whether only one block reads each of these tiles, so that the L2 cache need not keep them.
        tile_in_registers: whether these tiles are loaded to registers.
    """

    keys_first: bool  # whether the rows of a tile of scores are keys

    def __init__(self, call: AttentionCall, config: Any, traced: Program, paths: tuple[Path, ...] = ()) -> None:
        super().__init__(call, config, traced, paths)
        self.block_M, self.block_N, self.listed = config.block_M, config.block_N, config.listed
        self.head_dim, self.head_dim_v = padded_finely(call.head_dim), padded_finely(call.head_dim_v)
        self.copied, self.copied_dtype = config.copied(call) or (None, None)
        self.copied_once = self.copied is not None and all(map(self.copied.differs_by, "hb"))
        self.tile_in_registers = self.copied is not None

    @property
    def score_tile(self) -> list[int]:
        """The shape of a tile of scores."""
        return [self.block_N, self.block_M] if self.keys_first else [self.block_M, self.block_N]


class KeysPlan(TilePlan):
    """The static facts of the kernel for dk, dv and dq's sums.

    Attributes:
        paths: the paths to the tensors whose gradients are wanted.
        sums_by_key: numbers the paths whose gradients are summed by key.
        tile_in_registers: true for copied tiles of 16-bit elements, which ldmatrix transposes.
        tile_is_recomputed: whether a derivative that is recomputed reads the copied tile again.
        leaving, leaving_dtype: the index of the path whose gradient is written out by TMA, tile by tile, and the dtype
            of its tiles; or None.
        batch_first: whether neighbours in the grid are batch elements, not heads, so that they share copied tiles.
        adds_dq: whether this kernel adds up dq.
        order: the order of dq's sums.
        sum_rows: the rows of 256 sums in a tile.
        keeps_ranges: whether the queries' range of each key is kept in shared memory for `mask_words`.
        bits: whether mixed tiles have bits that were made before.
    """

    keys_first = True

    def __init__(
        self, call: AttentionCall, config: HopperBackwardConfig, traced: Program, paths: tuple[Path, ...], adds_dq: bool
    ) -> None:
        super().__init__(call, config, traced, paths)
        self.paths, self.adds_dq, self.stages = paths, adds_dq, config.num_stages
        self.split = config.split
        self.tile_in_registers = self.copied is not None and self.copied_dtype.itemsize == 2
        self.tile_is_recomputed = self.copied is not None and self.slopes.is_recomputed(self.copied.text)
        self.leaving, self.leaving_dtype = leaving(config, call, paths) or (None, None)
        by_head, by_batch = (self.copied is not None and self.copied.differs_by(symbol) for symbol in "hb")
        self.batch_first = by_head and not by_batch and not call.packed
        by_key = [index for index, path in enumerate(paths) if path.way == BY_KEY]
        self.sums_by_key = {index: number for number, index in enumerate(by_key)}
        self.order = config.order(call)
        self.sum_rows = self.order.size // COLUMNS
        self.mask_words, self.bits = config.mask_words, config.bits
        self.keeps_ranges = config.mask_words and (reads_memory(traced) or not is_exact(traced))

    def alloc_barriers(self) -> dict[str, Any]:
        """All barriers, by name, in one array; see tile/hopper.py."""
        return slices(
            T.alloc_barrier,
            {
                "kv_ready": [WARP],
                "q_ready": [WARP] * self.stages,
                "q_free": [2] * self.stages,
                "do_ready": [WARP] * self.stages,
                "do_free": [2] * self.stages,
                "dq_ready": [WARPGROUP] * 2,
                "dq_free": [WARP] * 2,
                "gradient_ready": [WARPGROUP] * 2 if self.leaving is not None else [],
                "gradient_free": [WARP] * 2 if self.leaving is not None else [],
                "tile_ready": [WARP] * self.config.tile_stages,
                "tile_free": [CONSUMERS // WARP] * self.config.tile_stages,
            },
        )


class Row:
    """One row of a buffer."""

    def __init__(self, buffer: Any, row: Any) -> None:
        self._buffer, self._row = buffer, row

    def __getitem__(self, index: Any) -> Any:
        return self._buffer[self._row, index]


class RowsOfHead:
    """The results of :func:`find_rows` in a packed call. The last two are in shared memory, to save registers.

    In a dense call ptxas needs no registers for them: it recomputes them from the kernel's parameters.
    """

    def __init__(self) -> None:
        self._registers = T.alloc_local([2], "int32")
        self._shared = T.alloc_shared([2], "int32", scope="shared")

    def __getitem__(self, index: int) -> Any:
        return self._registers[index] if index < 2 else self._shared[index - 2]

    def __setitem__(self, index: int, value: Any) -> None:
        # All threads write the same value.
        buffer, place = (self._registers, index) if index < 2 else (self._shared, index - 2)
        T.buffer_store(buffer, value, [place])


def allocate(plan: KeysPlan, arg: Any, at: Any, thread: Any) -> SimpleNamespace:
    """A block's tiles, barriers and numbers."""
    emit = tile.TileEmitter(arg.operands)
    # Beyond a sequence's last row lse2 is +inf and Q is 0, so no mask is needed unless a modification may be NaN there.
    rows_end = plan.call.packed and plan.slopes is None
    visible = Viewers(plan.traced, emit, arg.seqlen_q, arg.seqlen_k, rows_end)
    dq_sums = plan.adds_dq
    w = SimpleNamespace(
        task=T.alloc_local([3], "int32"),
        first=at.first,
        # In shared memory, to save registers.
        share=T.alloc_shared([3], "int32", scope="shared") if plan.split else None,
        emit=emit,
        visible=visible,
        # [block_N, head_dim]
        k=T.alloc_shared([plan.block_N, plan.head_dim], plan.dtype),
        # [block_N, head_dim_v]
        v=T.alloc_shared([plan.block_N, plan.head_dim_v], plan.dtype),
        # [stages, block_M, head_dim]
        q=T.alloc_shared([plan.stages, plan.block_M, plan.head_dim], plan.dtype),
        # [stages, block_M, head_dim_v]
        do=T.alloc_shared([plan.stages, plan.block_M, plan.head_dim_v], plan.dtype),
        # [stages, block_M], with padding between the rows
        lse2=T.alloc_shared([plan.stages, plan.config.rows_apart], "float32"),
        delta=T.alloc_shared([plan.stages, plan.config.rows_apart], "float32"),
        # [ds_buffers, block_M, block_N]
        shared_ds=T.alloc_shared([plan.config.ds_buffers, plan.block_M, plan.block_N], plan.dtype) if dq_sums else None,
        # [block_M * head_dim / 256, 256], in the order of dq_order.py
        dq_sum=T.alloc_shared([plan.sum_rows, COLUMNS], "float32") if dq_sums else None,
        # [block_N, block_M]
        acc_s=T.alloc_fragment(plan.score_tile, "float32"),
        acc_dp=T.alloc_fragment(plan.score_tile, "float32"),
        kept=[T.alloc_fragment(plan.score_tile, "float32") for _ in plan.kept],
        p=T.alloc_fragment(plan.score_tile, plan.dtype),
        ds=T.alloc_fragment(plan.score_tile, plan.dtype),
        # [block_N, head_dim_v]
        acc_dv=T.alloc_fragment([plan.block_N, plan.head_dim_v], "float32"),
        # [block_N, head_dim]
        acc_dk=T.alloc_fragment([plan.block_N, plan.head_dim], "float32"),
        # [block_M, head_dim], or transposed
        acc_dq=T.alloc_fragment(list(plan.order.shape), "float32") if dq_sums else None,
        # [block_N]
        sums=[T.alloc_fragment([plan.block_N], "float32") for _ in plan.sums_by_key],
        tile_sum=T.alloc_fragment([plan.block_N], "float32"),
        scores=tile.score_tile(
            plan, arg, emit, visible, plan.score_tile, keys_first=True, lengths=(arg.seqlen_q, arg.seqlen_k)
        ),
        # [block_N, 4], a word for each of a thread's keys
        query_words=alloc_words(*plan.score_tile) if plan.mask_words or plan.bits else [],
        # [block_N, 2]: of each key, the first row of queries that sees it, and the one behind the last
        query_ranges=T.alloc_shared([plan.block_N, 2], "int32", scope="shared") if plan.keeps_ranges else None,
        eight=T.alloc_local([8], plan.dtype),
        at=T.alloc_local([4], "int32"),
        rows=RowsOfHead() if plan.call.packed else T.alloc_local([4], "int32"),
        thread=thread,
        uniform=at.uniform,
        **plan.alloc_barriers(),
    )
    w.ring = Ring((w.at, STAGE), (w.at, PARITY), plan.stages, "last")
    return w
