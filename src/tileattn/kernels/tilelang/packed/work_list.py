"""What the planning kernel writes for packed sequences: rows of eight int32, a header and then the work list.

The *header* is the list's length, and zeros.

Then comes one *record* for each tile of rows (queries, or keys), in order of decreasing work. All tiles of a sequence,
a *run*, have equal records, so that reading one tells everything: where its run begins in the list, and where the
sequence lies. A last run has the rows behind the last sequence, which are nobody's: it has no rows on the other side,
which begin at NOWHERE.
"""

from __future__ import annotations

WIDTH = 8

# A record's fields. FIRST: the number of its run's first record. Workspaces of the backward pass have, for each
# sequence, whole tiles of up to 128 rows, however many a tile has; they begin at PADDED_Q and PADDED_K.
SEQUENCE, FIRST, Q_START, Q_LEN, K_START, K_LEN, PADDED_Q, PADDED_K = range(WIDTH)
NOWHERE = -1
# The r-th run's begin at start // ALIGNMENT * ALIGNMENT + r * PADDING: up to the next run's it has at least 129 rows
# more than its own.
ALIGNMENT, PADDING = 16, 144

COUNT = 0  # the header's field
LISTS = 3  # that one launch writes, at most: a backward pass has three kernels


def capacity(total: int, sequences: int, tile: int) -> int:
    """The most records that a list can have, whatever the lengths are."""
    return total // tile + sequences + 1


def padded_rows(total: int, sequences: int) -> int:
    """Rows of a workspace that has whole tiles for each run."""
    return (total + (sequences + 1) * PADDING) // ALIGNMENT * ALIGNMENT
