"""The static facts of a Hopper forward kernel: sizes, roles, barriers, and which tiles are copied; see kernel.py."""

from __future__ import annotations

import tilelang.language as T
import torch

from .....call.facts import AttentionCall
from .....call.fp8 import FP8
from .....variant.program import Program
from ...architecture import panel
from ...tile.hopper import WARP, WARPGROUP, Barriers, slices
from ...tile.key_range import key_range
from ...tile.mask import Score
from ..config import HopperConfig, hopper_dims

# A message's integers (tasks.py).
FIELDS, PACKED_FIELDS = 8, 12

# A cluster's blocks, by rank: the leader draws tasks and loads K and V for both.
LEADER, FOLLOWER = 0, 1

# Weights in e4m3 are stored 2^FP8_SHIFT times as large. With a rescale threshold of at most 4 they stay below 2^8; the
# largest number of e4m3 is 448.
FP8_SHIFT = 4.0


class HopperPlan:
    """The static facts of one kernel, from which the macros of producer and consumers choose what they emit.

    Attributes:
        block_M, block_N, stages, head_dim, head_dim_v: sizes of the tiles, as they lie in shared memory.
        consumers, warpgroups: threads and warpgroups that compute.
        ping_pong, output_apart: as in :class:`HopperConfig`, where they apply.
        shift: of the softmax's exponents, for fp8.
        bounded: whether scores are within the modification's own bounds, so that the softmax needs no maximum.
        masks_inside: whether more than the last tile of keys can be masked (it may end beyond seqlen_k).
        from_first_key: whether the mask's ranges of keys begin at key 0 for all queries. Then the tiles do, too.
        key_step: tiles of keys begin at the first key that is visible, or before it at a multiple of this. From the
            first key itself a task takes half a tile less on average, and documents no mask at the left.
        listed: whether tiles are taken from lists; they begin at key 0 then.
        bits: whether mixed tiles have bits that were made before.
        keys: the range of keys that each query sees, if the mask leaves one and bits are to say which; else None.
        score: the score modification, or None.
        copied, copied_dtype: the tile load whose tiles, such as a bias's, the producer copies with K's, and its dtype;
            or None.
        tile_in_words: whether consumers keep two elements of such a tile in one register.
        batch_first: whether neighbours in the queue are batch elements rather than heads, to share those tiles.
        copied_once: whether each of these tiles is read once, so that it need not stay in the L2 cache.
        panel: columns of O that one TMA store takes.
        cluster, rows: blocks that share keys, and the queries of one task.
        packed: whether sequences are packed.
        recalls: whether consumers read a message once more when its task ends.
        fields, messages: how many integers a message has, and how many messages there are.
        everyone: mask of the cluster's blocks, which a load of K or V reaches; None without a cluster.
    """

    def __init__(self, call: AttentionCall, config: HopperConfig, traced: Program) -> None:
        self.call, self.config, self.traced = call, config, traced
        self.block_M, self.block_N, self.stages = config.block_M, config.block_N, config.num_stages
        self.size = call.dtype.itemsize
        self.head_dim, self.head_dim_v = hopper_dims(call)
        self.dtype, self.out_dtype = (str(kind).removeprefix("torch.") for kind in (call.dtype, call.out_dtype))
        self.fp8 = call.dtype == FP8
        self.shift = FP8_SHIFT if self.fp8 else 0.0
        self.v_tile = [self.head_dim_v, self.block_N] if self.fp8 else [self.block_N, self.head_dim_v]
        self.consumers = config.consumer_threads()
        self.warpgroups = self.consumers // WARPGROUP
        self.ping_pong = config.ping_pong and self.warpgroups > 1
        self.output_apart = config.output_apart(call)
        self.score = Score(call, traced) if traced.score is not None else None
        capped = self.score is not None and self.score.is_bounded
        self.bounded = capped and call.dtype == torch.bfloat16 and traced.copied_tile is None
        self.masks_inside = traced.allows is not None
        self.from_first_key = isinstance(traced.kv_range[0], int) and traced.kv_range[0] <= 0
        self.listed, self.bits = config.listed, config.bits
        self.keys = key_range(traced) if config.mask_words else None
        self.by_ranges = config.mask_words and self.keys is None
        self.copied, self.copied_dtype = traced.copied_tile or (None, None)
        # TMA reads rows from any one on, but columns of a tensor (a bias, V in fp8) in wholes of 16 bytes. And dropout
        # has a pattern of groups of 16 keys (tile/dropout.py).
        whole_tiles = self.fp8 or self.copied is not None or call.dropout
        self.key_step = self.block_N if whole_tiles else 1
        self.tile_in_words = self.copied_dtype == torch.bfloat16
        by_head, by_batch = (self.copied is not None and self.copied.differs_by(symbol) for symbol in "hb")
        self.batch_first = by_head and not by_batch
        self.copied_once = by_head and by_batch
        self.panel = panel(self.head_dim_v)
        self.cluster = config.cluster
        self.rows = self.cluster * self.block_M
        self.packed = call.packed
        self.fields = PACKED_FIELDS if call.packed else FIELDS
        # With Q in registers, none are left for the sequence's bounds through the loop: reading them again saves 12 of
        # its instructions. With Q in shared memory it would add up to 20.
        self.recalls = call.packed and config.q_in_registers
        self.messages = 4 if self.recalls else 2  # messages that are read again must not block the producer
        self.everyone = (1 << self.cluster) - 1 if self.cluster > 1 else None

    def alloc_barriers(self) -> dict[str, Barriers]:
        """All barriers, by name, one for each buffer; see kernel.py.

        In as few arrays as possible: ptxas recomputes an array's address wherever it is used, also in the inner loop.
        """
        own = {
            "message_ready": [1] * self.messages,
            "q_ready": [WARP],
            "q_free": [self.consumers],
            "k_ready": [WARP] * self.stages,
            "v_ready": [WARP] * self.stages,
            "tile_free": [self.consumers // WARP] * self.stages if self.copied is not None else [],
        }
        # Threads of the cluster's other block arrive on these too. (What it copies arrives on the others as bytes.)
        common = {
            "message_free": [self.cluster * (self.consumers + WARP)] * self.messages,
            "k_free": [self.cluster * self.warpgroups] * self.stages,
            "v_free": [self.cluster * self.warpgroups] * self.stages,
        }
        if self.cluster == 1:
            return slices(T.alloc_barrier, own | common)
        return slices(T.alloc_barrier, own) | slices(T.alloc_cluster_barrier, common)
