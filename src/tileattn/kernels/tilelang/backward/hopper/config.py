"""Tile sizes of the Hopper backward kernels, and their limits; preferences.py chooses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from .....call.facts import AttentionCall
from .....variant.program import program
from .....variant.tile_loads import TileLoad
from ...architecture import ARCHITECTURES, padded_finely
from ..operand_gradients import ADDED, STORED, Path
from ..query_range import is_known
from .dq_order import RegisterOrder

CONSUMERS = 256
BLOCK_N = 128
# Registers per consumer thread that products can take; the others hold addresses and intermediate results.
MAIN_PRODUCTS, QUERIES_PRODUCTS = 228, 208


@dataclass(frozen=True)
class HopperBackwardConfig:
    """Tile sizes of the Hopper schedule.

    Attributes:
        block_M: rows of Q and dO in a tile.
        block_N: rows of K and V in a tile: 64 for each of the two consumer warpgroups.
        num_stages: tiles of Q, and of dO, in flight.
        ds_buffers: tiles of dS in shared memory. With 2, a warpgroup may write one while the other warpgroup still
            reads the other one. With 0, another kernel computes dq.
        late_dp: whether dP is computed after the probabilities, not along with the scores. This leaves registers for
            modifications.
        tile_stages: tiles in flight of a tensor that the modification reads tile by tile, such as a bias: 1, or as many
            as `num_stages`. With 0 each element is loaded where it is used.
        gradient_bytes: bytes per element of the tiles in which that tensor's gradient is written out by TMA. With 0
            each element is written out by itself.
        split: whether several blocks share the query heads of a group (shares/).
        adders: warps that add up dq: 1 for both warpgroups' halves, or one for each of the 2.
        stores_first: whether dS is stored before dV's product is started.
        words: see :func:`matrices.store_matrices`.
        mask_words: whether masked tiles hide scores by a bit for each (query_words.py).
        listed: whether tiles of queries are taken from lists (tile_lists.py) rather than from ranges.
        bits: whether mixed tiles of lists are hidden by bits that were made before (tile/mixed_bits.py).
        unpadded: whether S, dP, dV and dK are computed without most of the columns that pad the head dim: at head dim
            80 with 80 of 96, at 112 with 112 of 128.
    """

    block_M: int
    block_N: int = BLOCK_N
    num_stages: int = 2
    ds_buffers: int = 2
    late_dp: bool = False
    tile_stages: int = 0
    gradient_bytes: int = 0
    split: bool = False
    adders: int = 1
    stores_first: bool = False
    words: bool = False
    mask_words: bool = False
    listed: bool = False
    bits: bool = False
    unpadded: bool = False

    @property
    def adds_dq(self) -> bool:
        """Whether the kernel also adds up dq."""
        return self.ds_buffers > 0

    def order(self, call: AttentionCall) -> RegisterOrder:
        """The order of dq's sums."""
        return RegisterOrder(self.block_M, padded_finely(call.head_dim))

    @property
    def rows_apart(self) -> int:
        """The rows of a stage of lse2 or delta, in whole 128 bytes: a TMA copy must begin at such a multiple."""
        return -(-self.block_M // 32) * 32

    def copied(self, call: AttentionCall) -> tuple[TileLoad, torch.dtype] | None:
        """The tile load whose tiles are copied, and its dtype."""
        return program(call.variant).copied_tile if self.tile_stages else None

    def shared_bytes(self, call: AttentionCall) -> int:
        """Shared memory of one block: K, V; the stages of Q, dO, lse2, delta; tiles; dS; dq's sums; keys' ranges of
        queries; barriers.
        """
        head_dim, head_dim_v = padded_finely(call.head_dim), padded_finely(call.head_dim_v)
        keys = 2 * self.block_N * (head_dim + head_dim_v)
        queries = self.num_stages * (2 * self.block_M * (head_dim + head_dim_v) + 8 * self.rows_apart)
        sums = 4 * self.block_M * head_dim if self.adds_dq else 0
        copied = self.copied(call)
        per_score = 0 if copied is None else self.tile_stages * copied[1].itemsize + self.gradient_bytes
        tiles = self.block_M * self.block_N * per_score
        ranges = 8 * self.block_N if self.mask_words else 0
        return keys + queries + tiles + 2 * self.ds_buffers * self.block_N * self.block_M + sums + ranges + 1024

    def used_columns(self, call: AttentionCall) -> dict[int, int]:
        """For each width of the tiles of Q, K, V and dO the columns that products take: whole steps of 16."""
        used: dict[int, int] = {}
        for head_dim in (call.head_dim, call.head_dim_v) if self.unpadded else ():
            width = padded_finely(head_dim)
            used[width] = max(used.get(width, 0), -(-head_dim // 16) * 16)
        return {width: columns for width, columns in used.items() if columns < width}

    def products(self, call: AttentionCall) -> int:
        """Registers per thread for dK, dV, S, dP, and P in 16 bits."""
        columns = 2 * (padded_finely(call.head_dim) + padded_finely(call.head_dim_v)) + 5 * self.block_M
        return columns * self.block_N // 2 // CONSUMERS

    def is_valid(self, call: AttentionCall) -> bool:
        """Whether it fits the call: sm_90a, aligned tensors, registers, shared memory."""
        return (
            call.arch == "sm_90a"
            and call.aligned
            and call.dtype.itemsize == 2
            and self.products(call) <= MAIN_PRODUCTS
            and self.block_M % 16 == 0
            and (not self.stores_first or self.ds_buffers == 2)
            and (not self.mask_words or is_known(program(call.variant)))
            and self.tile_stages in ((0,) if program(call.variant).copied_tile is None else (0, 1, self.num_stages))
            and (not self.adds_dq or self.order(call).is_valid())
            and self.shared_bytes(call) <= ARCHITECTURES["sm_90a"].shared_bytes
        )


@dataclass(frozen=True)
class HopperWideConfig:
    """The Hopper schedule for dk and dv of wide heads. Its tiles are 64 queries by 64 keys.

    Attributes:
        late_dp, listed, split: see :class:`HopperBackwardConfig`.
    """

    late_dp: bool = False
    listed: bool = False
    split: bool = False
    block_M: ClassVar[int] = 64
    block_N: ClassVar[int] = 64
    adds_dq: ClassVar[bool] = False
    mask_words: ClassVar[bool] = False
    bits: ClassVar[bool] = False

    def head_dim(self, call: AttentionCall) -> int:
        """The columns of tiles, for both head dims: whole panels of 64."""
        return -(-max(call.head_dim, call.head_dim_v) // 64) * 64

    def shared_bytes(self, call: AttentionCall) -> int:
        """Shared memory of one block: K, V, two stages of Q and dO; P and dS, lse2 and delta of each; barriers."""
        return 12 * 64 * self.head_dim(call) + 2 * 4 * 64 * 64 + 4 * 4 * 64 + 1024

    def is_valid(self, call: AttentionCall) -> bool:
        """Whether it fits the call: sm_90a, aligned tensors, equal head dims, shared memory."""
        return (
            call.arch == "sm_90a"
            and call.aligned
            and call.dtype.itemsize == 2
            and min(call.head_dim, call.head_dim_v) > self.head_dim(call) - 64
            and self.shared_bytes(call) <= ARCHITECTURES["sm_90a"].shared_bytes
        )


@dataclass(frozen=True)
class HopperQueriesConfig:
    """Tile sizes of the Hopper schedule for dq alone.

    Attributes:
        block_N: rows of K and V in a tile.
        k_stages: tiles of K in flight. A tile of K is used again for dq, during the next tile's products.
        v_stages: tiles of V in flight.
        block_M: rows of Q and dO: 64 for each of the two consumer warpgroups.
        tile_stages: tiles in flight of a tensor that the modification reads tile by tile, such as a bias: `k_stages` or
            `v_stages`. With 0 each element is loaded where it is used.
        settles: whether all exponentials are computed before dP is awaited (:func:`scores.settle`).
        listed: whether tiles of keys are taken from lists (tile_lists.py) rather than from ranges.
    """

    block_N: int
    k_stages: int = 2
    v_stages: int = 2
    block_M: int = 128
    tile_stages: int = 0
    settles: bool = False
    listed: bool = False

    def copied(self, call: AttentionCall) -> tuple[TileLoad, torch.dtype] | None:
        """The tile load whose tiles are copied, and its dtype."""
        return program(call.variant).copied_tile if self.tile_stages else None

    def shared_bytes(self, call: AttentionCall) -> int:
        """Shared memory of one block: Q, dO; the stages of K, V and a tile; barriers."""
        head_dim, head_dim_v = padded_finely(call.head_dim), padded_finely(call.head_dim_v)
        queries = 2 * self.block_M * (head_dim + head_dim_v)
        copied = self.copied(call)
        tile = 0 if copied is None else self.tile_stages * self.block_M * copied[1].itemsize
        return queries + self.block_N * (2 * (self.k_stages * head_dim + self.v_stages * head_dim_v) + tile) + 1024

    def products(self, call: AttentionCall, kept: int = 0) -> int:
        """Registers per thread for dQ, S, dP, dS in 16 bits, and `kept` derivatives that are kept beside S."""
        return (2 * padded_finely(call.head_dim) + (5 + 2 * kept) * self.block_N) * self.block_M // 2 // CONSUMERS

    def is_valid(self, call: AttentionCall) -> bool:
        """Whether it fits the call: sm_90a, aligned tensors, registers, shared memory."""
        return (
            call.arch == "sm_90a"
            and call.aligned
            and call.dtype.itemsize == 2
            and self.products(call) <= QUERIES_PRODUCTS
            and self.k_stages >= 2
            and self.tile_stages in (0, self.k_stages, self.v_stages)
            and (self.tile_stages == 0 or program(call.variant).copied_tile is not None)
            and self.block_N % 16 == 0
            and self.shared_bytes(call) <= ARCHITECTURES["sm_90a"].shared_bytes
        )


def leaving(config: Any, call: AttentionCall, paths: tuple[Path, ...]) -> tuple[int, torch.dtype] | None:
    """The path whose gradient is written out by TMA, and the dtype of its tiles; None for none.

    Only :class:`HopperBackwardConfig` has one.
    """
    if not isinstance(config, HopperBackwardConfig) or not config.gradient_bytes or config.copied(call) is None:
        return None
    return path_of_tile(call, paths)


def path_of_tile(call: AttentionCall, paths: tuple[Path, ...]) -> tuple[int, torch.dtype] | None:
    """The path to the tensor whose tiles can be copied, and the dtype of its gradient's tiles.

    None if there is no such tensor, or its gradient cannot be written out tile by tile.
    """
    copied = program(call.variant).copied_tile
    for index, path in enumerate(paths):
        if copied is not None and str(path.load) == copied[0].text and path.way in (STORED, ADDED):
            return index, copied[1] if path.way == STORED else torch.float32
    return None
