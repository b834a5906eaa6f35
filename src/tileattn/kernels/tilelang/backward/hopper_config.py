"""How the Hopper schedule of the backward pass cuts its work."""

from __future__ import annotations

from dataclasses import dataclass

from ....call import AttentionCall
from ..config import ARCHITECTURES, padded
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
