"""What the planning kernel writes for packed sequences: rows of eight int32, a header and then the work list.

The *header* is the list's length, three zeros, and the status: what is wrong with the cumulative lengths, if anything.

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
# The r-th run's begin at start // ALIGNMENT * ALIGNMENT + r * PADDING, at least 129 rows more than it has in front of
# the next one's.
ALIGNMENT, PADDING = 16, 144

# The header's fields. KIND: 0, or one of the below, with the first sequence of which it is true and its two bounds.
COUNT, _, _, _, KIND, WRONG, WRONG_START, WRONG_END = range(WIDTH)
STATUS = slice(KIND, WIDTH)

# KIND, for the cumulative lengths of the queries; for those of the keys KEYS more.
NOT_FROM_ZERO, NOT_MONOTONE, BEYOND_TOTAL, TOO_LONG = 1, 2, 3, 4
KEYS = 4


def capacity(total: int, sequences: int, tile: int) -> int:
    """The most records that a list can have, whatever the lengths are."""
    return total // tile + sequences + 1


def padded_rows(total: int, sequences: int) -> int:
    """Rows of a workspace that has whole tiles for each run."""
    return (total + (sequences + 1) * PADDING) // ALIGNMENT * ALIGNMENT
