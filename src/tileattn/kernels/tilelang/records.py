"""What the planning kernel writes for packed sequences: rows of eight int32, a header and then the work list.

The *header* is the list's length, three zeros, and the status: what is wrong with the cumulative lengths, if anything
is.

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

# The header's fields. Each of the last four, the status (tileattn.packed_status), is 0 or 1 + the number of a sequence
# of which it holds: its bounds are wrong, or it is longer than it may be, in q or in k.
COUNT, _, _, _, WRONG_Q, WRONG_K, LONG_Q, LONG_K = range(WIDTH)
STATUS = slice(WRONG_Q, WIDTH)


def capacity(total: int, sequences: int, tile: int) -> int:
    """The most records that a list can have, whatever the lengths are."""
    return total // tile + sequences + 1


def padded_rows(total: int, sequences: int) -> int:
    """Rows of a workspace that has whole tiles for each run."""
    return (total + (sequences + 1) * PADDING) // ALIGNMENT * ALIGNMENT
