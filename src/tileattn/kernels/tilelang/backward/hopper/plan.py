"""What the kernel for dk, dv and dq's sums on Hopper is built from: its static facts, and where a block stands.

See hopper.py for the algorithm.
"""

from __future__ import annotations

from typing import Any

import tilelang.language as T
from tvm import ir

from .....call.facts import AttentionCall
from .....variant.key import Program
from ...forward.config import padded
from ...forward.hopper.plan import WARP, WARPGROUP, _slices
from .. import tile
from ..operand_gradients import BY_KEY, Path
from .config import CONSUMERS, HopperBackwardConfig, leaving
from .dq_order import COLUMNS

# Named barriers; 0 is __syncthreads.
DS_WRITTEN, DS_READ = 1, 2

# The block's task: a tile of keys, by its first, of one kv head of one batch element.
BATCH, KV_HEAD, KEY = range(3)

# Where a warpgroup stands in the stages of Q and dO, in the buffers of dS, and in the uses of dQ's.
STAGE, PARITY, DS, DQ_PARITY = range(4)

PRODUCER_REGISTERS, CONSUMER_REGISTERS = 24, 240

_LDMATRIX = ir.Op.get("tl.ptx_ldmatrix")
_STMATRIX, _PACK = ir.Op.get("tl.ptx_stmatrix"), ir.Op.get("tl.pack_b16")


class Plan:
    """The static facts of one kernel, from which its macros choose what they emit.

    Attributes:
        slopes: the score modification and its derivatives, or None.
        early: indices of the derivatives that are kept beside the scores.
        paths: to the tensors whose gradients are wanted; `sums_by_key` numbers those that are summed by key.
        copied: the tile load whose tiles, such as a bias's, are copied, or None; and its dtype.
        tile_in_registers: whether they are taken to registers: those of 16 bits, which ldmatrix transposes.
        tile_is_late: whether a derivative that is computed late needs them once more.
        leaving: index of the path whose gradient leaves by TMA, tile by tile, or None; and the dtype of these tiles.
        batch_first: whether neighbours in the grid are batch elements rather than heads, to share those tiles.
        copied_once: whether nobody shares them, so that they need not stay in the L2 cache.
        adds_dq: whether dq is added up here.
        order: of dq's sums; `sum_rows`, of 256, are a tile's.
    """

    def __init__(
        self, call: AttentionCall, config: HopperBackwardConfig, traced: Program, paths: tuple[Path, ...], adds_dq: bool
    ) -> None:
        self.call, self.config, self.traced, self.paths, self.adds_dq = call, config, traced, paths, adds_dq
        self.block_M, self.block_N, self.stages = config.block_M, config.block_N, config.num_stages
        self.head_dim, self.head_dim_v = padded(call.head_dim), padded(call.head_dim_v)
        self.dtype = str(call.dtype).removeprefix("torch.")
        self.slopes = None
        if traced.score is not None:
            self.slopes = tile.Slopes(call, traced, tuple(path.load for path in paths))
        self.early = tuple(range(len(self.slopes.program.early))) if self.slopes else ()
        self.copied, self.copied_dtype = config.copied(call) or (None, None)
        self.tile_in_registers = self.copied is not None and self.copied_dtype.itemsize == 2
        self.tile_is_late = self.copied is not None and self.slopes.is_late(self.copied.text)
        self.leaving, self.leaving_dtype = leaving(config, call, paths) or (None, None)
        by_head, by_batch = (self.copied is not None and self.copied.differs_by(symbol) for symbol in "hb")
        self.batch_first = by_head and not by_batch and not call.packed
        self.copied_once = by_head and by_batch
        by_key = [index for index, path in enumerate(paths) if path.way == BY_KEY]
        self.sums_by_key = {index: number for number, index in enumerate(by_key)}
        self.order = config.order(call)
        self.sum_rows = self.order.size // COLUMNS

    def alloc_barriers(self) -> dict[str, Any]:
        """All barriers, by name, in one array; see forward/hopper/plan.py."""
        return _slices(
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
    """What :func:`find_rows` finds, in a packed call: the last two numbers in shared memory, for want of registers.

    Of a dense call all of them follow from parameters of the kernel, of which ptxas needs to keep nothing.
    """

    def __init__(self) -> None:
        self._registers = T.alloc_local([2], "int32")
        self._shared = T.alloc_shared([2], "int32", scope="shared")

    def __getitem__(self, index: int) -> Any:
        return self._registers[index] if index < 2 else self._shared[index - 2]

    def __setitem__(self, index: int, value: Any) -> None:
        # All threads write the same, and each reads what it has written itself.
        buffer, place = (self._registers, index) if index < 2 else (self._shared, index - 2)
        T.buffer_store(buffer, value, [place])
