"""A kernel's grid: the order of tiles and heads (``tile_and_head`` in tile/tiles.py).

If all tiles of a head come one after another, the last heads' long tiles end alone. With heads side by side, and with
one kernel less, a backward pass of 4096 causal tokens took 4 to 10 % less time on an H200, one of 1024 6 to 15 %. A
forward pass of 1024 tokens took 4 to 8 % less, longer ones as long as before. With twice or four times as many bytes
long sequences took longer (benchmarks/results/triton/order-h200.txt). The grid has three dimensions so that a program
finds its tile without divisions: a backward pass takes up to 4 % less, a forward pass as long as before, or 2 % less
(1024 tokens, head dim 64; benchmarks/results/triton/grid-h200.txt).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...call.facts import AttentionCall

L2_BYTES = 16 * 2**20  # of what heads side by side read again and again, unless one reads more; an H200 has 50 MiB
MOST = 65535  # programs along the second dimension of a grid, and along the third


class Programs(NamedTuple):
    """Which programs a kernel has.

    Attributes:
        grid: heads side by side; tiles of each; groups of such heads. Of the last ones some have no head, or no tile.
        all_heads: of all batch elements.
        folds: in how many parts the tiles of a group are, where there are more than the second dimension may have.
        sizes: of the call, as the kernel takes them.
    """

    grid: tuple[int, int, int]
    all_heads: int
    folds: int
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, tiles: int, all_heads: int, side_by_side: int, *sizes: int) -> Programs:
        """The grid for so many tiles of each head."""
        folds = max(-(-tiles // MOST), 1)
        together = max(side_by_side, -(-all_heads // (MOST // folds)))
        return cls((together, -(-tiles // folds), -(-all_heads // together) * folds), all_heads, folds, sizes)

    @property
    def arguments(self) -> tuple[int, ...]:
        """The kernel's: sizes, all_heads, folds."""
        return *self.sizes, self.all_heads, self.folds


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

    def over_keys(self, call: AttentionCall, rows: int) -> Programs:
        """For a kernel with tiles of so many queries that walks over keys."""
        together = self.side_by_side(call, self.seqlen_k) * self.group
        sizes = self.seqlen_q, self.seqlen_k, self.heads, self.group
        return Programs.of(-(-self.seqlen_q // rows), self.batch * self.heads, together, *sizes)

    def over_queries(self, call: AttentionCall, rows: int) -> Programs:
        """For a kernel with tiles of so many keys that walks over queries."""
        together = self.side_by_side(call, self.seqlen_q * self.group)
        sizes = self.seqlen_q, self.seqlen_k, self.heads, self.kv_heads, self.group
        return Programs.of(-(-self.seqlen_k // rows), self.batch * self.kv_heads, together, *sizes)

    def of_queries(self, rows: int) -> Programs:
        """For a kernel with tiles of so many queries that reads nothing else."""
        all_heads = self.batch * self.heads
        return Programs.of(-(-self.seqlen_q // rows), all_heads, max(all_heads, 1), self.seqlen_q, self.heads)

    def side_by_side(self, call: AttentionCall, rows: int) -> int:
        """Heads of keys of which tiles run side by side; `rows` of q and do, or of k and v, are read for each.

        As many in each group as may be: 17 heads, of which 16 fit, are 9 and 8, and one program in 18 has none.
        """
        walked = rows * (call.head_dim + call.head_dim_v) * call.dtype.itemsize
        kv_heads = max(self.batch * self.kv_heads, 1)
        groups = -(-kv_heads // max(L2_BYTES // max(walked, 1), 1))
        return -(-kv_heads // groups)
