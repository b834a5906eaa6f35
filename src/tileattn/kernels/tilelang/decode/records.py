"""What the planning kernel writes for a decode call, and the sizes of a call's workspaces. Imports no TileLang.

A *job* is a tile of query rows of one sequence, and one kv head. The query rows of a sequence are packed: row r is
query r // group of head ``kv_head * group + r % group``, with group = heads // kv_heads. A job's keys are cut into
tiles of block_N at absolute multiples of block_N. A *part* is a run of tiles of one job, which one worker computes.

The plan is int32 (rows, WIDTH). Row p says where worker p begins, and so where worker p - 1 ends:

    JOB        the number of its first job, ``item * kv_heads + kv_head``; an item is a sequence's tile of query rows
    SEQUENCE, Q_TILE, KV_HEAD    which job that is
    TILE       the tile of keys at which the worker begins; 0: at the job's first tile
    FIRST      where TILE is not 0: the worker that has the job's first part, and so the first tile
    PARTS      where TILE is not 0: the number of the job's parts, which lie in the workers from FIRST on

PARTS holds where work is dealt freely. From column OWN on, the row has the sequence record of SEQUENCE, which a worker
would have to wait for otherwise. Behind row `workers` lie counters of the parts that have arrived, WIDTH a row. They
are 0 before and after each attention kernel, so that kernels that share a plan must follow each other.

Then come the sequence records, RECORDS a row, checked and clamped: with these the attention kernels need no lengths.

    Q_START    packed queries: the sequence's first row; else 0
    Q_LEN      its number of queries
    SEQLEN     its number of keys
    ITEMS      its number of items, with those without rows (:func:`packed_items`)

Packed queries have one more, number `batch`: of the unused rows behind the last sequence. They have no keys.

Where the mask may hide tiles between others, the lines of tiles that are visited follow (lines/visits.py).
"""

from __future__ import annotations

from typing import NamedTuple

WIDTH = 16
JOB, SEQUENCE, Q_TILE, KV_HEAD, TILE, FIRST, PARTS = range(7)
OWN = 8  # the column of a worker's own sequence record
Q_START, Q_LEN, SEQLEN, ITEMS = range(4)
RECORD = 4  # the width of a sequence record
RECORDS = WIDTH // RECORD

# What packed_keys.py writes for each sequence of packed keys, a row for each: its first query, the place of its first
# key, and how many keys it has.
KEYS_BOUND, KEYS_START, KEYS_LENGTH = range(3)
KEYS_FIELDS = 3

# Columns of a part's row behind those of O: the base of its exponents, in powers of two, and the sum of its weights.
# Rows stay multiples of 16 bytes.
STATE_COLUMNS = 4
BASE, SUM = 0, 1

MOST_WORK = 0.75  # of the blocks; see even_workers

FREE = 0  # the rule of parts where work is dealt freely

# Parts are merged in groups of GROUP, and the groups' sums then. Of a job with more than FLAT parts, the part of a
# group that arrives last merges the group, so that several blocks merge at the same time. Sums are the same either way.
GROUP, FLAT = 16, 48


class Deal(NamedTuple):
    """The sizes that a call's work is dealt by; all known on the host.

    Attributes:
        block_M: packed query rows of a job.
        block_N: keys of a tile.
        workers: blocks of the attention kernel.
        rule: FREE; n > 0: parts are cut at the absolute multiples of n tiles; -s: each job has s equal parts.
        items: the most items that there can be.
        most_parts: the most parts of a job. With FREE 2: those that a worker may have of jobs which it shares.
        most_groups: the most groups of a job, or with FREE of a worker, that have sums of their own.
        slot_rows: rows that a part in a slot has.
        least: tiles of a worker, at least 1; where there are fewer, fewer workers have work.
        jobs: how many jobs there are if all sequences have as many queries; shares of work are fitted to it.
        few: workers that have work if there are at most `few_tiles` tiles in all. Blocks that share a multiprocessor
            bring more parts to merge, and keep more bytes in flight than short calls need.
        coarse: costs of jobs count runs of ``2**coarse`` tiles.
    """

    block_M: int
    block_N: int
    workers: int
    rule: int
    items: int
    most_parts: int
    most_groups: int
    slot_rows: int
    least: int = 1
    jobs: int = 1
    few: int = 1
    few_tiles: int = 0
    coarse: int = 0


def coarse(jobs: int, tiles: int) -> int:
    """By how much costs must be shifted, so that the sum of those of `jobs` jobs of `tiles` tiles stays below 2**30."""
    return max((jobs * (tiles + 2)).bit_length() - 30, 0)


def even_workers(jobs: int, blocks: int) -> int:
    """How many of the blocks are to work: so many that jobs of one length are dealt evenly, each in as few parts.

    That is a multiple of the jobs or, where there are more jobs than blocks, such that each worker has equally many.
    If that leaves too many blocks idle, all work, and jobs are cut anywhere.
    """
    even = blocks // jobs * jobs if jobs <= blocks else -(-jobs // -(-jobs // blocks))
    return even if even >= MOST_WORK * blocks else blocks


def dense_items(batch: int, q_rows: int, block_M: int) -> int:
    """Items of sequences that have `q_rows` packed rows each."""
    return batch * -(-q_rows // block_M)


def packed_items(batch: int, total_rows: int, block_M: int) -> int:
    """The most items of packed sequences, with those of the unused rows behind the last sequence.

    Sequence b has the items from ``cu_seqlens_q[b] * group // block_M + b`` on, so that no sum over sequences is
    needed. One at its end may have no rows.
    """
    return total_rows // block_M + batch + 1


def most_parts(rule: int, capacity: int, block_N: int) -> int:
    """The most parts that a job can have under a rule that is not FREE."""
    return max(-(-capacity // (rule * block_N)), 1) if rule > 0 else -rule


def most_groups(rule: int, workers: int, most_parts: int) -> int:
    """See :class:`Deal`. A rule's first group may lack parts."""
    if rule == FREE:
        return 2 if workers > FLAT else 0
    return -(-most_parts // GROUP) + 1 if most_parts > FLAT else 0


def jobs(deal: Deal, kv_heads: int) -> int:
    """By which parts and groups are numbered: jobs, or with FREE workers.

    Two for each worker suffice: one for the job that the next worker goes on with, and one for the jobs that are its
    alone, which follow each other (walk.enter_part). A prefill chunk has many more jobs than that.
    """
    return deal.workers if deal.rule == FREE else min(deal.items * kv_heads, 2 * deal.workers)


def counter_rows(deal: Deal, kv_heads: int) -> int:
    """Rows of the plan that hold counters: of jobs, then of groups."""
    counters = jobs(deal, kv_heads) * (1 + deal.most_groups) if deal.most_parts > 1 else 0
    return -(-counters // WIDTH)


def plan_rows(deal: Deal, kv_heads: int, batch: int) -> int:
    """Rows of the plan."""
    return deal.workers + 1 + counter_rows(deal, kv_heads) + batch // RECORDS + 1


def line_rows(tiles: int) -> int:
    """Rows of the plan that a line of so many tiles takes (lines/visits.py)."""
    return -(-(2 * tiles + 2) // WIDTH)


def slots(deal: Deal, kv_heads: int) -> int:
    """Partial results that a call may have at the same time: of parts, then of groups."""
    return jobs(deal, kv_heads) * (deal.most_parts + deal.most_groups) if deal.most_parts > 1 else 0
