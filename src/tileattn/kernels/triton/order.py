"""How many programs a kernel has, and how many heads they work on at a time (``tile_and_head`` in tiles.py).

With all tiles of a head behind one another the last heads' long tiles ended alone. Side by side, and with one kernel
less, a backward pass of 4096 causal tokens took 4 to 10 % less time on an H200, one of 1024 6 to 15 %. A forward pass
of 1024 tokens took 4 to 8 % less, longer ones as long as before. With twice or four times as many bytes long sequences
took longer (benchmarks/results/triton-order-h200-2026-11-22.txt).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...call import AttentionCall

L2_BYTES = 16 * 2**20  # of what these heads read again and again, unless one reads more; an H200 has 50 MiB


class Sizes(NamedTuple):
    """Of the tensors of a call."""

    batch: int
    seqlen_q: int
    seqlen_k: int
    heads: int
    kv_heads: int

    @classmethod
    def of(cls, q_shape: torch.Size, k_shape: torch.Size) -> Sizes:
        """From shapes (bshd)."""
        return cls(q_shape[0], q_shape[1], k_shape[1], q_shape[2], k_shape[2])

    @property
    def group(self) -> int:
        """Heads of queries for each of keys."""
        return self.heads // self.kv_heads

    def tiles_of_queries(self, rows: int) -> int:
        """In all heads."""
        return -(-self.seqlen_q // rows) * self.heads * self.batch

    def tiles_of_keys(self, rows: int) -> int:
        """In all heads."""
        return -(-self.seqlen_k // rows) * self.kv_heads * self.batch

    def over_keys(self, call: AttentionCall) -> tuple[int, ...]:
        """Arguments of a kernel that walks over keys: seqlen_q, seqlen_k, heads, heads_per_kv_head, side_by_side."""
        together = self.side_by_side(call, self.seqlen_k) * self.group
        return self.seqlen_q, self.seqlen_k, self.heads, self.group, together

    def over_queries(self, call: AttentionCall) -> tuple[int, ...]:
        """The same of a kernel that walks over queries, with kv_heads behind heads."""
        together = self.side_by_side(call, self.seqlen_q * self.group)
        return self.seqlen_q, self.seqlen_k, self.heads, self.kv_heads, self.group, together

    def side_by_side(self, call: AttentionCall, rows: int) -> int:
        """Heads of keys of which tiles run side by side; `rows` of q and do, or of k and v, are read for each."""
        walked = rows * (call.head_dim + call.head_dim_v) * call.dtype.itemsize
        return max(min(L2_BYTES // max(walked, 1), self.batch * self.kv_heads), 1)
