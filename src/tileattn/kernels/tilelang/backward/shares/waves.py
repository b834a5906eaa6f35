"""How many blocks should share the query heads of a group? A model of the waves in which blocks run.

The main kernel has a block for each tile of keys of each kv head, which walks over all query heads of the group. A GPU
runs a fixed number of blocks at a time, its *slots*. With few kv heads the last blocks leave most slots idle: 96 blocks
on 132 slots use 0.73 of the GPU. If several blocks share a group's heads, there are more blocks, each shorter. But each
share writes float32 parts of dk and dv, which another kernel adds up.

Under a causal mask long walks cost more than their tiles. Blocks that start together visit different numbers of tiles
of each head, so they drift apart, and the more heads they walk over, the fewer of their reads find what another block
has just brought into the L2 cache.

Times are in seconds, or in any other unit that :class:`Costs` has. Nothing here needs a GPU.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

# Fitted to 56 calls on an H200: batch 1 to 4, 1024 to 12345 tokens, groups of 5 to 8 heads, full and causal. Up to
# five numbers of shares were timed; what the model chooses is 0.4 % slower, on average, than the best that is allowed.
NARROW_FLOPS, WIDE_FLOPS = 565e12, 640e12  # of the main kernel with all slots busy: head dims up to 64, and beyond
NARROW = 64
WHOLE_START, SPLIT_START = 1, 2  # tiles' time before and after a block's loop: K and V come, dk and dv (or parts) go
BANDWIDTH = 1.45e12  # bytes per second that the kernel for the sums reads and writes
LAUNCH_SECONDS = 5.5e-6  # that it takes beside its traffic
# Under a mask: the heads over which a block walks at full speed, and what part of a tile's time each further head adds.
# From 15 shapes with a causal mask on an H100 (benchmarks/results/backward/groups-h100.txt). Head dims up to 64, whose
# tiles are half as large, gained under 4 % by shorter walks. At 112, rows of 224 bytes begin anywhere in the cache's
# lines.
WALK, CROWDING = 5, 0.05
ACROSS_LINES = {112: (2, 0.06)}
# A split must be predicted to save something: it takes memory.
WORTHWHILE = 0.98
# With more waves than this the last one matters little.
MANY_WAVES = 16


@dataclass(frozen=True)
class Costs:
    """Times, by default in tiles.

    Attributes:
        tile: of a tile of queries of one head.
        start: of each block that has a whole group, beside its tiles of queries.
        split_start: of each block that has a share.
        launch: of the kernel that adds up the shares.
        add: of reading a tile of keys' part of dk and dv, for one share.
        store: of writing the sum of a tile of keys.
        walk: the heads over which a block walks at full speed.
        crowding: the part of its time by which a tile takes longer for each head more.
    """

    tile: float = 1.0
    start: float = 0.0
    split_start: float = 0.0
    launch: float = 0.0
    add: float = 0.0
    store: float = 0.0
    walk: int = 1
    crowding: float = 0.0

    def of_walk(self, heads: int, tiles: int) -> float:
        """The time of a block's tiles of queries, of `heads` heads with `tiles` tiles each."""
        return heads * tiles * self.tile * (1 + self.crowding * max(heads - self.walk, 0))


@dataclass(frozen=True)
class Groups:
    """The work of a call's main kernel.

    Attributes:
        batch: batch elements, or packed sequences.
        kv_heads: heads of k and v.
        group: query heads of each.
        tiles: for each tile of keys, in the order of launch, the tiles of queries that see any of its keys.
        side_by_side: given the number of shares, how many shares of heads start with the same tile of keys, one after
            another, before the next tile begins.
    """

    batch: int
    kv_heads: int
    group: int
    tiles: Sequence[int]
    side_by_side: Callable[[int], int] = lambda shares: 1


def costs_of(block_M: int, block_N: int, head_dim: int, head_dim_v: int, slots: int, masked: bool) -> Costs:
    """The costs of a call's kernels in seconds, from the speeds above."""
    walk, crowding = ACROSS_LINES.get(head_dim, (WALK, CROWDING))
    flops = 2 * block_M * block_N * (3 * head_dim + 2 * head_dim_v)
    narrow = max(head_dim, head_dim_v) <= NARROW
    costs = _costs(flops * slots / (NARROW_FLOPS if narrow else WIDE_FLOPS), block_N * (head_dim + head_dim_v))
    return dataclasses.replace(costs, walk=walk, crowding=crowding if masked and not narrow else 0.0)


def costs_of_wide(block_M: int, block_N: int, columns: int, slots: int) -> Costs:
    """The same of the kernel for dk and dv of wide heads, whose four products have so many columns, with padding.

    Not fitted. Whole passes at head dim 256 that fill their waves run at 650 to 669 TFLOPS from 4k tokens on, of seven
    products (an H200, benchmarks/results/backward/fa-bwd-h200.json), so `WIDE_FLOPS` is near. Whether long walks cost
    more is not measured, and not reckoned with.
    """
    return _costs(2 * block_M * block_N * 4 * columns * slots / WIDE_FLOPS, block_N * 2 * columns)


def _costs(tile: float, elements: int) -> Costs:
    """Given the time of a tile of queries, and the elements of a tile of keys' part of dk and dv."""
    return Costs(
        tile=tile,
        start=WHOLE_START * tile,
        split_start=SPLIT_START * tile,
        launch=LAUNCH_SECONDS,
        add=4 * elements / BANDWIDTH,
        store=2 * elements / BANDWIDTH,
    )


def visible_tiles(seqlen_q: int, seqlen_k: int, block_M: int, block_N: int, causal: bool) -> tuple[int, ...]:
    """For each tile of keys the number of tiles of queries that see any of its keys."""
    end = -(-seqlen_q // block_M)
    keys = range(0, seqlen_k, block_N)
    if not causal:
        return (end,) * len(keys)
    # Row i stands at position i + seqlen_k - seqlen_q.
    return tuple(end - min(max(key - (seqlen_k - seqlen_q), 0) // block_M, end) for key in keys)


def heads_of_share(group: int, shares: int, share: int) -> int:
    """The number of a share's heads: as equal as possible, the first ones larger."""
    return group // shares + (share < group % shares)


def best_shares(
    groups: Groups, slots: int, most: int, costs: Costs, whole: float | None = None, worthwhile: float = WORTHWHILE
) -> int:
    """The number of shares of a group that is predicted to be fastest; 1 where a split does not save enough.

    Args:
        groups: with the tiles of the kernel that has shares, as `costs`.
        slots: blocks that run at a time.
        most: shares whose workspace is allowed.
        whole: the predicted time without shares, if that kernel has other tiles.
        worthwhile: the part of that time that a split must stay below.
    """
    if len(groups.tiles) * groups.batch * groups.kv_heads > MANY_WAVES * slots:
        return 1
    whole = predicted(groups, 1, slots, costs) if whole is None else whole
    best, least = 1, worthwhile * whole
    for shares in range(2, min(groups.group, most) + 1):
        time = predicted(groups, shares, slots, costs)
        if time < least:
            best, least = shares, time
    return best


def predicted(groups: Groups, shares: int, slots: int, costs: Costs) -> float:
    """The time of the main kernel and of the kernel that adds up the shares."""
    time = run_time(groups, shares, slots, costs)
    if shares == 1:
        return time
    key_tiles = len(groups.tiles) * groups.batch * groups.kv_heads
    return time + costs.launch + key_tiles * (shares * costs.add + costs.store)


def _blocks(groups: Groups, shares: int, costs: Costs) -> Iterator[float]:
    """The time of each block, in the order of launch."""
    start = costs.start if shares == 1 else costs.split_start
    side = groups.side_by_side(shares)
    of_batch = [heads_of_share(groups.group, shares, share) for share in range(shares) for _ in range(groups.kv_heads)]
    pairs = of_batch * groups.batch
    for first in range(0, len(pairs), side):
        for tiles in groups.tiles:
            for heads in pairs[first : first + side]:
                yield start + costs.of_walk(heads, tiles)


def run_time(groups: Groups, shares: int, slots: int, costs: Costs) -> float:
    """The time of the main kernel alone."""
    blocks = _blocks(groups, shares, costs)
    number = len(groups.tiles) * groups.batch * groups.kv_heads * shares
    if number > MANY_WAVES * slots:  # the end is not worth the host's time
        return sum(blocks) / slots * (1 + slots / (2 * number))
    return finish_time(blocks, slots)


def finish_time(blocks: Iterable[float], slots: int) -> float:
    """When the last block ends, if each starts on the slot that is free first."""
    free = [0.0] * slots
    for time in blocks:
        heapq.heapreplace(free, free[0] + time)
    return max(free)
