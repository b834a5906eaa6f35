"""How the Hopper schedule of the backward pass cuts its work."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ....call import AttentionCall
from ....derivative import derivative
from ....expr import nodes, symbol
from ....variant import program
from ..config import ARCHITECTURES, padded
from ..simplify import is_uniform
from .operands import BY_KEY, Path
from .order import RegisterOrder

CONSUMERS = 256
BLOCK_N = 128


@dataclass(frozen=True)
class HopperBackwardConfig:
    """Tiles of the Hopper schedule.

    Attributes:
        block_M: rows of Q and dO in a tile.
        block_N: rows of K and V in a tile: 64 for each of the two consumer warpgroups.
        num_stages: tiles of Q, and of dO, in flight.
        ds_buffers: tiles of dS in shared memory: with two, a warpgroup may write one while the other still reads.
        late_dp: whether dP is multiplied after the probabilities, not beside the scores: registers for modifications.
    """

    block_M: int
    block_N: int = BLOCK_N
    num_stages: int = 2
    ds_buffers: int = 2
    late_dp: bool = False

    def order(self, call: AttentionCall) -> RegisterOrder:
        """Of dq's sums."""
        return RegisterOrder(self.block_M, padded(call.head_dim))

    @property
    def rows_apart(self) -> int:
        """A stage of lse2 or delta: its rows, in whole 128 bytes, which a copy by TMA begins at."""
        return -(-self.block_M // 32) * 32

    def shared_bytes(self, call: AttentionCall) -> int:
        """Shared memory of one block: K, V; the stages of Q, dO, lse2 and delta; dS; dq's sums; barriers."""
        head_dim, head_dim_v = padded(call.head_dim), padded(call.head_dim_v)
        keys = 2 * self.block_N * (head_dim + head_dim_v)
        queries = self.num_stages * (2 * self.block_M * (head_dim + head_dim_v) + 8 * self.rows_apart)
        return keys + queries + 2 * self.ds_buffers * self.block_N * self.block_M + 4 * self.block_M * head_dim + 1024

    def is_valid(self, call: AttentionCall) -> bool:
        """Whether it fits the call: sm_90a, aligned tensors, shared memory, dims of up to 128."""
        return (
            call.arch == "sm_90a"
            and call.aligned
            and call.dtype.itemsize == 2
            and max(padded(call.head_dim), padded(call.head_dim_v)) <= 128
            and self.block_M % 16 == 0
            and self.order(call).is_valid()
            and self.shared_bytes(call) <= ARCHITECTURES["sm_90a"].shared_bytes
        )


@dataclass(frozen=True)
class HopperQueriesConfig:
    """Tiles of the Hopper schedule for dq alone.

    Attributes:
        block_N: rows of K and V in a tile.
        k_stages: tiles of K in flight: it is needed for dq once more, under the next tile's products.
        v_stages: tiles of V in flight.
        block_M: rows of Q and dO: 64 for each of the two consumer warpgroups.
    """

    block_N: int
    k_stages: int = 2
    v_stages: int = 2
    block_M: int = 128

    def shared_bytes(self, call: AttentionCall) -> int:
        """Shared memory of one block: Q, dO; the stages of K and V; barriers."""
        head_dim, head_dim_v = padded(call.head_dim), padded(call.head_dim_v)
        queries = 2 * self.block_M * (head_dim + head_dim_v)
        return queries + 2 * self.block_N * (self.k_stages * head_dim + self.v_stages * head_dim_v) + 1024

    def is_valid(self, call: AttentionCall) -> bool:
        """Whether it fits the call: sm_90a, aligned tensors, shared memory."""
        return (
            call.arch == "sm_90a"
            and call.aligned
            and call.dtype.itemsize == 2
            and max(padded(call.head_dim), padded(call.head_dim_v)) <= 256
            and self.k_stages >= 2
            and self.block_N % 16 == 0
            and self.shared_bytes(call) <= ARCHITECTURES["sm_90a"].shared_bytes
        )


def hopper_preferences(call: AttentionCall, paths: tuple[Path, ...]) -> Iterator[HopperBackwardConfig]:
    """Configurations from the best down; the first that is valid counts.

    Args:
        call: of the forward pass, aligned if all that the kernel reads is.
        paths: to the tensors whose gradients are wanted.
    """
    widest = max(padded(call.head_dim), padded(call.head_dim_v))
    score = program(call.variant).score
    # What is kept beside P, dP, dK and dV leaves registers for fewer queries only.
    if paths and widest > 64:
        yield HopperBackwardConfig(32 if _bends(score) else 48 if _crowded(paths) else 64, late_dp=True)
    if paths or _bends(score) or _reads(score):
        yield HopperBackwardConfig(64, late_dp=bool(paths))
    elif widest <= 64:
        yield HopperBackwardConfig(128)
    else:
        yield HopperBackwardConfig(80)
        yield HopperBackwardConfig(64)


def _crowded(paths: tuple[Path, ...]) -> bool:
    """Whether more is needed for the tensors' gradients than the scores' gradients as they are."""
    return any(path.way == BY_KEY for path in paths) or len(paths) > 1


def _reads(score: Any) -> bool:
    """Whether a modification reads memory for each score."""
    return any(node.op == "load" and not is_uniform(node) for node in nodes(score))


def _bends(score: Any) -> bool:
    """Whether a modification's slope depends on the score."""
    slope = derivative(score, symbol("score"))
    return any(node.op == "symbol" and node.args[0] == "score" for node in nodes(slope))
