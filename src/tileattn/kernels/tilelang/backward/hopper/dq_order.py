"""The order of dq's float32 sums in memory: one tile of queries after the other, each in the order of registers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

WARPGROUP = 128
# The columns of dq's sums in the Hopper kernels: the longest row of a bulk copy.
COLUMNS = 256


@dataclass(frozen=True)
class RegisterOrder:
    """The order in which the tensor cores leave a tile in the registers of two warpgroups.

    Each thread writes 16 bytes at a time. In this order, writing to shared memory has no bank conflicts. Until `finish`
    brings the sums into the order of q, they are only added to, so any order will do.

    A warp holds 16 rows of the product; a thread holds two columns of each eight, in two rows. The warpgroups divide
    the rows if there are 128, and the columns if there are 64 rows. Rows are queries if there are 64 or 128 of them,
    but dims of the head for 64 queries with head dim 128, and for other numbers: dq is then computed transposed.

    Attributes:
        block_M: queries in a tile.
        head_dim: the padded head dim.
    """

    block_M: int
    head_dim: int

    @property
    def transposed(self) -> bool:
        """Whether rows of the product are dims of the head."""
        return self.block_M not in (64, 128) or (self.block_M == 64 and self.head_dim == 128)

    @property
    def shares_columns(self) -> bool:
        """Whether the warpgroups divide the columns."""
        return self.shape[0] == 64

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the product."""
        return (self.head_dim, self.block_M) if self.transposed else (self.block_M, self.head_dim)

    @property
    def size(self) -> int:
        """The number of elements of a tile: first the first warpgroup's half, then the second's."""
        return self.block_M * self.head_dim

    def is_valid(self) -> bool:
        """Whether two warpgroups can hold the product, and its halves are whole rows of ``COLUMNS``.

        Half of the columns must be whole panels of K, of 16 dims or more: a wgmma cannot begin within a panel.
        """
        rows, columns = self.shape
        if self.transposed and self.shares_columns:
            return False
        return rows in (64, 128) and columns % (32 if rows == 64 else 8) == 0 and self.size % (2 * COLUMNS) == 0

    def offset(self, i: Any, j: Any) -> Any:
        """The offset in a tile's sums of the product's element in row i and column j."""
        columns = self.shape[1]
        if self.shares_columns:
            group, row, column = j // (columns // 2), i, j % (columns // 2)
        else:
            group, row, column = i // 64, i % 64, j
        thread = row // 16 * 32 + row % 8 * 4 + column % 8 // 2
        return group * (self.size // 2) + column // 8 * (4 * WARPGROUP) + thread * 4 + row % 16 // 8 * 2 + column % 2

    def place(self, i: Any, j: Any) -> tuple[Any, Any]:
        """The same offset as a row and a column, in rows of ``COLUMNS``."""
        return self.offset(i, j) // COLUMNS, self.offset(i, j) % COLUMNS
