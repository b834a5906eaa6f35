"""Tile sizes of the Hopper backward kernels, their limits, and the preferences of a call."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from .....call.facts import CAUSAL, AttentionCall
from .....variant.derivative import derivative
from .....variant.expression import Expr, nodes, symbol
from .....variant.program import program
from .....variant.tile_loads import TileLoad
from ...architecture import ARCHITECTURES, padded_finely
from ...tile.steady import is_uniform
from ..operand_gradients import ADDED, BY_KEY, STORED, Path
from ..slopes import slope_program
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
        """Shared memory of one block: K, V; the stages of Q, dO, lse2, delta; tiles; dS; dq's sums; barriers."""
        head_dim, head_dim_v = padded_finely(call.head_dim), padded_finely(call.head_dim_v)
        keys = 2 * self.block_N * (head_dim + head_dim_v)
        queries = self.num_stages * (2 * self.block_M * (head_dim + head_dim_v) + 8 * self.rows_apart)
        sums = 4 * self.block_M * head_dim if self.adds_dq else 0
        copied = self.copied(call)
        per_score = 0 if copied is None else self.tile_stages * copied[1].itemsize + self.gradient_bytes
        tiles = self.block_M * self.block_N * per_score
        return keys + queries + tiles + 2 * self.ds_buffers * self.block_N * self.block_M + sums + 1024

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
            and self.tile_stages in ((0,) if program(call.variant).copied_tile is None else (0, 1, self.num_stages))
            and (not self.adds_dq or self.order(call).is_valid())
            and self.shared_bytes(call) <= ARCHITECTURES["sm_90a"].shared_bytes
        )


@dataclass(frozen=True)
class HopperWideConfig:
    """The Hopper schedule for dk and dv of wide heads. Its tiles are 64 queries by 64 keys.

    Attributes:
        late_dp: see :class:`HopperBackwardConfig`.
    """

    late_dp: bool = False
    block_M: ClassVar[int] = 64
    block_N: ClassVar[int] = 64
    adds_dq: ClassVar[bool] = False

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
    """

    block_N: int
    k_stages: int = 2
    v_stages: int = 2
    block_M: int = 128
    tile_stages: int = 0
    settles: bool = False

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


def hopper_preferences(
    call: AttentionCall, paths: tuple[Path, ...], adds_dq: bool
) -> Iterator[HopperBackwardConfig | HopperWideConfig]:
    """Configurations from the best down; the first that is valid counts.

    Args:
        call: the forward call, aligned if all tensors that the kernel reads are.
        paths: the paths to the tensors whose gradients are wanted.
        adds_dq: whether the kernel may add up dq; wide heads leave no registers for it.
    """
    if max(padded_finely(call.head_dim), padded_finely(call.head_dim_v)) > 128:
        yield from _wide(call, paths)
        return
    for config in _narrow(call, paths, adds_dq):
        if _used_columns(call):
            config = dataclasses.replace(config, unpadded=True)
        yield from _with_tiles(call, paths, config if adds_dq else _without_dq(config))


def _with_tiles(
    call: AttentionCall, paths: tuple[Path, ...], config: HopperBackwardConfig
) -> Iterator[HopperBackwardConfig]:
    """Variants of a configuration with copied tiles, of a bias, say: most tiles in flight first, last with none."""
    if program(call.variant).copied_tile is not None:
        leaves = path_of_tile(call, paths)
        of_gradient = leaves[1].itemsize if leaves else 0
        fewer = (block_M for block_M in (48, 32) if block_M < config.block_M)
        for block_M in (config.block_M, *fewer):
            for ds_buffers, stages in ((config.ds_buffers, config.num_stages), (config.ds_buffers, 1), (1, 1)):
                yield dataclasses.replace(
                    config,
                    block_M=block_M,
                    ds_buffers=min(ds_buffers, config.ds_buffers),
                    tile_stages=stages,
                    gradient_bytes=of_gradient,
                )
    yield config


def _wide(call: AttentionCall, paths: tuple[Path, ...]) -> Iterator[HopperBackwardConfig | HopperWideConfig]:
    """Of wide heads: none if tensors' gradients are wanted, or more than one derivative is kept beside S and dP."""
    score = program(call.variant).score
    kept = _kept(score)
    if paths or kept > (0 if call.dropout else 1):
        return
    # H100, head dim 160: 1.02 to 1.09 of the other's speed, where it has registers for both.
    yield from _with_tiles(call, paths, HopperBackwardConfig(32, num_stages=4, ds_buffers=0, late_dp=kept > 0))
    if not _reads(score):
        yield HopperWideConfig(late_dp=kept > 0)


def _narrow(call: AttentionCall, paths: tuple[Path, ...], adds_dq: bool) -> Iterator[HopperBackwardConfig]:
    widest = max(padded_finely(call.head_dim), padded_finely(call.head_dim_v))
    score, fetches = program(call.variant).score, _fetches(call)
    # Dropout, and derivatives kept beside P, dP, dK and dV, leave registers for fewer queries.
    if call.dropout and widest > 64 and (paths or _bends(score)):
        yield HopperBackwardConfig(32 if paths and _bends(score) else 48, late_dp=True)
    if paths and widest > 64:
        yield HopperBackwardConfig(32 if _bends(score) else 48 if _crowded(call, paths) else 64, late_dp=True)
    if paths or _bends(score) or fetches:
        yield HopperBackwardConfig(64, late_dp=bool(paths))
    elif widest <= 64:
        yield HopperBackwardConfig(128, late_dp=_slants(score), **_exchange(call))
    elif not call.dropout and (call.variant == "" or (call.variant == CAUSAL and not call.packed)):
        # Evaluating other masks takes registers; packed sequences are mostly short (see `short_default`). Head dim 112,
        # causal: 64 queries are 2 % faster if padding is left out (H100).
        if call.variant == "" or not adds_dq or _used_columns(call) != {128: 112}:
            yield HopperBackwardConfig(80, **_exchange(call))
    yield HopperBackwardConfig(64, **_exchange(call))


def _used_columns(call: AttentionCall) -> dict[int, int]:
    """The columns that products take if padding is left out; empty if they take whole tiles."""
    return HopperBackwardConfig(64, unpadded=True).used_columns(call)


def _exchange(call: AttentionCall) -> dict[str, Any]:
    """How dS and dQ go through shared memory, in the dense calls where it was measured (docs/design/backward.md)."""
    dims = (padded_finely(call.head_dim), padded_finely(call.head_dim_v))
    if call.packed or call.dropout or call.variant not in ("", CAUSAL):
        return {}
    if dims == (64, 64):
        return {"adders": 2, "words": call.variant == ""}
    # At head dim 96 it gains nothing (H100: 0.99); without the padding of 80 it does.
    gains = dims == (128, 128) or (dims == (96, 96) and _used_columns(call) != {})
    return {"adders": 2, "stores_first": True, "words": True} if gains and call.variant == "" else {}


def plainest(config: HopperBackwardConfig) -> HopperBackwardConfig:
    """The same tiles for blocks that share groups (shares/), without ways of exchange that gained nothing there.

    That of head dim 64 without a mask gained 4 %, that of 128 lost 2 % (H100); others were not measured.
    """
    gains = config.words and not config.stores_first
    return config if gains else dataclasses.replace(config, adders=1, stores_first=False, words=False)


def _without_dq(config: HopperBackwardConfig) -> HopperBackwardConfig:
    """The same tiles if another kernel computes dq: dS is not exchanged."""
    return dataclasses.replace(config, ds_buffers=0, adders=1, stores_first=False, words=False)


def queries_preferences(call: AttentionCall) -> Iterator[HopperQueriesConfig]:
    """The same for the kernel for dq alone: the largest tiles of keys whose products fit into registers first."""
    score, copied = program(call.variant).score, program(call.variant).copied_tile
    kept = _kept(score)
    # 1 to 3 % less time of a pass at head dim 192, none at 256 and 160 (docs/design/backward.md).
    plain = call.variant in ("", CAUSAL) and not call.dropout and not call.packed
    settles = plain and (call.head_dim, call.head_dim_v) in ((192, 128), (192, 192))
    for tile_stages in (2, 1, 0) if copied is not None else (0,):
        reads = _reads(score) if tile_stages == 0 else _fetches(call)
        largest = 128 if score is None else 48 if kept and reads else 64
        for block_N in range(largest, 0, -16):
            for v_stages in (2, 1):
                config = HopperQueriesConfig(block_N, v_stages=v_stages, tile_stages=tile_stages, settles=settles)
                if config.products(call, kept) <= QUERIES_PRODUCTS:
                    yield config


def _kept(score: Any) -> int:
    """The number of derivatives kept beside S if no tensors' gradients are wanted."""
    return 0 if score is None else len(_derivatives(score, ()))


def _derivatives(score: Any, paths: tuple[Path, ...]) -> tuple[Any, ...]:
    """The derivatives that are kept beside S."""
    return slope_program(score, tuple(path.load for path in paths), hardware_tanh=True).kept


def _crowded(call: AttentionCall, paths: tuple[Path, ...]) -> bool:
    """Whether the tensors' gradients take more registers than the scores' gradients.

    For example, a copied tile that multiplies the score stays in registers until the slope is computed.
    """
    traced = program(call.variant)
    multiplies = traced.copied_tile is not None and len(_derivatives(traced.score, paths)) > 0
    return any(path.way == BY_KEY for path in paths) or len(paths) > 1 or multiplies


def _reads(score: Any) -> bool:
    """Whether a modification reads memory for each score."""
    return any(node.op == "load" and not is_uniform(node) for node in nodes(score))


def _fetches(call: AttentionCall) -> bool:
    """Whether a modification reads memory for each score, other than the tensor whose tiles are copied."""
    traced = program(call.variant)
    copied = traced.copied_tile[0].text if traced.copied_tile else None
    return any(node.op == "load" and not is_uniform(node) and str(node) != copied for node in nodes(traced.score))


def _slants(score: Any) -> bool:
    """Whether a modification adds positions times constants, which nvcc keeps in registers that dP's product needs."""
    slope = derivative(score, symbol("score"))
    if score is None or isinstance(slope, Expr) or slope != 1.0:
        return False
    products = [node.args for node in nodes(score) if node.op == "mul" and node.dtype == "float"]
    return any(isinstance(x, float) and not is_uniform(y) for xy in products for x, y in (xy, xy[::-1]))


def _bends(score: Any) -> bool:
    """Whether a modification's slope depends on the score."""
    slope = derivative(score, symbol("score"))
    return any(node.op == "symbol" and node.args[0] == "score" for node in nodes(slope))
