"""How the float32 sums of dq lie in memory, tile by tile of queries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

WARPGROUP = 128
# The sums' columns, as the Hopper schedule's kernels see them: what one bulk copy's row can be.
COLUMNS = 256


@dataclass(frozen=True)
class RegisterOrder:
    """As the tensor cores leave them in the registers of two warpgroups, which write 16 bytes per thread at a time.

    Nothing but a sum is ever asked of them before `finish` brings them into the order of q, and so they are added up
    in the order in which writing them to shared memory meets no bank conflict.

    Of the product's rows, each warp holds 16; of its columns, a thread holds two of each eight, in two rows. The
    warpgroups share the rows if there are 128, or the columns if there are 64 rows. Rows are queries if there is such a
    number of them, and else the dims of the heads: dq is then computed transposed.

    Attributes:
        block_M: queries in a tile.
        head_dim: as tiles hold it.
    """

    block_M: int
    head_dim: int

    @property
    def transposed(self) -> bool:
        """Whether rows of the product are dims."""
        return self.block_M not in (64, 128) or (self.block_M == 64 and self.head_dim == 128)

    @property
    def shares_columns(self) -> bool:
        """Whether the warpgroups share the columns."""
        return self.shape[0] == 64

    @property
    def shape(self) -> tuple[int, int]:
        """Of the product."""
        return (self.head_dim, self.block_M) if self.transposed else (self.block_M, self.head_dim)

    @property
    def size(self) -> int:
        """Elements of a tile; each warpgroup has half of them, one half after the other."""
        return self.block_M * self.head_dim

    def is_valid(self) -> bool:
        """Whether two warpgroups can hold the product, and its halves are whole rows of ``COLUMNS``.

        Half of the columns must be whole panels of K, 16 dims or more, which a wgmma cannot begin within.
        """
        rows, columns = self.shape
        if self.transposed and self.shares_columns:
            return False
        return rows in (64, 128) and columns % (32 if rows == 64 else 8) == 0 and self.size % (2 * COLUMNS) == 0

    def offset(self, i: Any, j: Any) -> Any:
        """Of the product's element in row i and column j, in a tile's sums."""
        columns = self.shape[1]
        if self.shares_columns:
            group, row, column = j // (columns // 2), i, j % (columns // 2)
        else:
            group, row, column = i // 64, i % 64, j
        thread = row // 16 * 32 + row % 8 * 4 + column % 8 // 2
        return group * (self.size // 2) + column // 8 * (4 * WARPGROUP) + thread * 4 + row % 16 // 8 * 2 + column % 2

    def place(self, i: Any, j: Any) -> tuple[Any, Any]:
        """The same in rows of ``COLUMNS``."""
        return self.offset(i, j) // COLUMNS, self.offset(i, j) % COLUMNS
