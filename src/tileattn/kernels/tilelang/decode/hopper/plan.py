"""The static facts of a Hopper decode kernel: sizes, roles, barriers; see kernel.py."""

from __future__ import annotations

import tilelang.language as T

from .....call.decoding import DecodeCall
from .....variant.program import Program
from ...architecture import padded, panel
from ...tile.hopper import WARP, Barriers, slices
from ..packed_rows import RowScore
from ..ranges import differs_by_head
from .config import BLOCK_M, CONSUMERS, HopperDecodeConfig, box_rows


class HopperDecodePlan:
    """The static facts of one kernel, from which the macros of producer and consumers choose what they emit.

    Attributes:
        block_M, block_N, stages, head_dim, head_dim_v: sizes of the tiles, as they lie in shared memory.
        consumers, producers, threads: threads of the consumer warpgroup, of the producer's warps, of both.
        query_rows_at_once: rows of Q that are loaded together.
        box_rows, boxes: rows that one TMA box copies, and boxes of one tile (of one panel of columns).
        panel_k, panel_v: columns that one TMA box copies.
        score: the score modification, or None.
        always_masked: whether the keys that all rows see are not known, so that each tile takes the mask.
    """

    def __init__(self, call: DecodeCall, config: HopperDecodeConfig, traced: Program) -> None:
        self.call, self.config, self.traced = call, config, traced
        self.block_M, self.block_N, self.stages = BLOCK_M, config.block_N, config.num_stages
        self.head_dim, self.head_dim_v = padded(call.head_dim), padded(call.head_dim_v)
        self.panel_k, self.panel_v = panel(self.head_dim), panel(self.head_dim_v)
        self.dtype = str(call.dtype).removeprefix("torch.")
        self.consumers, self.producers = CONSUMERS, WARP * config.producer_warps
        self.threads = config.threads
        self.gather = config.gather
        self.box_rows = box_rows(call, config)
        self.boxes = self.block_N // self.box_rows if not config.gather else 0
        # One copy of 16 bytes for each thread, where rows are such that they come out even; in whole swizzle atoms.
        vectors = self.head_dim // 8
        even = vectors & (vectors - 1) == 0
        self.query_rows_at_once = max(min(CONSUMERS // vectors, BLOCK_M), 8) if even else BLOCK_M
        self.score = RowScore(call, traced) if traced.score is not None else None
        self.always_masked = any(map(differs_by_head, traced.full_range))

    def alloc_barriers(self) -> dict[str, Barriers]:
        """All barriers, by name, one for each stage; see kernel.py."""
        counts = {
            "k_ready": [self.producers] * self.stages,
            "v_ready": [self.producers] * self.stages,
            "k_free": [1] * self.stages,
            "v_free": [1] * self.stages,
        }
        return slices(T.alloc_barrier, counts)
